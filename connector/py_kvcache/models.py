"""Typed files of calibration, each for one node and one engine.

calibration.json holds what was measured, request by request. thresholds.json is what follows from it and what
the connector reads: the least prefix worth loading, by source and prompt length, and the time to compute a
prompt. Small enough to stand in a ConfigMap a hundred times over.
"""

from __future__ import annotations

import json
import os
import stat
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from py_kvcache.curves import Curve
from py_kvcache.errors import ConfigError

MOST_BYTES: Final = 1 << 20
MOST_CALIBRATION_BYTES: Final = 64 << 20
THRESHOLDS_SCHEMA: Final = "py-kvcache/thresholds/1"
CALIBRATION_SCHEMA: Final = "py-kvcache/calibration/1"
NODE_VARIABLE: Final = "NODE_NAME"

Source = Literal["disk", "memory"]
Kind = Literal["compute", "disk", "memory", "suffix"]
Tokens = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Knots = tuple[tuple[float, float], ...]
Tables = dict[Source, tuple[tuple[Tokens, Tokens], ...]]

_FROZEN: Final = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
_Model = TypeVar("_Model", bound=BaseModel)


class Sample(BaseModel):
    """One measured request.

    Attributes:
        kind: where the prefix came from: "compute" for nowhere, "suffix" for the GPU's memory or a load when
            the rest of the prompt is what counts.
        tokens: of the prompt.
        prefix: tokens of it that were cached; 0 for "compute".
        seconds: time to first token.
        copy_s: duration of the transfer of this request's blocks, read and GPU copy; None is unknown.
        round: in which pass over all lengths.
    """

    model_config = _FROZEN

    kind: Kind
    tokens: int = Field(gt=0)
    prefix: Tokens = 0
    seconds: Seconds
    copy_s: Seconds | None = None
    round: Tokens = 0

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Sample:
        if self.kind == "compute" and self.prefix:
            raise ValueError("a computed prompt has no cached prefix: prefix must be 0")
        if self.kind != "compute" and not 0 < self.prefix < self.tokens:
            raise ValueError(f"{self.kind}: the prefix lies between 0 and the prompt's tokens, exclusive")
        return self


class SampleSet(BaseModel):
    """What was measured with so many requests at a time."""

    model_config = _FROZEN

    concurrency: int = Field(ge=1)
    samples: tuple[Sample, ...]


class Calibration(BaseModel):
    """What calibration.json holds.

    Attributes:
        engine: digest of model, types, layout, parallelism and versions for which it was measured.
        block_tokens, block_bytes: of one block; the payload that one rank has of it.
        ranks: workers of the engine, each with its part of every block.
        longest: prompt that the model takes, in tokens.
        machine: GPU, driver, versions, file system; for people and for comparing.
        arguments: the engine's.
        skipped: what could not be measured and why, in sentences.
        created: ISO 8601.
    """

    model_config = _FROZEN

    schema_: Literal["py-kvcache/calibration/1"] = Field(alias="schema")
    engine: Digest
    block_tokens: int = Field(gt=0)
    block_bytes: int = Field(gt=0)
    ranks: int = Field(ge=1)
    longest: int = Field(gt=0)
    machine: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    created: str
    sets: tuple[SampleSet, ...]

    @field_validator("created")
    @classmethod
    def _is_a_date(cls, value: str) -> str:
        datetime.fromisoformat(value.removesuffix("Z"))
        return value

    @field_validator("sets")
    @classmethod
    def _one_for_each_concurrency(cls, value: tuple[SampleSet, ...]) -> tuple[SampleSet, ...]:
        levels = [one.concurrency for one in value]
        if len(set(levels)) < len(levels):
            raise ValueError(f"there is more than one set for a concurrency: {levels}")
        return value


class _OfOneLoad(BaseModel):
    """What is checked of tables and curve, for any number of requests at a time."""

    model_config = _FROZEN

    @field_validator("thresholds", check_fields=False)
    @classmethod
    def _ascending(cls, value: Tables) -> Tables:
        return _check_tables(value)

    @field_validator("prefill", check_fields=False)
    @classmethod
    def _is_curve(cls, value: Knots) -> Knots:
        return _check_curve(value)


class UnderLoad(_OfOneLoad):
    """The same as in Thresholds, for another number of requests at a time."""

    concurrency: int = Field(ge=1)
    exact: dict[Source, Tokens] = Field(default_factory=dict)
    thresholds: Tables = Field(default_factory=dict)
    prefill: Knots = ()


class Thresholds(_OfOneLoad):
    """What thresholds.json holds. A source that it does not name is unknown.

    Attributes:
        engine: digest of model, types, layout, parallelism and versions for which it was measured.
        concurrency: requests at a time for which it was measured.
        exact: by source, the least prefix from which on a load pays, whatever the prompt: one longer than the
            model takes where none does.
        thresholds: by source, pairs (prompt tokens, least prefix worth loading), prompts ascending; a least
            prefix of 0: loading always pays; one longer than the prompt: never.
        prefill: pairs (tokens, seconds) of computing a prompt that nothing is known of.
        load: by source, pairs (tokens, seconds) of loading a prefix.
        under_load: the same for more requests at a time.
        made: when, where and by which version, for people.
    """

    schema_: Literal["py-kvcache/thresholds/1"] = Field(alias="schema")
    engine: Digest
    concurrency: int = Field(default=1, ge=1)
    exact: dict[Source, Tokens] = Field(default_factory=dict)
    thresholds: Tables = Field(default_factory=dict)
    prefill: Knots = ()
    load: dict[Source, Knots] = Field(default_factory=dict)
    under_load: tuple[UnderLoad, ...] = ()
    made: dict[str, str] = Field(default_factory=dict)

    @field_validator("load")
    @classmethod
    def _are_curves(cls, value: dict[Source, Knots]) -> dict[Source, Knots]:
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
    return _parse(
        Thresholds, path, read_text(path, MOST_BYTES), "thresholds", "calibrate again, or remove it"
    )


def read_calibration(path: str) -> Calibration:
    """Raises ConfigError with what is wrong and what to do; OSError if the file cannot be read."""
    text = read_text(path, MOST_CALIBRATION_BYTES)
    return _parse(Calibration, path, text, "calibration", "give the calibration.json of `calibrate measure`")


def read_text(path: str, most_bytes: int) -> bytes:
    """A regular file's content, one byte more than ``most_bytes`` at most. Raises ConfigError, OSError."""
    # Without O_NONBLOCK opening a FIFO would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(
                f"{path} is a folder: give a file in it, or set {NODE_VARIABLE} to the name of this node's"
            )
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is no ordinary file; give the file that calibration has written")
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(text) > most_bytes:
        raise ConfigError(
            f"{path} has more than {most_bytes} bytes; give the file that calibration has written"
        )
    return text


def _parse(model: type[_Model], path: str, text: bytes, what: str, remedy: str) -> _Model:
    try:
        return model.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or what
        problem = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    except (ValueError, RecursionError) as error:
        problem = f"no JSON: {error}"
    raise ConfigError(f"{path} holds no {what} of py-kvcache ({problem}); {remedy}")


def _check_tables(value: Tables) -> Tables:
    for source, table in value.items():
        prompts = [prompt for prompt, _ in table]
        if not table:
            raise ValueError(f"{source}: the table is empty; leave the source out instead")
        if any(b <= a for a, b in pairwise(prompts)):
            raise ValueError(f"{source}: prompt lengths must ascend, got {prompts}")
    return value


def _check_curve(value: Knots) -> Knots:
    if value:
        Curve(value)
    return value
