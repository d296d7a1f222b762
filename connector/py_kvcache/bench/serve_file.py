"""The report of `bench serve` on disk: written whole after every process, read again to go on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from py_kvcache.bench.children import Ended
from py_kvcache.bench.hostfacts import boot_id
from py_kvcache.bench.serve_config import ServeConfig
from py_kvcache.errors import ConfigError


class ReportFile:
    """One report's path and the schema that it must have."""

    def __init__(self, path: Path, schema: str) -> None:
        self._path, self._schema = path, schema

    def good_runs(self, config: ServeConfig) -> list[dict[str, Any]]:
        """Runs without an error of an earlier report, none without a report.

        Raises:
            ConfigError: the report is of other work, or is none.
        """
        if not self._path.exists():
            return []
        try:
            report = json.loads(self._path.read_text(encoding="utf-8"))
            is_same = report["schema"] == self._schema and config.same_work(report["config"])
            runs = [run for run in report["runs"] if run["error"] is None]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path} is no report to resume: {error!r}") from None
        if not is_same:
            raise ConfigError(f"{self._path} measured something else; give another folder, or do not resume")
        return runs

    def save(self, report: Mapping[str, Any]) -> None:
        """Whole or not at all: who is cut off here keeps the one before."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self._path)


def run_entry(which: tuple[int, int, str], task: Mapping[str, Any], ended: Ended) -> dict[str, Any]:
    """One process as the report has it; ``which`` is its round, its position in it and its label."""
    number, position, label = which
    started = next((event for event in ended.events if event["event"] == "started"), {})
    phases = []
    for event in ended.events:
        if event["event"] == "phase":
            counters = event.get("counters")
            phase = {name: value for name, value in event.items() if name != "event"}
            for key, name in (("own_read_bytes", task["reads"]), ("own_written_bytes", task["writes"])):
                phase[key] = int(counters.get(name, 0)) if counters is not None and name else None
            phases.append(phase)
    return {
        "round": number,
        "position": position,
        "system": label,
        "error": ended.error,
        "log_tail": ended.log_tail,
        "seconds": round(ended.seconds, 2),
        "boot": boot_id(),
        "started": {name: value for name, value in started.items() if name != "event"},
        "engine_options": task["engine"],
        "notes": [event["text"] for event in ended.events if event["event"] == "note"],
        "phases": phases,
    }
