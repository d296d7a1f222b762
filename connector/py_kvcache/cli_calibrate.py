"""`py-kvcache calibrate <command>`: arguments, output streams and exit codes; the work is in calibrate/."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from py_kvcache.cli_options import CONTEXT, Json
from py_kvcache.tools.terminal import GOOD, PROBLEM, answer, failures

calibrate = typer.Typer(
    help="From which prefix length on loading beats computing, on this node with this engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=CONTEXT,
)


@calibrate.command(
    "fit",
    epilog="Examples:\n\n`py-kvcache calibrate fit calibration.json --out results`\n\n"
    "`py-kvcache calibrate fit calibration.json --out results --json | jq .summary`\n\n"
    "`py-kvcache calibrate fit /r/calibration.json --out /r --termination-log /dev/termination-log` (a pod)",
)
def calibrate_fit(
    path: Annotated[str, typer.Argument(metavar="CALIBRATION", help="calibration.json, as measured.")],
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for thresholds.json, report.html and pictures.")
    ],
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at a time of the set that counts; others go beside it.")
    ] = 1,
    termination_log: Annotated[
        str,
        typer.Option(metavar="PATH", help="Also write the thresholds there, or what went wrong, in 1 KiB."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Make thresholds of what was measured, and a report with plots. Needs no engine.

    A source with too few lengths, or whose times fall as prompts grow, is unknown and left out: the adaptive
    gate decides then. The exit code is 1 if no source has a threshold.
    """
    from py_kvcache.calibrate import outputs as tool
    from py_kvcache.calibrate import view

    with failures(tool.SCHEMA, as_json):
        report = tool.run(path, out, concurrency, termination_log)
        answer(lambda: json.dumps(report, indent=2), as_json, lambda console: view.show_fit(report, console))
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


@calibrate.command(
    "show",
    epilog="Examples:\n\n`py-kvcache calibrate show thresholds.json`\n\n"
    "`py-kvcache calibrate show calibration.json --json | jq .content.machine`",
)
def calibrate_show(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="calibration.json or thresholds.json, or a folder of these.")
    ],
    as_json: Json = False,
) -> None:
    """Tell in words and tables what a file of calibration says."""
    from py_kvcache.calibrate import show as tool
    from py_kvcache.calibrate import view

    with failures(tool.SCHEMA, as_json):
        report = tool.describe(path)
        answer(lambda: json.dumps(report, indent=2), as_json, lambda console: view.show_file(report, console))


@calibrate.command(
    "compare",
    epilog="Examples:\n\n`py-kvcache calibrate compare before.json after.json`\n\n"
    "`py-kvcache calibrate compare a/calibration.json b/calibration.json --json | jq .thresholds`",
)
def calibrate_compare(
    first: Annotated[str, typer.Argument(metavar="A", help="calibration.json.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one; ratios are B / A.")],
    as_json: Json = False,
) -> None:
    """Put two calibrations side by side: times by length, thresholds, and where the machines differ."""
    from py_kvcache.calibrate import compare as tool
    from py_kvcache.calibrate import view
    from py_kvcache.models import read_calibration

    with failures(tool.SCHEMA, as_json):
        report = tool.compare(read_calibration(first), read_calibration(second))
        answer(
            lambda: json.dumps(report, indent=2),
            as_json,
            lambda console: view.show_comparison(report, console),
        )
