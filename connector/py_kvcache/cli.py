"""`py-kvcache <command>`: arguments, output streams and exit codes; the work is in other folders.

Commands import what they need when they run, so that help is quick and needs neither torch nor vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from py_kvcache import __version__
from py_kvcache.cli_bench import bench
from py_kvcache.cli_calibrate import calibrate
from py_kvcache.cli_options import CONTEXT, Json, SourceName, not_empty
from py_kvcache.scheduler.policy import Mode
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
    spinner,
)

_TOOLS = {
    "doctor": "tools.doctor", "inspect": "tools.inspection", "verify": "tools.verify_report",
    "bench io": "bench.io", "bench metadata": "bench.metadata", "bench serve": "bench.serve",
    "bench timeline": "bench.timeline", "bench policy": "bench.policy", "explain": "tools.explain",
    "calibrate fit": "calibrate.outputs", "calibrate show": "calibrate.show",
    "calibrate compare": "calibrate.compare", "calibrate measure": "calibrate.measure",
    "calibrate verify": "calibrate.verify",
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
    context_settings=CONTEXT,
)


def _not_empty_or_config(context: typer.Context, value: str) -> str:
    """Only doctor has a --config."""
    is_given = _source(context, "root") == "COMMANDLINE"
    return value if context.params.get("config") is not None and not is_given else not_empty(value)


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
        report = tool.examine(root, *(given or ()))
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


@app.command(
    epilog="Examples:\n\n"
    "`py-kvcache explain --prompt 40000 --hit 39936 --token-bytes 114688 --rate 7e9 --latency 0.03 "
    "--prefill 0=0,10000=0.13,40000=0.81`"
    "\n\n`py-kvcache explain --gate static --thresholds thresholds.json --prompt 8000 --hit 6400 --json`"
)
def explain(
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")],
    hit: Annotated[int, typer.Option(min=0, help="Tokens of its prefix that GPU and cache have.")],
    gpu: Annotated[int, typer.Option(min=0, help="Tokens of it that the GPU has already.")] = 0,
    gate: Annotated[Mode, typer.Option(help="Which gate.")] = Mode.ADAPTIVE,
    source: Annotated[SourceName, typer.Option(help="Where the hit lies.")] = SourceName.DISK,
    token_bytes: Annotated[int, typer.Option(min=0, help="KV bytes of a token, per rank.")] = 0,
    rate: Annotated[float, typer.Option(min=0.0, help="Bytes a second from there; 0 = unknown.")] = 0.0,
    queued: Annotated[int, typer.Option(min=0, help="Bytes that are to be loaded before.")] = 0,
    latency: Annotated[
        float, typer.Option(min=0.0, help="Seconds of a load beside its bytes (H200: 0.01 to 0.04).")
    ] = 0.0,
    prefill: Annotated[
        str, typer.Option(metavar="N=S,...", help="Seconds to compute N tokens; else from --thresholds.")
    ] = "",
    thresholds: Annotated[
        str, typer.Option(metavar="FILE", help="thresholds.json, or a folder of them.")
    ] = "",
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a block: the connector's setting.")
    ] = 256,
    as_json: Json = False,
) -> None:
    """Tell whether a hit is worth loading, what it costs and saves, and from which rate or length on it pays.

    It is the decision of the connector's gate for these numbers. Seconds for --prefill: time to first token
    of prompts of some lengths without a cache, as from `bench serve --systems recompute --tokens 1000,10000`.
    """
    from py_kvcache.tools import explain as tool
    from py_kvcache.tools import explain_view

    with failures(tool.SCHEMA, as_json):
        points = tool.parse_points(prefill) if prefill else ()
        question = tool.Question(
            gate, prompt, hit, gpu, token_bytes, rate, queued, latency, source.value, block_tokens,
            points, thresholds,
        )  # fmt: skip
        report = tool.explain(question)
        answer(lambda: tool.as_json(report), as_json, lambda console: explain_view.show(report, console))


app.add_typer(bench, name="bench")
app.add_typer(calibrate, name="calibrate")


def main() -> None:
    """Entry point of the script and of `python -m py_kvcache`."""
    open_streams()
    app(prog_name="py-kvcache")
