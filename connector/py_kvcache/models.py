"""Typed files that calibration writes and others read: thresholds.json.

One file for one node and one engine: the least prefix worth loading, by source and prompt length, and the
curves behind it. Small enough to stand in a ConfigMap a hundred times over.
"""

from __future__ import annotations

import json
import os
import stat
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from py_kvcache.curves import Curve
from py_kvcache.errors import ConfigError

MOST_BYTES = 1 << 20
THRESHOLDS_SCHEMA = "py-kvcache/thresholds/1"
NODE_VARIABLE = "NODE_NAME"

Source = Literal["disk", "memory"]
Tokens = Annotated[int, Field(ge=0)]


class Thresholds(BaseModel):
    """What thresholds.json holds.

    Attributes:
        engine: digest of model, types, layout, parallelism and versions for which it was measured.
        thresholds: by source, pairs (prompt tokens, least prefix worth loading), prompts ascending; a least
            prefix of 0: loading always pays.
        prefill: pairs (tokens, seconds) of computing a prompt that nothing is known of.
        load: by source, pairs (tokens, seconds) of loading a prefix.
        made: when, where and by which version, for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["py-kvcache/thresholds/1"] = Field(alias="schema")
    engine: str = Field(pattern="^[0-9a-f]{16}$")
    thresholds: dict[Source, tuple[tuple[Tokens, Tokens], ...]] = Field(default_factory=dict)
    prefill: tuple[tuple[float, float], ...] = ()
    load: dict[Source, tuple[tuple[float, float], ...]] = Field(default_factory=dict)
    made: dict[str, str] = Field(default_factory=dict)

    @field_validator("thresholds")
    @classmethod
    def _ascending(cls, value: dict[Source, Any]) -> dict[Source, Any]:
        for source, table in value.items():
            prompts = [prompt for prompt, _ in table]
            if not table:
                raise ValueError(f"{source}: the table is empty; leave the source out instead")
            if any(b <= a for a, b in pairwise(prompts)):
                raise ValueError(f"{source}: prompt lengths must ascend, got {prompts}")
        return value

    @field_validator("prefill")
    @classmethod
    def _is_curve(cls, value: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if value:
            Curve(value)
        return value

    @field_validator("load")
    @classmethod
    def _are_curves(cls, value: dict[Source, Any]) -> dict[Source, Any]:
        for points in value.values():
            Curve(points)
        return value

    def curve(self) -> Curve | None:
        """Of computing a prompt; None if it was not measured."""
        return Curve(self.prefill) if self.prefill else None


def thresholds_path(path: str, environ: dict[str, str] | None = None) -> str:
    """The file that a setting names: itself, or this node's within a folder (a mounted ConfigMap)."""
    node = (os.environ if environ is None else environ).get(NODE_VARIABLE, "")
    return os.path.join(path, node) if node and os.path.isdir(path) else path


def read_thresholds(path: str) -> Thresholds:
    """Raises ConfigError with what is wrong and what to do; OSError if the file cannot be read."""
    # Without O_NONBLOCK opening a FIFO would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is no ordinary file; give the file that calibration has written")
        text = file.read(MOST_BYTES + 1)
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return Thresholds.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "thresholds"
        problem = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    except (ValueError, RecursionError) as error:
        problem = f"no JSON: {error}"
    raise ConfigError(f"{path} holds no thresholds of py-kvcache ({problem}); calibrate again, or remove it")
