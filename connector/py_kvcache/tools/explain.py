"""`py-kvcache explain`: would a hit be worth loading, and from which rate or length on.

The decision is the gate's own (scheduler/policy.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

from py_kvcache.curves import Curve
from py_kvcache.errors import ConfigError
from py_kvcache.models import Thresholds, read_thresholds, thresholds_path
from py_kvcache.scheduler.policy import Decision, GateInputs, Mode, Table, decide
from py_kvcache.tools.show import errno_text

SCHEMA: Final = "py-kvcache/explain/1"


@dataclass(frozen=True)
class Question:
    """What is asked; tokens, bytes, seconds.

    Attributes:
        block_tokens: only whole blocks of so many are stored, and loaded.
        prefill: points (tokens, seconds) of computing a prompt; from thresholds.json where empty.
    """

    mode: Mode
    prompt_tokens: int
    hit_tokens: int
    gpu_tokens: int
    token_bytes: int
    bytes_per_s: float
    queued_bytes: int
    latency_s: float
    source: str
    block_tokens: int
    prefill: tuple[tuple[float, float], ...] = ()
    thresholds: str = ""


def parse_points(text: str) -> tuple[tuple[float, float], ...]:
    """Points as ``1024=0.05,8192=0.4``. Raises ConfigError."""
    try:
        pairs = [part.partition("=")[::2] for part in text.split(",") if part]
        points = tuple((float(tokens), float(seconds)) for tokens, seconds in pairs)
        Curve(points)
        for (tokens, less), (more_tokens, seconds) in pairwise(points):
            if seconds < less:
                raise ValueError(
                    f"{more_tokens:g} tokens cannot take less ({seconds:g} s) than {tokens:g} ({less:g} s)"
                )
    except ValueError as error:
        raise ConfigError(f"{text[:60]!r} are no points such as 1024=0.05,8192=0.4: {error}") from None
    return points


def explain(question: Question) -> dict[str, Any]:
    """The decision with its numbers. Raises ConfigError."""
    if not question.gpu_tokens <= question.hit_tokens <= question.prompt_tokens:
        raise ConfigError("a hit lies between what the GPU has and the prompt: --gpu <= --hit <= --prompt")
    if question.mode is Mode.ADAPTIVE and question.bytes_per_s and not question.token_bytes:
        raise ConfigError(
            "--token-bytes is missing: KV bytes of one token on one rank, 2 x layers x KV heads x head size "
            "x bytes of a number / tensor-parallel size"
        )
    file = _read(question.thresholds) if question.thresholds else None
    prefill = Curve(question.prefill) if question.prefill else file.curve() if file else None
    inputs = GateInputs(
        question.prompt_tokens,
        question.gpu_tokens,
        question.hit_tokens,
        (question.hit_tokens - question.gpu_tokens) * question.token_bytes,
        question.bytes_per_s,
        question.queued_bytes,
        question.latency_s,
        prefill,
        _table(file, question.source),
    )
    decision = decide(question.mode, inputs)
    return {
        "schema": SCHEMA,
        "gate": question.mode.value,
        "load": decision.load,
        "reason": decision.reason.value,
        "load_s": decision.load_s,
        "saved_s": decision.saved_s,
        "threshold_tokens": decision.threshold,
        "least_bytes_per_s": _least_rate(inputs, decision),
        "least_hit_tokens": _least_hit(question, inputs),
        "calibrated": _calibrated(file, question.source),
        "beyond_the_curve": prefill is not None and question.hit_tokens > prefill.reach,
        "inputs": {**asdict(replace(inputs, prefill=None)), "prefill": prefill and prefill.points},
    }


def _read(given: str) -> Thresholds:
    path = thresholds_path(given)
    try:
        return read_thresholds(path)
    except OSError as error:
        remedy = "give the thresholds.json that `py-kvcache calibrate fit` wrote"
        raise ConfigError(f"{path}: {errno_text(error.errno or 0)}; {remedy}") from None


def _table(file: Thresholds | None, source: str) -> Table | None:
    tables = file.thresholds.items() if file else ()
    return next((table for name, table in tables if name == source), None)


def _calibrated(file: Thresholds | None, source: str) -> dict[str, int | None] | None:
    """The least prefix that pays whatever the prompt (None: none does), and the longest one measured."""
    least = next((least for name, least in file.exact.items() if name == source), None) if file else None
    if file is None or least is None or not file.prefill:
        return None
    reach = int(file.prefill[-1][0])
    return {"least_prefix": least if least <= reach else None, "longest": reach}


def _least_rate(inputs: GateInputs, decision: Decision) -> float | None:
    """At which the load takes as long as what it saves; None where no rate would do."""
    saved = decision.saved_s
    if saved is None or saved <= inputs.latency_s:
        return None
    return (inputs.load_bytes + inputs.queued_bytes) / (saved - inputs.latency_s)


def _least_hit(question: Question, inputs: GateInputs) -> int | None:
    """The shortest prefix of this prompt that would be loaded, in whole blocks; None if none would."""
    block = question.block_tokens
    for hit in range((question.gpu_tokens // block + 1) * block, question.prompt_tokens + 1, block):
        load_bytes = (hit - question.gpu_tokens) * question.token_bytes
        if decide(question.mode, replace(inputs, hit_tokens=hit, load_bytes=load_bytes)).load:
            return hit
    return None


def as_json(report: Mapping[str, Any]) -> str:
    """One object."""
    return json.dumps(report, indent=2)
