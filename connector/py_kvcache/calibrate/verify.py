"""`py-kvcache calibrate verify`: does loading pay just above each threshold, and not just below it?"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

from py_kvcache.bench.workspace import Progress, no_progress, workspace
from py_kvcache.calibrate.asked import Asked, MeasureConfig, asked_engine
from py_kvcache.calibrate.regret import Prompt, draw, regret
from py_kvcache.errors import ConfigError
from py_kvcache.models import Source, Thresholds

SCHEMA: Final = "py-kvcache.calibrate.verify/1"
ROUNDS: Final = 7
_PROMPT_ROUNDS = 2  # at most
_CLOSE = 0.05  # of the time to compute: differences below it may be either


@dataclass(frozen=True)
class Check:
    """One prefix, measured again.

    Attributes:
        expected: whether loading should be faster here.
        compute_s, load_s: medians.
    """

    source: Source
    prefix: int
    expected: bool
    compute_s: float
    load_s: float

    @property
    def verdict(self) -> str:
        """Also "close": too close to call."""
        gain = self.compute_s - self.load_s
        if (gain > 0) == self.expected:
            return "as expected"
        return "close" if abs(gain) <= _CLOSE * self.compute_s else "contradicts"


def prefixes(threshold: int, block: int, longest: int) -> tuple[tuple[int, bool], ...]:
    """Whole blocks next to a threshold on both sides, and whether loading them should pay."""
    above = -(-max(threshold, 1) // block) * block
    below = min(above - block, longest // block * block)
    wanted = [(below, False)] if block <= below < threshold else []
    if above <= longest:
        wanted.append((above, True))
    return tuple(wanted)


def run(
    config: MeasureConfig,
    thresholds: Thresholds,
    *,
    rounds: int = ROUNDS,
    prompts: int = 0,
    on_progress: Progress = no_progress,
) -> dict[str, Any]:
    """Measure; the report, ready for JSON.

    Args:
        rounds: measurements of each side of a threshold; of a random prefix at most two.
        prompts: so many prefixes of random lengths are tried besides, for each source.

    Raises:
        ConfigError: the file is of another engine, or has no thresholds. KvCacheError, RootError, OSError.
    """
    if not thresholds.exact:
        raise ConfigError("the file has no exact threshold to verify: none was found when it was made")
    checks: list[Check] = []
    regrets: dict[str, Any] = {}
    done, total = 0, (2 * rounds + prompts) * len(thresholds.exact)

    def tell(text: str) -> None:
        on_progress(min(done, total - 1), total, text)

    begin = time.monotonic()
    with workspace(config.serve.root, 0) as folder:
        for source, threshold in sorted(thresholds.exact.items()):
            settings: dict[str, Any] = {"memory_bytes": 0} if source == "disk" else {}
            with asked_engine(config, folder, settings, tell) as asked:
                if asked.digest() != thresholds.engine:
                    raise ConfigError(
                        f"the thresholds are of engine {thresholds.engine}, this one is {asked.digest()}: "
                        "give the model and the options they were measured with"
                    )
                longest = min(asked.longest - 2, asked.kv_tokens - config.block_tokens)
                for prefix, expected in prefixes(threshold, config.block_tokens, longest):
                    tell(f"{prefix} tokens from {source}")
                    checks.append(_check(asked, source, prefix, expected, rounds))
                    done += rounds
                if prompts:
                    tried: list[Prompt] = []
                    for prefix in draw(threshold, config.block_tokens, longest, prompts):
                        tell(f"{prefix} tokens from {source}, of {prompts} prompts")
                        few = min(rounds, _PROMPT_ROUNDS)
                        check = _check(asked, source, prefix, prefix >= threshold, few)
                        tried.append(Prompt(prefix, check.compute_s, check.load_s))
                        done += 1
                    regrets[source] = regret(tried, threshold)
    verdicts = [check.verdict for check in checks]
    return {
        "schema": SCHEMA,
        "seconds": round(time.monotonic() - begin, 1),
        "rounds": rounds,
        "checks": [vars(check) | {"verdict": check.verdict} for check in checks],
        "regret": regrets,
        "good": "contradicts" not in verdicts and bool(verdicts),
    }


def _check(asked: Asked, source: Source, prefix: int, expected: bool, rounds: int) -> Check:
    asked.store(prefix, 1)
    if source == "memory":
        asked.load(prefix, 1)
    computed, loaded = [], []
    for number in range(rounds):
        for first in (number % 2 == 0, number % 2 != 0):
            if first:
                computed.append(asked.compute(prefix, 1).ttft_s)
            else:
                loaded.append(asked.load(prefix, 1).ttft_s)
    return Check(source, prefix, expected, statistics.median(computed), statistics.median(loaded))
