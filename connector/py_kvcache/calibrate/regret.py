"""What a threshold costs against always choosing right, on prompts that it has not seen."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEAR = 0.2  # of the threshold: half of the prompts lie so close to it


@dataclass(frozen=True)
class Prompt:
    """One prefix; seconds to compute and to load it."""

    prefix: int
    compute_s: float
    load_s: float


def draw(threshold: int, block: int, longest: int, count: int, seed: int = 0) -> list[int]:
    """Prefix lengths in whole blocks, in random order: half near the threshold, half anywhere by ratio."""
    source = random.Random(seed)
    low, high = max(block, int((1 - NEAR) * threshold)), min(longest, int((1 + NEAR) * threshold))
    near = count // 2 if low <= high else 0
    lengths = [source.uniform(low, high) for _ in range(near)]
    ends = math.log(block), math.log(longest)
    lengths += [math.exp(source.uniform(*ends)) for _ in range(count - near)]
    source.shuffle(lengths)
    most = longest // block
    return [block * min(most, max(1, round(length / block))) for length in lengths]


def regret(prompts: Sequence[Prompt], threshold: int) -> dict[str, Any]:
    """Seconds of each way to choose, and what is lost against the best one of each prompt, relative to it."""
    best = sum(min(prompt.compute_s, prompt.load_s) for prompt in prompts)
    ways = {
        "threshold": sum(p.load_s if p.prefix >= threshold else p.compute_s for p in prompts),
        "always_load": sum(prompt.load_s for prompt in prompts),
        "never_load": sum(prompt.compute_s for prompt in prompts),
    }
    return {
        "prompts": [vars(prompt) for prompt in prompts],
        "best_s": best,
        **{f"{name}_s": seconds for name, seconds in ways.items()},
        **{f"{name}_regret": seconds / best - 1 for name, seconds in ways.items()},
    }
