"""`py-kvcache calibrate <command>`: arguments, output streams and exit codes; the work is in calibrate/."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from py_kvcache.cli_options import CONTEXT, BenchRoot, Json, duration, json_object, numbers
from py_kvcache.tools.terminal import GOOD, PROBLEM, answer, failures, steps

if TYPE_CHECKING:
    from py_kvcache.bench.serve_config import ServeConfig

calibrate = typer.Typer(
    help="From which prefix length on loading beats computing, on this node with this engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=CONTEXT,
)


Model = Annotated[
    str, typer.Option(metavar="DIR", help="Folder of the model; config.json alone gives random weights.")
]
EngineOptions = Annotated[
    str, typer.Option("--engine", metavar="JSON", help="Options of vLLM's engine, as in the one that serves.")
]
Settings = Annotated[
    str, typer.Option(metavar="JSON", help="Our settings, as in kv_connector_extra_config; root is --root.")
]


def _serve_config(model: str, root: str, out: str, engine: str) -> ServeConfig:
    from py_kvcache.bench.serve_config import from_mapping

    options = json_object(engine, "--engine")
    return from_mapping(
        {"model": model, "root": root, "out": out, "systems": "py-kvcache", "engine": options}
    )


@calibrate.command(
    "measure",
    epilog="Examples:\n\n`py-kvcache calibrate measure --model /models/llama --root /cache --out results`\n\n"
    '`... --engine \'{"dtype": "float16"}\' --settings \'{"memory_bytes": 42949672960}\' --budget 20m '
    "--concurrency 1,8`\n\nthen `py-kvcache calibrate fit results/calibration.json --out results`",
)
def calibrate_measure(
    model: Model,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for calibration.json and logs.")],
    root: BenchRoot = "",
    engine: EngineOptions = "{}",
    settings: Settings = "{}",
    budget: Annotated[str, typer.Option(metavar="TIME", help="90s, 10m, 1h; with vLLM's start.")] = "10m",
    concurrency: Annotated[
        str, typer.Option(metavar="N,...", help="Requests at a time; one set of curves for each.")
    ] = "1",
    longest: Annotated[int, typer.Option(min=0, help="Longest prefix, tokens; 0: what vLLM takes.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on with what the folder has of the same engine.")] = True,
    as_json: Json = False,
) -> None:
    """Measure times to first token of prompts that are computed and of prompts that are loaded.

    It starts an engine: give the model, options and settings of the one that serves, since the result holds
    for no other, and a GPU that nobody uses. Lengths are chosen as it goes, most where the two cross.
    """
    from py_kvcache.calibrate import measure as tool
    from py_kvcache.calibrate import show, view
    from py_kvcache.calibrate.asked import MeasureConfig

    with failures(tool.SCHEMA, as_json):
        config = MeasureConfig(
            _serve_config(model, root, out, engine), json_object(settings, "--settings"), duration(budget),
            tuple(numbers(concurrency)), longest, resume,
        )  # fmt: skip
        with steps() as on_progress:
            tool.run(config, on_progress=on_progress)
        report = show.describe(os.path.join(out, tool.FILE_NAME))
        answer(lambda: json.dumps(report, indent=2), as_json, lambda console: view.show_file(report, console))


@calibrate.command(
    "verify",
    epilog="Examples:\n\n`py-kvcache calibrate verify results/thresholds.json --model /models/llama --root "
    "/cache --out results`\n\n`... --rounds 15 --json | jq '.checks[].verdict'`",
)
def calibrate_verify(
    path: Annotated[str, typer.Argument(metavar="THRESHOLDS", help="thresholds.json.")],
    model: Model,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for logs.")],
    root: BenchRoot = "",
    engine: EngineOptions = "{}",
    settings: Settings = "{}",
    rounds: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Times each is computed and loaded (--prompts: twice at most)."),
    ] = 7,
    prompts: Annotated[int, typer.Option(min=0, help="Also try so many prefixes of random lengths.")] = 0,
    as_json: Json = False,
) -> None:
    """Run just above and just below each threshold. The exit code is 1 if a measurement contradicts one."""
    from py_kvcache.calibrate import verify as tool
    from py_kvcache.calibrate import view
    from py_kvcache.calibrate.asked import MeasureConfig
    from py_kvcache.models import read_thresholds

    with failures(tool.SCHEMA, as_json):
        config = MeasureConfig(_serve_config(model, root, out, engine), json_object(settings, "--settings"))
        with steps() as on_progress:
            report = tool.run(
                config, read_thresholds(path), rounds=rounds, prompts=prompts, on_progress=on_progress
            )
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: view.show_checks(report, out))
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


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
