"""A gate's decision in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from py_kvcache.tools.show import human_bytes

_WHY = {
    "gate_off": "the gate is off: every hit is loaded",
    "no_thresholds": "there are no thresholds for this source: every hit is loaded",
    "above_threshold": "the hit is not shorter than the threshold",
    "below_threshold": "the hit is shorter than the threshold",
    "faster": "loading takes less than computing",
    "slower": "loading takes as long as computing, or longer",
    "unknown": "the rate or the time to compute is not known (--rate, --prefill or --thresholds)",
}


def show(report: Mapping[str, Any], console: Console) -> None:
    """The verdict first, then the numbers."""
    verdict = "[green]load[/]" if report["load"] else "[yellow]compute[/]"
    inputs = report["inputs"]
    why = _WHY[report["reason"]]
    if report["reason"] == "slower" and inputs["hit_tokens"] == inputs["gpu_tokens"]:
        why = "there is nothing to load"
    console.print(f"{verdict}: {why}", highlight=False)
    lines = []
    if report["reason"] == "unknown":
        lines.append("until it knows both, the connector loads the first such hit and every 20th")
    if report["load_s"] is not None:
        latency = "" if inputs["latency_s"] else " (without --latency: 0.01 to 0.04 s more on an H200)"
        lines.append(f"loading {human_bytes(inputs['load_bytes'])} takes {report['load_s']:.3f} s{latency}")
    if report["saved_s"] is not None:
        lines.append(f"computing the same tokens takes {report['saved_s']:.3f} s")
    if report["threshold_tokens"] is not None:
        lines.append(f"the threshold at this prompt length is {report['threshold_tokens']:,} tokens")
    if report["least_bytes_per_s"] is not None:
        lines.append(f"loading pays from {report['least_bytes_per_s'] / 1e9:.3g} GB/s on")
    least = report["least_hit_tokens"]
    if least is not None:
        lines.append(f"the shortest prefix of this prompt worth loading has {least:,} tokens")
    elif report["reason"] != "unknown":
        lines.append("no prefix of this prompt is worth loading")
    calibrated = report["calibrated"]
    if calibrated is not None:
        least, longest = calibrated["least_prefix"], calibrated["longest"]
        lines.append(
            f"calibrated: no prefix of up to {longest:,} tokens pays, whatever the prompt"
            if least is None
            else f"calibrated: prefixes from {least:,} tokens on pay, whatever the prompt"
        )
    for line in lines:
        console.print(f"  {line}", highlight=False)
    if report["beyond_the_curve"]:
        console.print("  [yellow]the hit is longer than what was measured: a straight line goes on there[/]")
