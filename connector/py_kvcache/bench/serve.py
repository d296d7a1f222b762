"""`py-kvcache bench serve`: what users could run instead of us, on the same workload, one engine at a time.

Each round runs every system once, in a process of its own, beginning with another one; ratios are taken
within a round. The report is written after every process, so that a run that is cut off keeps what it has.
Needs no terminal packages: ``python -m py_kvcache.bench.serve --config FILE`` runs where typer is missing.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from py_kvcache.bench import plots, serve_report
from py_kvcache.bench.children import child_environment, command_of, interrupt_on_sigterm, run_child
from py_kvcache.bench.hostfacts import gpu_facts, is_shm, versions
from py_kvcache.bench.serve_config import ServeConfig, from_mapping
from py_kvcache.bench.serve_file import ReportFile, run_entry
from py_kvcache.bench.systems import Host, Place
from py_kvcache.bench.variants import Variant, in_turn
from py_kvcache.bench.workloads import WORKLOADS
from py_kvcache.bench.workspace import Progress, machine, no_progress, remove_tree, workspace
from py_kvcache.errors import KvCacheError

SCHEMA = "py-kvcache.bench.serve/1"
REPORT_NAME = "serve.json"

Command = Callable[[Variant], Sequence[str]]


def run(
    config: ServeConfig,
    *,
    on_progress: Progress = no_progress,
    host: Host | None = None,
    command: Command = lambda variant: command_of(variant.system.module),
) -> dict[str, Any]:
    """Measure and return the report, ready for JSON; it is in ``config.out`` too, with logs and pictures.

    A system that fails becomes an entry with its last log lines; the others go on.

    Raises:
        RootError: root cannot be used or is too full.
        KvCacheError: no system can run here; ConfigError for impossible settings; OSError for ``out``.
    """
    bench = _Bench(config, host or Host.find(), on_progress, command)
    with workspace(config.root, bench.need_bytes()) as folder:
        return bench.run(folder)


class _Bench:
    def __init__(self, config: ServeConfig, host: Host, on_progress: Progress, command: Command) -> None:
        self._config, self._on_progress, self._command = config, on_progress, command
        self._workload = WORKLOADS[config.workload]
        self._begin = time.monotonic()
        reasons = [(variant, variant.system.missing(host)) for variant in config.variants]
        self._skipped = [{"system": variant.label, "why": why} for variant, why in reasons if why is not None]
        self._variants = tuple(variant for variant, why in reasons if why is None)
        if not self._variants:
            raise KvCacheError(
                "no system can run here: " + "; ".join(entry["why"] for entry in self._skipped)
            )
        self._out = Path(config.out)
        self._logs = self._out / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._notes: list[str] = []
        self._file = ReportFile(self._out / REPORT_NAME, SCHEMA)
        self._runs = self._file.good_runs(config) if config.resume else []
        self._machine = {**machine(config.root), **gpu_facts(), "versions": versions()}
        self._done = 0
        self._longest = max((run["seconds"] for run in self._runs), default=0.0)

    def need_bytes(self) -> int:
        """Free space that one system's files take at most."""
        files = self._config.kv_bytes()
        most = 0
        for variant in self._variants:
            if variant.system.uses_disk:
                beside = variant.system.memory_gb(variant.options) if is_shm(self._config.root) else 0
                most = max(most, files + int(beside * 1e9))
        return most

    def run(self, folder: str) -> dict[str, Any]:
        """All rounds."""
        self._write()  # an unwritable folder is told before an hour's work
        for number in range(self._config.rounds):
            files = ""  # of the system before, for those that read them
            for position, variant in enumerate(in_turn(self._variants, number)):
                if not variant.system.files_of:
                    if files:
                        remove_tree(files)
                        files = ""
                    if self._has(variant, number) or not self._is_time_left():
                        continue
                    files = os.path.join(folder, f"{_slug(variant.label)}-{number}")
                    os.mkdir(files)
                elif self._has(variant, number):
                    continue
                elif not files:
                    self._notes.append(f"round {number + 1}: there are no files for {variant.label}")
                    continue
                self._runs.append(self._one(variant, number, position, files))
                self._write()
            if files:
                remove_tree(files)
        report = self._write()
        report["notes"] = [*report["notes"], *plots.draw(report, str(self._out))]
        self._file.save(report)
        return report

    def _has(self, variant: Variant, number: int) -> bool:
        return any(run["system"] == variant.label and run["round"] == number for run in self._runs)

    def _is_time_left(self) -> bool:
        budget = self._config.budget_s
        if not budget or time.monotonic() - self._begin + self._longest <= budget:
            return True
        note = f"stopped: another process would probably end beyond the {budget:g} s that were allowed"
        if note not in self._notes:
            self._notes.append(note)
        return False

    def _one(self, variant: Variant, number: int, position: int, folder: str) -> dict[str, Any]:
        """One system in one round: the run's entry in the report."""
        name = f"{_slug(variant.label)}-{number}"
        events, log = self._logs / f"{name}.events.jsonl", self._logs / f"{name}.log"
        for path in (events, log):
            path.unlink(missing_ok=True)
        place = Place(folder, f"bench-{os.getpid()}-{secrets.token_hex(4)}", variant.options)
        task = self._task(variant, place, str(events))
        path = self._logs / f"{name}.task.json"
        path.write_text(json.dumps(task, indent=1), encoding="utf-8")
        title = f"round {number + 1}, {variant.label}: "
        self._step(title + "starting")

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "begin":
                self._step(title + event["text"])

        environment = child_environment({**self._config.environment, **variant.system.environment(place)})
        try:
            ended = run_child(
                [*self._command(variant), str(path)], environment, events, log,
                self._config.child_timeout_s, on_event,
            )  # fmt: skip
        finally:
            for pattern in variant.system.leftovers(place):
                for left in glob.glob(pattern):
                    os.unlink(left)
        self._longest = max(self._longest, ended.seconds)
        return run_entry((number, position, variant.label), task, ended)

    def _task(self, variant: Variant, place: Place, events: str) -> dict[str, Any]:
        system, shape = variant.system, self._config.shape
        return {
            "system": variant.label,
            "engine": {**self._config.engine_options(), **system.engine(place)},
            "options": dict(variant.options),
            "workload": self._workload.name,
            "shape": vars(shape) | {"tokens": list(shape.tokens)},
            "max_tokens": self._config.max_tokens,
            # What stores nothing has nothing to wait for.
            "settle_s": self._config.settle_s if system.uses_disk or system.writes else 0,
            "folder": place.folder,
            "counters": system.counters,
            "reads": system.reads,
            "writes": system.writes,
            "events": events,
        }

    def _step(self, text: str) -> None:
        steps = 1 + sum(1 for _ in self._workload.steps(self._config.shape))
        total = self._config.rounds * len(self._variants) * steps
        # Less where a system fails or has fewer steps: the last is reached at the end at the latest.
        self._on_progress(min(self._done, total - 1), total, text)
        self._done += 1

    def _write(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": self._machine,
            "config": self._config.as_json(),
            "engine": self._config.engine_options(),
            "seconds": round(time.monotonic() - self._begin, 1),
            "skipped": self._skipped,
            "notes": list(self._notes),
            "results": serve_report.results(
                self._runs, self._workload, [variant.label for variant in self._variants]
            ),
            "runs": self._runs,
            "good": all(run["error"] is None for run in self._runs) and bool(self._runs),
        }
        self._file.save(report)
        return report


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Without typer and rich: settings from a JSON file, some of them overridden."""
    parser = argparse.ArgumentParser(prog="python -m py_kvcache.bench.serve", description=run.__doc__)
    parser.add_argument("--config", required=True, help="JSON file with the settings (ServeConfig)")
    for name in ("model", "root", "out", "systems"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--documents", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--budget-s", type=float, dest="budget_s")
    parser.add_argument("--resume", action="store_true", default=None)
    taken = vars(parser.parse_args(arguments))

    def line(done: int, total: int, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')} {done + 1}/{total}] {text}", file=sys.stderr, flush=True)

    interrupt_on_sigterm()
    try:
        values = json.loads(Path(taken.pop("config")).read_text(encoding="utf-8"))
        report = run(
            from_mapping({**values, **{n: v for n, v in taken.items() if v is not None}}), on_progress=line
        )
    except (KvCacheError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the report holds what was done", file=sys.stderr)
        return 130
    print(serve_report.table(report))
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
