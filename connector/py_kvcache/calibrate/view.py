"""Fits, files and comparisons as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show_fit(report: Mapping[str, Any], console: Console) -> None:
    """The verdict first, what to think of it, and where the files are."""
    _verdict(report["summary"], console)
    for other in report["under_load"]:
        _lines((f"{line} ({other['concurrency']} requests at a time)" for line in other["summary"]), console)
        _warn(other["warnings"], console)
    _warn([*report["warnings"], *(f"skipped: {text}" for text in report["skipped"])], console)
    _lines((*report["thinning"], *report["notes"]), console)
    _lines((f"written: {path}" for path in report["files"]), console)


def show_file(report: Mapping[str, Any], console: Console) -> None:
    """Of either kind."""
    content = report["content"]
    _verdict(report["summary"], console)
    console.print(f"{report['kind']} of engine {content['engine']}", highlight=False)
    if report["kind"] == "thresholds":
        _thresholds(content, console)
        return
    console.print(
        f"  created {escape(content['created'])}, prompts up to {content['longest']:,} tokens",
        highlight=False,
    )
    _lines((f"{name}: {_cell(value)}" for name, value in content["machine"].items()), console)
    for one in content["sets"]:
        _set(one, console)
    _warn((f"skipped: {text}" for text in content["skipped"]), console)


def _thresholds(content: Mapping[str, Any], console: Console) -> None:
    for one in (content, *content["under_load"]):
        console.print(f"[bold]{one['concurrency']} at a time[/]", highlight=False)
        for source, table in one["thresholds"].items():
            rows = [(prompt, "none" if least > prompt else least) for prompt, least in table]
            _table((f"prompt ({source})", "least prefix"), rows, console)
        _table(
            ("tokens computed", "seconds"), [(round(at), seconds) for at, seconds in one["prefill"]], console
        )
    _lines((f"{name}: {value}" for name, value in content["made"].items()), console)


def _set(one: Mapping[str, Any], console: Console) -> None:
    console.print(f"[bold]{one['concurrency']} at a time[/]", highlight=False)
    named = {"computed": one["compute"]} | {
        f"from {name}": source["points"] for name, source in one["sources"].items()
    }
    for name, points in named.items():
        rows = [(p["tokens"], p["seconds"], p["low"], p["high"], p["count"]) for p in points]
        _table((f"tokens {name}", "median s", "low", "high", "samples"), rows, console)
    for name, source in one["sources"].items():
        rates = [(b["tokens"], _giga(b["needed"]), _giga(b["had"])) for b in source["bandwidth"]]
        _table((f"prefix ({name})", "needed GB/s", "had GB/s"), rates, console)
    if one["largest_suffix_error"] is not None:
        error = one["largest_suffix_error"]
        console.print(f"  what a cached prefix spares is off f(P) by {error:+.1%} at most", highlight=False)
    _warn(one["warnings"], console)


def show_comparison(report: Mapping[str, Any], console: Console) -> None:
    """Ratios are second to first."""
    _warn(report["warnings"], console)
    rows = [(row["source"], row["first"], row["second"]) for row in report["thresholds"]]
    _table(("exact threshold", "first", "second"), rows, console)
    for name in ("compute", "disk", "memory"):
        times = [(row["tokens"], row["first_s"], row["second_s"], row["ratio"]) for row in report[name]]
        _table((f"tokens ({name})", "first s", "second s", "ratio"), times, console)
    for name in ("machine", "arguments"):
        others = [(row["name"], row["first"], row["second"]) for row in report[name]]
        _table((name, "first", "second"), others, console)


def _verdict(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(f"[bold]{escape(line)}[/]", highlight=False)


def _lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(f"  {escape(line)}", highlight=False)


def _warn(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(f"  [yellow]{escape(line)}[/]", highlight=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], console: Console) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for number, name in enumerate(head):
        table.add_column(f"  {escape(name)}" if number == 0 else escape(name))
    for row in rows:
        table.add_row(
            *(("  " if not number else "") + escape(_cell(cell)) for number, cell in enumerate(row))
        )
    console.print(table)


def _giga(rate: float | None) -> float | str:
    return "-" if rate is None else rate / 1e9


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else json.dumps(value, default=str)


def show_checks(report: Mapping[str, Any], console: Console) -> None:
    """What was measured next to thresholds."""
    rows = []
    for check in report["checks"]:
        where, says = (
            f"{check['prefix']:,} from {check['source']}",
            "load" if check["expected"] else "compute",
        )
        times = f"{check['compute_s']:.4g}", f"{check['load_s']:.4g}"
        rows.append((where, *times, says, check["verdict"]))
    _table(("prefix", "computed, s", "loaded, s", "threshold says", "verdict"), rows, console)
    for source, found in report["regret"].items():
        names = ("threshold", "always_load", "never_load")
        told = ", ".join(f"{name.replace('_', ' ')} {found[f'{name}_regret']:.1%}" for name in names)
        _lines(
            [f"{source}, {len(found['prompts'])} prompts, lost against always choosing right: {told}"],
            console,
        )
