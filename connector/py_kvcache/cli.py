"""`py-kvcache <command>`: arguments, output streams and exit codes; the work is in tools/ and bench/.

Exit codes: 0 good, 1 problem found, 2 usage, 3 root unusable, 130 interrupted. Commands import what they
need when they run, so that help is quick and needs neither torch nor vLLM.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from py_kvcache import __version__
from py_kvcache.tools.terminal import GOOD, INTERRUPTED, PROBLEM, answer, console_for, failures, spinner

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_EXITS = "\n\nExit codes: 0 good, 1 problem found, 2 usage, 3 root unusable."

app = typer.Typer(
    name="py-kvcache",
    help="Tools for a py-kvcache root: the folder in which vLLM keeps KV blocks as files." + _EXITS,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=_CONTEXT,
)

Root = Annotated[
    str,
    typer.Argument(metavar="ROOT", envvar="PY_KVCACHE_ROOT", show_envvar=True, help="Folder of the cache."),
]
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
    "`kubectl exec my-vllm-0 -- python -m py_kvcache doctor --json` (root from PY_KVCACHE_ROOT)"
)
def doctor(root: Root, as_json: Json = False) -> None:
    """Tell what file system, kernel and CPU allow, what will be used, and how to get the faster way.

    Tries for real, in a folder under ROOT that it removes again: io_uring (in a child process), direct I/O,
    link, rename, times, permissions. A slower way is no problem; being unable to store is one.
    """
    from py_kvcache.tools import doctor as tool
    from py_kvcache.tools import doctor_view

    with failures(tool.SCHEMA, as_json):
        report = tool.examine(root)
        answer(lambda: tool.as_json(report), as_json, lambda console: doctor_view.show(report, console))
    raise typer.Exit(GOOD if report.is_good else PROBLEM)


@app.command(
    epilog="Examples:\n\n`py-kvcache inspect /cache`\n\n`py-kvcache inspect /cache --namespace '*Llama*'`\n\n"
    "`py-kvcache inspect /cache --json | jq '.namespaces[] | {model, blocks, bytes}'`"
)
def inspect(root: Root, namespace: Namespace = "", as_json: Json = False) -> None:
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
    root: Root,
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
    raise typer.Exit(INTERRUPTED if report.interrupted else GOOD if report.is_good else PROBLEM)


def main() -> None:
    """Entry point of the script and of `python -m py_kvcache`."""
    app(prog_name="py-kvcache")
