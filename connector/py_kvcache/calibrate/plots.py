"""Pictures of a fit, as PNG bytes. matplotlib is optional (extra ``bench``)."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

from py_kvcache.calibrate.fit import Fit
from py_kvcache.calibrate.points import Measured

_DPI: Final = 120
_STEPS: Final = 200


def draw(found: Fit) -> tuple[dict[str, bytes], list[str]]:
    """PNG files by name, and sentences about what could not be drawn."""
    if found.prefill.curve is None:
        return {}, [f"no pictures: {found.prefill.reason}"]
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return {}, ["no pictures: matplotlib is not installed (pip install matplotlib)"]
    wanted: list[tuple[str, Callable[[Any, Fit], None]]] = [("ttft.png", _ttft)]
    if any(not tier.reason for tier in found.tiers):
        wanted.append(("frontier.png", _frontier))
    if any(tier.bandwidth for tier in found.tiers):
        wanted.append(("bandwidth.png", _bandwidth))
    pictures = {}
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9}):
        for name, make in wanted:
            figure = Figure(figsize=(8.0, 4.5), layout="constrained")
            axes = figure.subplots()
            make(axes, found)
            axes.legend()
            target = io.BytesIO()
            figure.savefig(target, format="png", dpi=_DPI)
            pictures[name] = target.getvalue()
    return pictures, []


def _ttft(axes: Any, found: Fit) -> None:
    _curve(axes, "computed", found.prefill)
    for tier in found.tiers:
        if tier.measured.points:
            _curve(axes, f"loaded from {tier.source}", tier.measured)
        if not tier.reason and tier.exact is not None:
            axes.axvline(
                tier.exact, color="black", linestyle=":", label=f"{tier.source}: {tier.exact:,} tokens"
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens computed, or loaded")
    axes.set_ylabel("TTFT in seconds, median and interval")
    axes.set_title("Time to first token")


def _curve(axes: Any, name: str, measured: Measured) -> None:
    points = measured.points
    middle = [point.median.seconds for point in points]
    container = axes.errorbar(
        [point.tokens for point in points], middle, fmt="o", capsize=3, markersize=3,
        yerr=(
            [m - point.median.low for m, point in zip(middle, points, strict=True)],
            [point.median.high - m for m, point in zip(middle, points, strict=True)],
        ),
        label=name if measured.curve else f"{name} (unknown)",
    )  # fmt: skip
    if measured.curve is not None:
        first, last = measured.curve.points[0][0], measured.curve.reach
        at = [first * (last / first) ** (n / _STEPS) for n in range(_STEPS + 1)]
        axes.plot(at, [measured.curve(tokens) for tokens in at], color=container[0].get_color())


def _frontier(axes: Any, found: Fit) -> None:
    for number, tier in enumerate(found.tiers):
        pays = [(prompt, 100 * least / prompt) for prompt, least in tier.frontier if least is not None]
        if pays:
            label = f"{tier.source}, the paper's rule"
            axes.plot(*zip(*pays, strict=True), color=f"C{number + 1}", marker=".", label=label)
        if tier.exact is not None:
            prompts = [prompt for prompt, _ in tier.frontier if prompt >= tier.exact]
            shares = [100 * tier.exact / prompt for prompt in prompts]
            axes.plot(prompts, shares, color=f"C{number + 1}", linestyle="--", label=f"{tier.source}, exact")
    if not axes.lines:
        axes.plot([], [], label="no prefix pays")
    axes.set_xscale("log")
    axes.set_ylim(0, 105)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("least prefix worth loading, % of the prompt")
    axes.set_title("Break-even frontier: above a line, load")


def _bandwidth(axes: Any, found: Fit) -> None:
    for number, tier in enumerate(found.tiers):
        style = {"color": f"C{number + 1}", "marker": "o", "markersize": 3}
        needed = [(one.tokens, one.needed / 1e9) for one in tier.bandwidth if one.needed is not None]
        had = [(one.tokens, one.had / 1e9) for one in tier.bandwidth]
        if needed:
            axes.plot(*zip(*needed, strict=True), linestyle="--", label=f"{tier.source}: needed", **style)
        if had:
            axes.plot(*zip(*had, strict=True), label=f"{tier.source}: had", **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("prefix tokens")
    axes.set_ylabel("GB/s")
    axes.set_title("Storage bandwidth: needed to break even, and had")
