"""Does preload delay reads that a request waits for? `python tests/engine/demand_reads.py --rounds 6`

Engines on the CPU with memory for two of twelve requests, alternately with preload and without. Prints one
JSON object: of each run the median time of a demand read, of the whole, and what became of preloads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nursery import engine
from session import engine_arguments, prompt, tiny_model

LENGTH = 30 * 64 + 5
SLOT = 262_144 + 4096
SEEDS = range(12)
SMALL = {"num_gpu_blocks_override": 2 * 64 + 4, "max_model_len": 2048}


def ask(session: Any) -> tuple[Any, float]:
    """All twelve at once: their texts, and how long the first answer of the last took, in seconds."""
    reply = session.generate([prompt(LENGTH, seed=seed) for seed in SEEDS], max_tokens=24)
    return reply["tokens"], reply["seconds"]


def run(model: str, root: str, preload: str, trace: str) -> dict[str, Any]:
    """One engine with everything in storage."""
    extra = {"memory_bytes": 400 * SLOT, "preload": preload}
    with engine(engine_arguments(model, root, extra=extra, **SMALL), {"PY_KVCACHE_TRACE": trace}) as session:
        texts, seconds = ask(session)
        end = session.call("settle")
    events = json.loads(Path(trace).read_text())
    reads = [
        event["dur"] / 1e3
        for event in (events if isinstance(events, list) else events["traceEvents"])
        if event["name"] == "read" and event["cat"] == "load"
    ]
    return {
        "preload": preload,
        "seconds": round(seconds, 3),
        "demand_reads": len(reads),
        "demand_read_ms": {
            "median": round(statistics.median(reads), 3),
            "mean": round(statistics.fmean(reads), 3),
        },
        "preloads": end["preloads"],
        "text": texts,
    }


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--root", help="folder on the volume to use")
    given = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.root) as folder:
        model, root = tiny_model(Path(folder, "model")), os.path.join(folder, "cache")
        os.mkdir(root)
        with engine(engine_arguments(model, root, extra={"preload": "off"}, max_model_len=2048)) as session:
            cold, _ = ask(session)
            session.call("settle")
        for number in range(given.rounds):
            for preload in ("on", "off") if number % 2 else ("off", "on"):
                runs.append(run(model, root, preload, os.path.join(folder, f"trace-{len(runs)}.json")))
                print(f"{len(runs)} of {2 * given.rounds}: {runs[-1]['seconds']} s", file=sys.stderr)
    same = all(one.pop("text") == cold for one in runs)
    on, off = ([one for one in runs if one["preload"] == kind] for kind in ("on", "off"))

    def ratio(of: Callable[[dict[str, Any]], float]) -> float:
        """Median over the rounds of on to off."""
        return round(statistics.median(of(a) / of(b) for a, b in zip(on, off, strict=True)), 3)

    report = {
        "schema": "py-kvcache.demand-reads/1",
        "same_text": same,
        "on_to_off": {
            "demand_read_median": ratio(lambda one: one["demand_read_ms"]["median"]),
            "demand_read_mean": ratio(lambda one: one["demand_read_ms"]["mean"]),
            "seconds": ratio(lambda one: one["seconds"]),
        },
        "runs": runs,
    }
    print(json.dumps(report, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
