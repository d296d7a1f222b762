"""Calibrations of made-up machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from py_kvcache.models import CALIBRATION_SCHEMA, Calibration

LENGTHS = (256, 1024, 4096, 8192, 16384, 32000)
TOKEN_BYTES, BLOCK = 114_688, 16

Seconds = Callable[[int], float]


def computing(tokens: int) -> float:
    """As a GPU: a start, a linear and a quadratic part."""
    return 0.01 + 1e-5 * tokens + 2.4e-10 * tokens**2


def loading(rate: float, start: float = 0.012) -> Seconds:
    """At so many bytes a second."""
    return lambda tokens: start + TOKEN_BYTES * tokens / rate


def samples_of(
    kind: str, seconds: Seconds, *, rounds: int = 3, noise: float = 0.01, lengths: tuple[int, ...] = LENGTHS,
    copy: Seconds | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The median over the rounds is ``seconds`` itself."""
    found = []
    for number in range(rounds):
        for tokens in lengths:
            factor = 1 + noise * (number - rounds // 2)
            one = {"kind": kind, "tokens": tokens, "seconds": seconds(tokens) * factor, "round": number}
            if kind != "compute":
                one |= {"tokens": tokens + 8, "prefix": tokens, "copy_s": copy(tokens) if copy else None}
            found.append(one)
    return found


def content_of(samples: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """calibration.json; disk crosses computing between 8,192 and 32,000 tokens, memory always pays."""
    if samples is None:
        samples = [
            *samples_of("compute", computing),
            *samples_of("disk", loading(7e9), copy=lambda tokens: TOKEN_BYTES * tokens / 7e9),
            *samples_of("memory", loading(50e9, 0.001), copy=lambda tokens: TOKEN_BYTES * tokens / 50e9),
        ]
    return {
        "schema": CALIBRATION_SCHEMA,
        "engine": "0123456789abcdef",
        "block_tokens": BLOCK,
        "block_bytes": TOKEN_BYTES * BLOCK,
        "ranks": 1,
        "longest": 32_256,
        "machine": {"gpu": "H200", "file_system": "ext4"},
        "arguments": {"model": "m/3b"},
        "skipped": [],
        "created": "2026-11-30T21:00:00+00:00",
        "sets": [{"concurrency": 1, "samples": samples}],
        **changes,
    }


class Made:
    """What tests take from here: importlib mode has no module to import it from."""

    lengths, token_bytes, block = LENGTHS, TOKEN_BYTES, BLOCK
    computing = staticmethod(computing)
    loading = staticmethod(loading)
    samples = staticmethod(samples_of)
    content = staticmethod(content_of)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def calibration(self, samples: list[dict[str, Any]] | None = None, **changes: Any) -> Calibration:
        return Calibration.model_validate(content_of(samples, **changes))

    def file(self, name: str = "calibration.json", **changes: Any) -> str:
        path = self.folder / name
        path.write_text(json.dumps(content_of(**changes)))
        return str(path)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)
