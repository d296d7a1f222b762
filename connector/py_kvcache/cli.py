"""`py-kvcache <command>`: arguments, output streams and exit codes; the work is in tools/ and bench/.

Commands import what they need when they run, so that help is quick and needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from py_kvcache import __version__
from py_kvcache.errors import ConfigError
from py_kvcache.tools.terminal import (
    EXIT_CODES,
    GOOD,
    PROBLEM,
    answer,
    console_for,
    fail_usage,
    failures,
    interrupt_code,
    open_streams,
    printing,
    show_measurements,
    spinner,
    steps,
)

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

_TOOLS = {
    "doctor": "tools.doctor", "inspect": "tools.inspection", "verify": "tools.verify_report",
    "bench io": "bench.io", "bench metadata": "bench.metadata", "bench serve": "bench.serve",
}  # fmt: skip
# typer names no base of its usage errors, and has them from click or from a copy of it
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """With --json, a wrong option is told like every other error: as one JSON object."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **extra: Any) -> Any:
        """See click's."""
        words = list(sys.argv[1:] if args is None else args)
        with printing():
            return (
                self._run_json(words, extra) if "--json" in words else super().main(words, *others, **extra)
            )

    def _run_json(self, words: list[str], extra: dict[str, Any]) -> NoReturn:
        try:
            code = super().main(words, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            try:
                fail_usage(_schema_of(error), error.format_message())  # type: ignore[attr-defined]
            except typer.Exit as end:
                code = end.exit_code
        sys.exit(code if isinstance(code, int) else GOOD)


def _schema_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path.partition(" ")[2] if context else ""
    if command not in _TOOLS:
        return "py-kvcache/error/1"
    schema: str = import_module(f"py_kvcache.{_TOOLS[command]}").SCHEMA
    return schema


app = typer.Typer(
    name="py-kvcache",
    cls=_Commands,
    help="Tools for a py-kvcache root: the folder in which vLLM keeps KV blocks as files.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=_CONTEXT,
)


def _not_empty(value: str) -> str:
    if not value:  # else it would be the current folder
        raise typer.BadParameter(
            "it is missing or empty; give the folder of the cache, or set PY_KVCACHE_ROOT"
        )
    return value


def _not_empty_or_config(context: typer.Context, value: str) -> str:
    """Only doctor has a --config."""
    is_given = _source(context, "root") == "COMMANDLINE"
    return value if context.params.get("config") is not None and not is_given else _not_empty(value)


def _source(context: typer.Context, name: str) -> str:
    """COMMANDLINE, ENVIRONMENT or DEFAULT; by name, since typer has click's enum or a copy of it."""
    source = context.get_parameter_source(name)
    return source.name if source is not None else ""


Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT", envvar="PY_KVCACHE_ROOT", show_envvar=True, callback=_not_empty_or_config,
        help="Folder of the cache.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with a `schema` instead of text.")]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Only this: a name, digest or pattern (`*Llama*`)."
    ),
]


def _version(value: bool) -> None:
    if value:
        print(f"py-kvcache {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples:\n\n`py-kvcache doctor /cache`\n\n"
    '`py-kvcache doctor --config \'{"root": "/cache", "io_depth": 32}\'` (before vLLM\'s start)\n\n'
    "`kubectl exec my-vllm-0 -- python -m py_kvcache doctor --json` (root from PY_KVCACHE_ROOT)"
)
def doctor(
    context: typer.Context,
    root: Root = "",
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", is_eager=True,
            help="A kv_connector_extra_config to check as vLLM's start would; gives ROOT, too.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Tell what file system, kernel, CPU and GPU allow, what will be used, and how to get the faster way.

    Tries for real, in a folder under ROOT that it removes again: io_uring (in a child process), direct I/O,
    link, rename, times, permissions. A slower way is no problem, nor is a volume mounted read-only; being
    unable to store on any other is one, and so is a setting that the connector would refuse.
    """
    from py_kvcache.tools import doctor as tool
    from py_kvcache.tools import doctor_view
    from py_kvcache.tools.doctor_settings import parse_option

    with failures(tool.SCHEMA, as_json):
        given = parse_option(config) if config is not None else None
        if given is not None and _source(context, "root") != "COMMANDLINE":
            root = ""  # in vLLM, too, the config's root is stronger than the environment's
        report = tool.examine(root, given)
        answer(lambda: tool.as_json(report), as_json, lambda console: doctor_view.show(report, console))
    raise typer.Exit(GOOD if report.is_good else PROBLEM)


@app.command(
    epilog="Examples:\n\n`py-kvcache inspect /cache`\n\n`py-kvcache inspect /cache --namespace '*Llama*'`\n\n"
    "`py-kvcache inspect /cache --json | jq '.namespaces[] | {model, blocks, bytes}'`"
)
def inspect(root: Root = "", namespace: Namespace = "", as_json: Json = False) -> None:
    """List namespaces, blocks, bytes, ages, temporaries and what is not ours. Reads no block."""
    from py_kvcache.tools import inspection as tool
    from py_kvcache.tools import inspection_view

    with failures(tool.SCHEMA, as_json):
        with spinner("inspect") as seen:
            report = tool.inspect_root(root, namespace=namespace, on_progress=seen)
        answer(lambda: tool.as_json(report), as_json, lambda console: inspection_view.show(report, console))
    raise typer.Exit(PROBLEM if report.problems else GOOD)


@app.command(
    epilog="Examples:\n\n`py-kvcache verify /cache`\n\n"
    "`py-kvcache verify /cache --namespace 0123456789abcdef --limit 1000 --threads 8`\n\n"
    "`py-kvcache verify /cache --delete --json > report.json`"
)
def verify(
    root: Root = "",
    namespace: Namespace = "",
    limit: Annotated[int, typer.Option(min=0, help="Check that many blocks at most; 0 = all.")] = 0,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove files that two reads prove damaged; nothing else.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Files read and checked at a time.")] = 4,
    as_json: Json = False,
) -> None:
    """Read every block and check its footer and checksum.

    Damaged means: wrong size, wrong key, torn or zero footer, wrong checksum. Files without our footer are
    counted and left alone, and so is what the file system cannot read: an error is no proof. The exit code
    is 1 if anything damaged was found, deleted or not.
    """
    from py_kvcache.tools import verify_report as tool
    from py_kvcache.tools import verify_view
    from py_kvcache.tools.verify import verify_root

    with failures(tool.SCHEMA, as_json):
        with verify_view.bar(console_for(sys.stderr)) as progress:
            report = verify_root(
                root, namespace=namespace, limit=limit, delete=delete, threads=threads, progress=progress
            )
        answer(lambda: tool.as_json(report), as_json, lambda console: verify_view.show(report, console))
    raise typer.Exit(interrupt_code() if report.interrupted else GOOD if report.is_good else PROBLEM)


# ---- benchmarks

bench = typer.Typer(
    help="Measure this volume against fio and bare system calls, and serving against what else there is.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=_CONTEXT,
)
app.add_typer(bench, name="bench")

BenchRoot = Annotated[
    str,
    typer.Option(
        "--root", envvar="PY_KVCACHE_ROOT", metavar="DIR", callback=_not_empty,
        help="Folder on the volume; left as it was found.",
    ),
]  # fmt: skip


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text[:40]!r} is no list of whole numbers such as 1,4,28") from None
    if min(numbers) < 1:
        raise ConfigError(f"{text[:40]!r}: numbers must be 1 or more")
    return numbers


@bench.command(
    "io",
    epilog="Examples:\n\n`py-kvcache bench io --root /cache`\n\n"
    "`py-kvcache bench io --root /cache --sizes 28 --rounds 3 --json`",
)
def bench_io(
    root: BenchRoot = "",
    sizes: Annotated[str, typer.Option(metavar="MIB,...", help="File sizes in MiB.")] = "1,4,28",
    depth: Annotated[int, typer.Option(min=2, max=1024, help="Reads or writes in flight.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Passes of ours and of fio, alternating.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, max=600.0, help="Length of one pass.")] = 1.0,
    ring: Annotated[str, typer.Option(metavar="KIND", help="auto, io_uring or threads.")] = "auto",
    as_json: Json = False,
) -> None:
    """Read and write block files as the worker does, next to fio at the same size, depth and mode.

    The exit code is 1 if a figure misses what the data path is held against (read and write 0.95 of fio).
    """
    from py_kvcache.bench import io as tool

    with failures(tool.SCHEMA, as_json):
        with steps() as on_progress:
            report = tool.run(
                root, sizes=[n << 20 for n in _numbers(sizes)], depth=depth, rounds=rounds, seconds=seconds,
                ring=ring, on_progress=on_progress,
            )  # fmt: skip
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: show_measurements(report, out))
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


@bench.command(
    "metadata",
    epilog="Examples:\n\n`py-kvcache bench metadata --root /cache --files 10000,100000`\n\n"
    "`py-kvcache bench metadata --root /cache --processes 1,4,16 --json`",
)
def bench_metadata(
    root: BenchRoot = "",
    files: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of files at which to measure, ascending.")
    ] = "10000,100000,1000000",
    processes: Annotated[str, typer.Option(metavar="N,...", help="Processes at a time.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Repeats; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, max=600.0, help="Length of one measurement.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Measure look-ups and publications a second, next to a bare loop of the same system calls.

    The files are empty. The exit code is 1 if a figure misses what the design is held against.
    """
    from py_kvcache.bench import metadata as tool

    with failures(tool.SCHEMA, as_json):
        with steps() as on_progress:
            report = tool.run(
                root, files=_numbers(files), processes=_numbers(processes), rounds=rounds, seconds=seconds,
                on_progress=on_progress,
            )  # fmt: skip
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: show_measurements(report, out))
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text[:40]!r} is no JSON object")
    return value


@bench.command(
    "serve",
    epilog="Examples:\n\n`py-kvcache bench serve --model /models/llama --root /cache --tokens 10000,40000 "
    "--out results`\n\n`py-kvcache bench serve --model DIR --root /cache --systems "
    "recompute,py-kvcache,py-kvcache:checksum=off+io_depth=32,floor --rounds 5 --out results --json`\n\n"
    '`py-kvcache bench serve --model DIR --root /cache --engine \'{"dtype": "float16"}\' --out results`',
)
def bench_serve(
    model: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder of the model; config.json alone gives random weights."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for serve.json, logs and pictures.")],
    root: BenchRoot = "",
    systems: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            show_default="all",
            help="Systems, with options as NAME:option=value+option=value.",
        ),
    ] = "recompute,prefix-cache,vllm-cpu-offload,vllm-fs-tier,lmcache,py-kvcache,floor",
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Lengths of the documents.")] = "10000",
    documents: Annotated[int, typer.Option(min=1, max=1000, help="Documents asked at once.")] = 6,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Times each system runs; they take turns.")
    ] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 1,
    engine: Annotated[str, typer.Option(metavar="JSON", help="Options of vLLM's engine, for all.")] = "{}",
    resume: Annotated[bool, typer.Option(help="Go on with what is in the folder of the results.")] = False,
    as_json: Json = False,
) -> None:
    """Compare times to first token with what else vLLM can use, one engine at a time, on this machine.

    Systems: recompute, prefix-cache, vllm-cpu-offload, vllm-fs-tier, lmcache, py-kvcache, and floor (the same
    files without vLLM). One that cannot run here is skipped, one that fails is reported (exit code 1).
    """
    from py_kvcache.bench import serve as tool
    from py_kvcache.bench.serve_config import from_mapping
    from py_kvcache.bench.serve_report import table

    with failures(tool.SCHEMA, as_json):
        settings = from_mapping(
            {
                "root": root, "model": model, "out": out, "systems": systems, "tokens": _numbers(tokens),
                "documents": documents, "rounds": rounds, "max_tokens": max_tokens, "resume": resume,
                "engine": _object(engine, "--engine"),
            }
        )  # fmt: skip
        with steps() as on_progress:
            report = tool.run(settings, on_progress=on_progress)
        answer(
            lambda: json.dumps(report, indent=2), as_json,
            lambda out: out.print(table(report), markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


def main() -> None:
    """Entry point of the script and of `python -m py_kvcache`."""
    open_streams()
    app(prog_name="py-kvcache")
