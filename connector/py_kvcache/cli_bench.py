"""`py-kvcache bench <command>`: arguments, output streams and exit codes; the work is in bench/."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from py_kvcache.cli_options import CONTEXT, BenchRoot, Json, json_object, numbers
from py_kvcache.tools.terminal import (
    GOOD,
    PROBLEM,
    answer,
    failures,
    show_measurements,
    steps,
)

bench = typer.Typer(
    help="Measure this volume against fio and bare system calls, and serving against what else there is.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=CONTEXT,
)


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

    The exit code is 1 if a figure misses what the data path is held against: read and write 0.95 of fio, and
    of direct files 1 ms (p99) for a submit, few core-seconds a GB, little loss to a second busy thread. For
    `explain --rate` take the read rate of the size of your blocks.
    """
    from py_kvcache.bench import io as tool

    with failures(tool.SCHEMA, as_json):
        with steps() as on_progress:
            report = tool.run(
                root, sizes=[n << 20 for n in numbers(sizes)], depth=depth, rounds=rounds, seconds=seconds,
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
                root, files=numbers(files), processes=numbers(processes), rounds=rounds, seconds=seconds,
                on_progress=on_progress,
            )  # fmt: skip
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: show_measurements(report, out))
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


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
    workload: Annotated[
        str, typer.Option(help="long-doc; round-robin: contexts that grow; mixed: known and new ones.")
    ] = "long-doc",
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
                "root": root, "model": model, "out": out, "systems": systems, "tokens": numbers(tokens),
                "documents": documents, "rounds": rounds, "max_tokens": max_tokens, "resume": resume,
                "workload": workload,
                "engine": json_object(engine, "--engine"),
            }
        )  # fmt: skip
        with steps() as on_progress:
            report = tool.run(settings, on_progress=on_progress)
        answer(
            lambda: json.dumps(report, indent=2), as_json,
            lambda out: out.print(table(report), markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
    raise typer.Exit(GOOD if report["good"] else PROBLEM)


@bench.command(
    "timeline",
    epilog="Examples:\n\n`PY_KVCACHE_TRACE=/tmp/trace.json vllm serve ...`, then "
    "`py-kvcache bench timeline /tmp/trace.json`\n\n"
    "`py-kvcache bench timeline /tmp/trace.json --picture burst.png --burst -1`\n\n"
    "`py-kvcache bench timeline /tmp/trace.json --json | jq '.bursts[].stages.read.median_ms'`",
)
def bench_timeline(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="File that PY_KVCACHE_TRACE named.")],
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="PNG to draw one burst into.")] = None,
    burst: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default="most loads",
            help="Which burst to draw, from 1 on; -1 is the last.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell from a trace what each burst of loads and stores spent its time on, and draw one.

    A burst is a time in which jobs follow each other without a pause of 0.25 s. The trace itself can be
    opened in ui.perfetto.dev, too.
    """
    from py_kvcache.bench import timeline as tool
    from py_kvcache.bench import timeline_view

    with failures(tool.SCHEMA, as_json):
        report = tool.run(trace, burst=burst, picture=picture)
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: timeline_view.show(report, out))


@bench.command(
    "pairs",
    epilog="Examples:\n\n`py-kvcache bench pairs --model DIR --root /cache --systems "
    "recompute,py-kvcache:gate=adaptive --tokens 4000 --pairs 300 --out results`\n\n"
    "`... --systems recompute,py-kvcache:gate=static+thresholds=/etc/never.json --json | jq .interval_95`",
)
def bench_pairs(
    model: Annotated[str, typer.Option(metavar="DIR", help="Folder of the model.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for pairs.json and logs.")],
    root: BenchRoot = "",
    systems: Annotated[
        str, typer.Option(metavar="A,B", help="The two; see `bench serve`.")
    ] = "recompute,py-kvcache:gate=adaptive",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the documents.")] = 4000,
    documents: Annotated[int, typer.Option(min=1, max=1000, help="Asked for in turn.")] = 10,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of requests that are measured.")] = 100,
    engine: Annotated[str, typer.Option(metavar="JSON", help="Options of vLLM's engine, for both.")] = "{}",
    as_json: Json = False,
) -> None:
    """Small differences between two systems: the same request to one and then to the other, many times.

    Each document is asked for once before, so that a cache has it. Told is the ratio of mean times to first
    token, with a 95 % interval by bootstrap over pairs. On a GPU give both engines room, as with
    --engine '{"gpu_memory_utilization": 0.4}'.
    """
    from py_kvcache.bench import pairs as tool
    from py_kvcache.bench.serve_config import from_mapping

    with failures(tool.SCHEMA, as_json):
        settings = from_mapping(
            {
                "root": root, "model": model, "out": out, "systems": systems, "tokens": [tokens],
                "documents": documents, "engine": json_object(engine, "--engine"),
            }
        )  # fmt: skip
        with steps() as on_progress:
            report = tool.run(settings, pairs=pairs, on_progress=on_progress)
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: show_measurements(report, out))


@bench.command(
    "policy",
    epilog="Examples:\n\n`py-kvcache bench policy`\n\n"
    "`py-kvcache bench policy --capacity 365 --picture policy.png`\n\n"
    "`py-kvcache bench policy --prefill 0=0,8192=0.4,65536=6 --token-bytes 131072`\n\n"
    "`py-kvcache bench policy --json | jq .mean_read_share`",
)
def bench_policy(
    capacity: Annotated[int, typer.Option(min=20, help="Blocks that the memory holds.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the traces that are drawn by chance.")] = 1,
    prefill: Annotated[
        str,
        typer.Option(metavar="N=S,...", help="Seconds to compute N tokens; default: 3B on an H200."),
    ] = "",
    token_bytes: Annotated[int, typer.Option(min=1, help="KV cache of one token.")] = 114_688,
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="PNG to draw.")] = None,
    as_json: Json = False,
) -> None:
    """Replay made-up traces with each policy of the memory tier (memory_tier), and requests with each gate.

    No volume and no engine is needed. Of the tier it tells the share of the used blocks that would have been
    read; of the gate the mean time to first token in a simulated engine, whose storage reads 12 GB/s and
    from half-way on 1.2.
    """
    from py_kvcache.bench import policy as tool
    from py_kvcache.bench.gatesim import MEASURED
    from py_kvcache.tools.explain import parse_points

    with failures(tool.SCHEMA, as_json):
        with steps() as on_progress:
            points = parse_points(prefill) if prefill else MEASURED
            report = tool.run(
                capacity=capacity, seed=seed, prefill=points, token_bytes=token_bytes, picture=picture,
                on_progress=on_progress,
            )  # fmt: skip
        answer(lambda: json.dumps(report, indent=2), as_json, lambda out: show_measurements(report, out))
