"""`py-kvcache calibrate show`: what a calibration.json or a thresholds.json says."""

from __future__ import annotations

import json
from typing import Any, Final

from py_kvcache.calibrate.fit import Fit, fit
from py_kvcache.calibrate.summary import record, sentences, thresholds_sentences
from py_kvcache.errors import ConfigError
from py_kvcache.models import (
    CALIBRATION_SCHEMA,
    MOST_CALIBRATION_BYTES,
    THRESHOLDS_SCHEMA,
    read_calibration,
    read_text,
    read_thresholds,
    thresholds_path,
)

SCHEMA: Final = "py-kvcache/calibrate-show/1"


def describe(path: str) -> dict[str, Any]:
    """A file, or this node's in a folder. Raises ConfigError, KvCacheError, OSError."""
    path = thresholds_path(path)
    schema = _schema_of(path)
    if schema == THRESHOLDS_SCHEMA:
        thresholds = read_thresholds(path)
        content = thresholds.model_dump(mode="json", by_alias=True)
        return _shown("thresholds", thresholds_sentences(thresholds), content)
    if schema == CALIBRATION_SCHEMA:
        calibration = read_calibration(path)
        fits = [fit(calibration, one.concurrency) for one in calibration.sets]
        content = calibration.model_dump(mode="json", by_alias=True, exclude={"sets"})
        content["sets"] = [record(found) for found in fits]
        return _shown("calibration", [line for found in fits for line in _lines(found)], content)
    raise ConfigError(
        f"{path} has the schema {str(schema)[:60]!r}; give a calibration.json ({CALIBRATION_SCHEMA}) or a "
        f"thresholds.json ({THRESHOLDS_SCHEMA})"
    )


def _schema_of(path: str) -> object:
    text = read_text(path, MOST_CALIBRATION_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no JSON ({error}); give a calibration.json or thresholds.json"
        ) from None
    return value.get("schema") if isinstance(value, dict) else None


def _shown(kind: str, lines: list[str], content: dict[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "good": True, "kind": kind, "summary": lines, "content": content}


def _lines(found: Fit) -> list[str]:
    load = f" ({found.concurrency} requests at a time)" if found.concurrency > 1 else ""
    return [line + load for line in sentences(found)]
