"""What `inspect` prints for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from py_kvcache.tools.inspection import AGES, InspectReport, NamespaceReport
from py_kvcache.tools.show import counted, human_age, human_bytes, printable

_BAR = 24
_STATES = {
    "missing": "no config.json: nothing says what these blocks belong to",
    "other": "config.json is not by py-kvcache: another program's cache (llm-d, vLLM's own file tier)",
    "unreadable": "config.json cannot be read",
    "damaged": "config.json is damaged",
}


def show(report: InspectReport, console: Console) -> None:
    """Print the report; wide names wrap, nothing is cut."""
    volume = report.volume
    usable, used = volume["usable_bytes"], volume["used_bytes"]
    console.print(
        f"[bold]{escape(printable(report.root))}[/]  {counted(len(report.namespaces), 'namespace')}, "
        f"{counted(sum(n.blocks for n in report.namespaces.values()), 'block')}, "
        f"{human_bytes(sum(n.bytes for n in report.namespaces.values()))}; "
        f"volume {used / max(1, usable):.0%} used, {human_bytes(usable - used)} free"
    )
    for space in report.namespaces.values():
        console.print()
        _show_space(space, console)
    if not report.namespaces and not report.wrong_root:
        console.print("No namespace yet: nothing has been stored here, or this is not the cache's root.")
    _show_rest(report, console)


def _show_space(space: NamespaceReport, console: Console) -> None:
    fields = space.config.fields
    model = printable(str(fields.get("model", space.model)))
    console.print(f"[bold cyan]{escape(model)}[/]  digest {space.digest}", highlight=False)
    facts = [f"{k.replace('_', ' ')} {fields[k]}" for k in ("engine", "dtype", "block_tokens") if k in fields]
    if facts:
        console.print(f"  {escape(printable(', '.join(facts)))}", highlight=False)
    if space.config.state in _STATES:
        console.print(f"  [yellow]{_STATES[space.config.state]}[/] {escape(space.config.detail)}")
    if space.parts:
        table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
        for column in ("  part", "blocks", "bytes", "block size", "folders", "empty"):
            table.add_column(column, justify="right")
        for part, tally in sorted(space.parts.items()):
            sizes = [
                f"{human_bytes(s) if s >= 0 else 'others'} x {n:,}" for s, n in tally.sizes.most_common(3)
            ]
            if len(tally.sizes) > len(sizes):
                sizes.append("...")
            table.add_row(
                f"r{part}", f"{tally.blocks:,}", human_bytes(tally.bytes), ", ".join(sizes),
                f"{tally.folders:,}", f"{tally.empty_folders:,}",
            )  # fmt: skip
        console.print(table)
    if space.blocks:
        _show_ages(space, console)
    if space.temporaries:
        console.print(
            f"  {counted(space.temporaries, 'temporary', 'temporaries')} "
            f"({human_bytes(space.temporary_bytes)}), {space.dead_temporaries:,} of them dead "
            "(15 min old; safe to delete)",
            highlight=False,
        )
    if space.ahead:
        console.print(
            f"  [yellow]{counted(space.ahead, 'file')} from the future: a client's clock is ahead[/]"
        )


def _show_ages(space: NamespaceReport, console: Console) -> None:
    console.print(
        f"  stored {human_age(max(0.0, space.newest or 0))} to {human_age(space.oldest or 0)} ago",
        highlight=False,
    )
    most = max(n for n, _ in space.ages)
    for (name, _), (n, size) in zip(AGES, space.ages, strict=True):
        if n:
            bar = "█" * max(1, round(_BAR * n / most))
            label = name if name == "older" else f"< {name}"
            console.print(f"    {label:>9}  {bar:<{_BAR}}  {n:>9,}  {human_bytes(size):>10}", highlight=False)


def _show_rest(report: InspectReport, console: Console) -> None:
    if report.unknown:
        kinds = ", ".join(counted(n, what) for what, n in sorted(report.unknown.items()))
        console.print(f"\nNot ours, left alone: {kinds}", highlight=False)
    for example in report.examples:
        note = ", in a block's place" if example["in_the_way"] else ""
        error = f" [red]{example['errno']}[/]" if example["errno"] else ""
        console.print(
            f"  {escape(example['path'])} ({example['what']}{note}){error}", highlight=False, style="dim"
        )
    rest = sum(report.unknown.values()) + sum(report.errors.values()) - len(report.examples)
    if rest > 0:
        console.print(f"  and {rest:,} more", style="dim")
    if report.clock.source != "file system":
        console.print("Ages are by this host's clock: no probe file could be made in the root.", style="dim")
    for problem in report.problems:
        console.print(f"[red]problem:[/] {escape(problem)}", highlight=False)
