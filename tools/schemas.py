"""Write the JSON schemas of calibration's files to docs/schemas: `make schemas`."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from py_kvcache.models import CALIBRATION_SCHEMA, THRESHOLDS_SCHEMA, Calibration, Thresholds

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
_MODELS: dict[str, tuple[str, type[BaseModel]]] = {
    "calibration.json": (CALIBRATION_SCHEMA, Calibration),
    "thresholds.json": (THRESHOLDS_SCHEMA, Thresholds),
}


def generate() -> dict[str, str]:
    """Text by file name."""
    texts = {}
    for name, (schema, model) in _MODELS.items():
        content = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **model.model_json_schema(by_alias=True),
            "title": schema,
        }
        texts[name] = json.dumps(content, indent=2) + "\n"
    return texts


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in generate().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
