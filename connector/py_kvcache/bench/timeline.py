"""What a trace file says (worker/trace.py): bursts of transfers, what each stage took, and a picture.

A burst is a time in which jobs follow each other without a pause: the six documents of a warm round, say.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from py_kvcache.errors import KvCacheError

SCHEMA: Final = "py-kvcache/bench-timeline/1"

PAUSE_S: Final = 0.25  # longer than a step of the engine, shorter than what a client waits between two rounds
_FORWARD, _SUBMIT = "forward", "submit"
_WIDTH, _DPI = 12.0, 130
_COLOURS = {
    "read": "#4c78a8", "verify": "#b279a2", "copy to device": "#f58518",
    "copy from device": "#72b7b2", "seal": "#b279a2", "write": "#54a24b", "publish": "#9d755d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took from ``begin`` to ``end``, in seconds of the traced process's monotonic clock."""

    name: str
    lane: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Recording:
    """One file: ``work`` are the stages of blocks, ``jobs`` are named "load job" and "store job"."""

    work: tuple[Bar, ...]
    jobs: tuple[Bar, ...]
    forwards: tuple[Bar, ...]
    submits: tuple[Bar, ...]

    def between(self, begin: float, end: float) -> Recording:
        """What lies in that time at least in part, whole."""

        def cut(bars: Sequence[Bar]) -> tuple[Bar, ...]:
            return tuple(bar for bar in bars if bar.end >= begin and bar.begin <= end)

        return Recording(cut(self.work), cut(self.jobs), cut(self.forwards), cut(self.submits))


def read_trace(path: str) -> Recording:
    """Raises OSError; KvCacheError if it is no file of PY_KVCACHE_TRACE."""
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        bars, jobs, begun = [], [], {}
        for event in events:
            if event["ph"] == "X":
                begin = event["ts"] / 1e6
                end = begin + event["dur"] / 1e6
                bars.append(Bar(event["name"], lanes.get(event["tid"], ""), begin, end))
            elif event["ph"] == "b":
                begun[event["id"]] = event["ts"] / 1e6
            elif event["ph"] == "e":
                jobs.append(Bar(event["name"], event["id"], begun.pop(event["id"]), event["ts"] / 1e6))
    except (ValueError, KeyError, TypeError) as error:
        raise KvCacheError(
            f"{path} is no trace of py-kvcache ({error!r}); start vLLM with PY_KVCACHE_TRACE=FILE to get one"
        ) from error
    kinds = defaultdict(list)
    for bar in bars:
        kinds[bar.name if bar.name in (_FORWARD, _SUBMIT) else "work"].append(bar)
    return Recording(tuple(kinds["work"]), tuple(jobs), tuple(kinds[_FORWARD]), tuple(kinds[_SUBMIT]))


def find_bursts(recording: Recording) -> list[tuple[float, float]]:
    """Begin and end of each burst, in order of time: jobs with no pause of PAUSE_S between them."""
    found: list[tuple[float, float]] = []
    for job in sorted(recording.jobs, key=lambda bar: bar.begin):
        if found and job.begin - found[-1][1] < PAUSE_S:
            found[-1] = found[-1][0], max(found[-1][1], job.end)
        else:
            found.append((job.begin, job.end))
    return found


def describe(recording: Recording, burst: tuple[float, float]) -> dict[str, Any]:
    """One burst in figures; times in seconds from its begin, durations in ms."""
    begin, end = burst
    part = recording.between(begin, end)
    names = dict.fromkeys(bar.name for bar in part.work)
    stages = {name: [bar for bar in part.work if bar.name == name] for name in names}
    seconds = end - begin
    return {
        "begin_s": begin,
        "seconds": seconds,
        "jobs": [
            {"name": job.name, "begin_s": job.begin - begin, "end_s": job.end - begin}
            for job in sorted(part.jobs, key=lambda job: job.begin)
        ],
        "stages": {
            name: {
                **_durations(bars),
                "first_s": min(bar.begin for bar in bars) - begin,
                "last_s": max(bar.end for bar in bars) - begin,
                "mean_in_flight": sum(bar.end - bar.begin for bar in bars) / seconds if seconds else 0.0,
            }
            for name, bars in stages.items()
        },
        "submits": _durations(part.submits),
        "forwards": _durations(part.forwards),
    }


def _durations(bars: Sequence[Bar]) -> dict[str, Any]:
    if not bars:
        return {"count": 0}
    took = np.array([bar.end - bar.begin for bar in bars]) * 1e3
    return {
        "count": len(bars),
        "median_ms": float(np.median(took)),
        "p99_ms": float(np.percentile(took, 99)),
        "most_ms": float(took.max()),
        "sum_ms": float(took.sum()),
    }


def run(path: str, *, burst: int | None = None, picture: str | None = None) -> dict[str, Any]:
    """Describe every burst of a trace, and draw one.

    Args:
        burst: which to draw, from 1 on or from -1 backwards; default: the one with most loads.
        picture: PNG file to write, None for none.
    Raises:
        KvCacheError: no trace, no such burst, or matplotlib is missing.
        OSError: the trace cannot be read, the picture not written.
    """
    recording = read_trace(path)
    found = find_bursts(recording)
    if not found:
        raise KvCacheError(
            f"{path} holds no finished load or store: nothing was loaded or stored while it was written, or "
            "the engine, which writes when it is idle, has been busy since its start or was killed"
        )
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "trace": os.path.abspath(path),
        "bursts": [describe(recording, one) for one in found],
    }
    if picture is not None:
        which = _most_loads(report["bursts"]) if burst is None else burst
        if not (1 <= which <= len(found) or -len(found) <= which <= -1):
            raise KvCacheError(f"there is no burst {which}: {path} has {len(found)}")
        report["drawn"] = which if which > 0 else len(found) + 1 + which
        draw(recording, found[report["drawn"] - 1], picture)
        report["picture"] = os.path.abspath(picture)
    return report


def _most_loads(bursts: Sequence[Mapping[str, Any]]) -> int:
    reads = [burst["stages"].get("read", {}).get("count", 0) for burst in bursts]
    return reads.index(max(reads)) + 1


def draw(recording: Recording, burst: tuple[float, float], path: str) -> None:
    """Jobs, forward steps, slots and reads in flight over one burst and what the engine did just after it."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvCacheError("a picture needs matplotlib: pip install 'py-kvcache[bench]'") from error
    begin, end = burst
    part = recording.between(begin, end + PAUSE_S)
    slots = sorted({bar.lane for bar in part.work if bar.lane != "files"}, key=_number)
    rows = {name: len(part.jobs) + 1 + n for n, name in enumerate(slots)}
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(_WIDTH, 2.5 + 0.14 * (len(rows) + len(part.jobs))), layout="constrained")
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        for row, job in enumerate(sorted(part.jobs, key=lambda job: job.begin)):
            axes.barh(row, job.end - job.begin, left=job.begin - begin, height=0.7, color="#bab0ac")
        for bar in part.forwards:
            axes.axvspan(bar.begin - begin, bar.end - begin, color="#e45756", alpha=0.15, lw=0)
        for name in dict.fromkeys(bar.name for bar in part.work):
            bars = [bar for bar in part.work if bar.name == name and bar.lane in rows]
            axes.barh(
                [rows[bar.lane] for bar in bars],
                [bar.end - bar.begin for bar in bars],
                left=[bar.begin - begin for bar in bars],
                height=0.8, color=_COLOURS.get(name, "black"), label=name,
            )  # fmt: skip
        axes.set_yticks(
            [(len(part.jobs) - 1) / 2, *rows.values()], [f"{len(part.jobs)} jobs", *rows], fontsize=6
        )
        axes.invert_yaxis()
        axes.legend(loc="upper right", fontsize=7, title="red: forward steps")
        for name in ("read", "write"):
            times, depth = _in_flight([bar for bar in part.work if bar.name == name])
            if len(times):
                below.step(times - begin, depth, where="post", color=_COLOURS[name], label=f"{name}s")
        below.set_ylabel("in flight")
        below.set_xlabel("seconds since the first job came")
        below.legend(loc="upper right", fontsize=7)
        figure.savefig(path, dpi=_DPI)


def _number(lane: str) -> tuple[str, int]:
    name, _, number = lane.rpartition(" ")
    return name, int(number) if number.isdigit() else -1


def _in_flight(bars: Sequence[Bar]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    times = np.array([bar.begin for bar in bars] + [bar.end for bar in bars])
    steps = np.repeat([1, -1], len(bars))
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(steps[order])
