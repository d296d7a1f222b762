"""A trace's bursts for people: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_STAGES = ("read", "verify", "copy to device", "copy from device", "seal", "write", "publish")


def show(report: Mapping[str, Any], console: Console) -> None:
    """Times in seconds, stages as blocks x median milliseconds (mean number in flight)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("burst", justify="right")
    table.add_column("at", justify="right")
    table.add_column("took", justify="right")
    table.add_column("jobs", justify="right")
    stages = [name for name in _STAGES if any(name in burst["stages"] for burst in report["bursts"])]
    for name in stages:
        table.add_column(name)
    table.add_column("forward steps")
    first = report["bursts"][0]["begin_s"]
    for number, burst in enumerate(report["bursts"], 1):
        forwards = burst["forwards"]
        table.add_row(
            f"{number}{' *' if number == report.get('drawn') else ''}",
            f"{burst['begin_s'] - first:.2f} s",
            f"{burst['seconds']:.3f} s",
            str(len(burst["jobs"])),
            *(_stage(burst["stages"].get(name)) for name in stages),
            f"{forwards['count']} x {forwards['median_ms']:.0f} ms" if forwards["count"] else "-",
        )
    console.print(table)
    console.print(
        "Blocks x median time (mean number at a time). read, write, publish: the volume; verify, seal: "
        "digests; copy: to and from the engine's KV cache.",
        style="dim",
    )
    if "picture" in report:
        console.print(f"* drawn in {report['picture']}", markup=False, highlight=False, soft_wrap=True)


def _stage(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "-"
    return f"{figures['count']} x {figures['median_ms']:.1f} ms ({figures['mean_in_flight']:.1f})"
