"""`py-kvcache calibrate fit`: a file in, files out. The only module here that writes any."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Final

from py_kvcache import __version__
from py_kvcache.calibrate import plots
from py_kvcache.calibrate.fit import fit
from py_kvcache.calibrate.report import page
from py_kvcache.calibrate.summary import record, thinning_sentences
from py_kvcache.calibrate.thin import MOST_BYTES, to_thresholds
from py_kvcache.models import read_calibration

SCHEMA: Final = "py-kvcache/calibrate-fit/1"


def run(path: str, out: str, concurrency: int = 1, termination_log: str = "") -> dict[str, Any]:
    """Fit a calibration.json and write thresholds.json, report.html and pictures into a folder.

    Returns:
        The report; ``good`` if at least one source has a threshold.
    Raises:
        ConfigError, KvCacheError, OSError: also told in the termination log, where one is given.
    """
    try:
        report, text = _run(path, out, concurrency)
        if termination_log:
            _write(termination_log, text.encode())
    except Exception as error:
        if termination_log:
            with suppress(OSError):
                _write(termination_log, error_text(str(error) or type(error).__name__).encode())
        raise
    return report


def _run(path: str, out: str, concurrency: int) -> tuple[dict[str, Any], str]:
    calibration = read_calibration(path)
    found = fit(calibration, concurrency)
    others = [
        fit(calibration, one.concurrency)
        for one in sorted(calibration.sets, key=lambda one: one.concurrency)
        if one.concurrency != concurrency
    ]
    made = {"at": calibration.created, "by": f"py-kvcache {__version__}"}
    compact = to_thresholds(found, others, made)
    pictures, notes = plots.draw(found)
    os.makedirs(out, exist_ok=True)
    files = {
        **pictures,
        "report.html": page(calibration, found, others, compact, pictures, notes).encode(),
        "thresholds.json": compact.text.encode() + b"\n",
    }
    for name, content in files.items():
        _replace(os.path.join(out, name), content)
    report = {
        "schema": SCHEMA,
        "good": any(not tier.reason for tier in found.tiers),
        "engine": found.engine,
        **record(found),
        "skipped": list(calibration.skipped),
        "thinning": thinning_sentences(compact),
        "prefill_error": compact.prefill_error,
        "frontier_errors": dict(compact.table_errors),
        "thresholds": json.loads(compact.text),
        "under_load": [record(other) for other in others],
        "notes": notes,
        "files": [os.path.abspath(os.path.join(out, name)) for name in files],
    }
    return report, compact.text


def error_text(problem: str) -> str:
    """An object with ``error``, of at most 1,024 bytes."""
    while len(text := json.dumps({"error": problem}, separators=(",", ":"))) > MOST_BYTES:
        # A character takes twelve at most: two escaped halves.
        problem = problem[: -max(1, (len(text) - MOST_BYTES) // 12)]
    return text


def _write(path: str, content: bytes) -> None:
    """In place: a pod's termination log is a mount and cannot be replaced."""
    with open(path, "wb") as file:
        file.write(content)


def _replace(path: str, content: bytes) -> None:
    """All or nothing: an engine may be reading the file."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        _write(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
