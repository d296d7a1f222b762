"""From the requests of every round to figures: means, ratios within a round, hits, equal answers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from py_kvcache.bench.compare import figure
from py_kvcache.bench.systems import BASELINE, FLOOR
from py_kvcache.bench.workloads import Workload

Run = Mapping[str, Any]
Requests = Sequence[Mapping[str, Any]]
_Key = tuple[str, int, str]  # label, tokens, phase


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, least and most; None each without values."""
    if not values:
        return {"median": None, "least": None, "most": None}
    return {
        "median": figure(statistics.median(values)),
        "least": figure(min(values)),
        "most": figure(max(values)),
    }


def phase_means(runs: Iterable[Run]) -> dict[_Key, dict[int, float]]:
    """Mean TTFT in seconds by label, tokens and phase, then by round."""
    means: dict[_Key, dict[int, float]] = {}
    for run in runs:
        for phase in run["phases"]:
            key = (run["system"], phase["tokens"], phase["phase"])
            times = [request["ttft_s"] for request in phase["requests"]]
            means.setdefault(key, {})[run["round"]] = statistics.mean(times)
    return means


def ratios(mine: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Mine by theirs, each within its round; rounds that either lacks are left out."""
    return [value / theirs[number] for number, value in sorted(mine.items()) if theirs.get(number)]


def hit_share(requests: Requests) -> float | None:
    """Cached tokens by prompt tokens; None if the engine did not tell."""
    if any(request.get("cached_tokens") is None for request in requests):
        return None
    return figure(
        sum(request["cached_tokens"] for request in requests)
        / sum(request["prompt_tokens"] for request in requests)
    )


def same_answers(requests: Requests, reference: Requests | None) -> bool | None:
    """Whether each prompt was answered as the first time in the reference; None where one is not there."""
    if reference is None:
        return None
    known: dict[tuple[int, int], Any] = {}
    for request in reference:
        known.setdefault(_prompt(request), request.get("output_tokens"))
    pairs = [(request.get("output_tokens"), known.get(_prompt(request))) for request in requests]
    if not pairs or any(mine is None or theirs is None for mine, theirs in pairs):
        return None
    return all(mine == theirs for mine, theirs in pairs)


def _prompt(request: Mapping[str, Any]) -> tuple[int, int]:
    return request["document"], request["prompt_tokens"]


def all_same(verdicts: Iterable[bool | None]) -> bool | None:
    """False if one is, None if none says anything."""
    said = [verdict for verdict in verdicts if verdict is not None]
    return all(said) if said else None


def results(runs: Sequence[Run], workload: Workload, labels: Sequence[str]) -> list[dict[str, Any]]:
    """One record for each system, length and phase that counts."""
    means = phase_means(runs)
    lengths = sorted({tokens for _, tokens, _ in means})
    return [
        _record(runs, means, workload, (label, tokens, phase))
        for tokens in lengths
        for phase in workload.phases
        for label in labels
        if (label, tokens, phase) in means
    ]


def _record(
    runs: Sequence[Run], means: Mapping[_Key, Mapping[int, float]], workload: Workload, key: _Key
) -> dict[str, Any]:
    label, tokens, phase = key
    mine = means[key]
    found = [(run, _phase(run, tokens, phase)) for run in runs if run["system"] == label]
    phases = [(run, one) for run, one in found if one is not None]
    cold = [same_answers(one["requests"], _requests(run, tokens, workload)) for run, one in phases]
    recomputed = [
        same_answers(one["requests"], _requests(_run(runs, BASELINE, run["round"]), tokens, workload))
        for run, one in phases
    ]
    shares = [share for _, one in phases if (share := hit_share(one["requests"])) is not None]
    by_label = {other for other, _, _ in means}
    floors = sorted(other for other in by_label if other.partition(":")[0] == FLOOR)
    of_floor = ratios(mine, means.get((floors[0], tokens, phase), {})) if floors else []
    return {
        "system": label,
        "tokens": tokens,
        "phase": phase,
        "rounds": len(mine),
        "mean_ttft_s": spread(list(mine.values())),
        "of_recompute": spread(ratios(mine, means.get((BASELINE, tokens, phase), {}))),
        "of_floor": spread(of_floor),
        "last_s": spread([max(r["submitted_s"] + r["ttft_s"] for r in one["requests"]) for _, one in phases]),
        "hit_share": spread(shares),
        "own_read_bytes": _median(phases, "own_read_bytes"),
        "own_written_bytes": _median(phases, "own_written_bytes"),
        "device_read_bytes": _median_io(phases, "read_bytes"),
        "device_written_bytes": _median_io(phases, "write_bytes"),
        "call_read_bytes": _median_io(phases, "rchar"),
        "call_written_bytes": _median_io(phases, "wchar"),
        "same_tokens_as_cold": all_same(cold),
        "same_tokens_as_recompute": all_same(recomputed),
        "settled": all(one.get("settled", True) for _, one in phases),
        "mean_by_round": {str(number): figure(value) for number, value in sorted(mine.items())},
    }


def _phase(run: Run | None, tokens: int, phase: str) -> Mapping[str, Any] | None:
    for one in run["phases"] if run is not None else ():
        if one["tokens"] == tokens and one["phase"] == phase:
            return dict(one)
    return None


def _requests(run: Run | None, tokens: int, workload: Workload) -> Requests | None:
    """Of all phases, in their order: what a prompt was first answered with is what it was computed to."""
    phases = [_phase(run, tokens, phase) for phase in workload.phases]
    return None if phases[0] is None else [one for found in phases if found for one in found["requests"]]


def _run(runs: Sequence[Run], label: str, number: int) -> Run | None:
    return next((run for run in runs if run["system"] == label and run["round"] == number), None)


def _median(phases: Sequence[tuple[Run, Mapping[str, Any]]], name: str) -> int | None:
    values = [one[name] for _, one in phases if one.get(name) is not None]
    return int(statistics.median(values)) if values else None


def _median_io(phases: Sequence[tuple[Run, Mapping[str, Any]]], name: str) -> int | None:
    values = [one["io"][name] for _, one in phases if one.get("io")]
    return int(statistics.median(values)) if values else None


_COLUMNS = ("tokens", "phase", "system", "TTFT s", "least-most", "last s", "x recompute", "x floor", "hits",
            "read GB", "written GB", "same text")  # fmt: skip


def table(report: Mapping[str, Any]) -> str:
    """The results for people: one line a system, length and phase."""
    rows = [_COLUMNS, *(_row(record) for record in report["results"])]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"skipped: {skipped['system']}: {skipped['why']}" for skipped in report["skipped"]]
    failed = [run for run in report["runs"] if run["error"] is not None]
    lines += [f"failed: round {run['round'] + 1}, {run['system']}: {_why(run)}" for run in failed]
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join(line.rstrip() for line in lines)


def _why(run: Run) -> str:
    """The status and the first thing that the log says about it."""
    return "; ".join([run["error"], *run["log_tail"][:1]])


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    mean = record["mean_ttft_s"]
    reads = record["own_read_bytes"] if record["own_read_bytes"] is not None else record["call_read_bytes"]
    writes = (
        record["own_written_bytes"]
        if record["own_written_bytes"] is not None
        else record["call_written_bytes"]
    )
    same = record["same_tokens_as_recompute"]
    return (
        f"{record['tokens']:,}",
        record["phase"],
        record["system"],
        _number(mean["median"]),
        f"{_number(mean['least'])}-{_number(mean['most'])}",
        _number(record["last_s"]["median"]),
        _number(record["of_recompute"]["median"]),
        _number(record["of_floor"]["median"]),
        "-" if record["hit_share"]["median"] is None else f"{record['hit_share']['median']:.0%}",
        "-" if reads is None else f"{reads / 1e9:.2f}",
        "-" if writes is None else f"{writes / 1e9:.2f}",
        {True: "yes", False: "no", None: "-"}[same],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
