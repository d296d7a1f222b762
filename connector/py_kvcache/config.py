"""The connector's settings: parsed once, validated once, frozen.

Sources, strongest first: vLLM's ``kv_connector_extra_config``, the environment
(``PY_KVCACHE_<KEY>``, read by the exact names of known keys), the defaults below.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from py_kvcache.errors import ConfigError

ENV_PREFIX = "PY_KVCACHE_"
DEFAULT_BLOCK_TOKENS = 256

# vLLM reads these from the same dictionary; connector.py sets the first two itself.
VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "offload_prompt_only",
        "canonical_layout",
        "self_describing_kv_events",
        "sync_load_budget_bytes",  # only 0; vllm_api refuses more
    }
)
REFUSED_KEYS = {
    "block_size": "use block_tokens (tokens in one cached file)",
    "blocks_per_chunk": "use block_tokens (tokens in one cached file)",
}


def _mode(value: object) -> object:
    """File modes are octal text ("0664"): JSON has no octal numbers, and 664 would be taken as decimal."""
    if not isinstance(value, str):
        raise ValueError('write the mode as octal text in quotes, such as "0664"')
    try:
        return int(value, 8)
    except ValueError:
        raise ValueError(f"{value!r} is no octal mode such as 0664") from None


CHECKSUM_THREADS = 4

Mode = Annotated[int, BeforeValidator(_mode), Field(ge=0, le=0o7777)]
Rate = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Config(BaseModel):
    """All settings of the connector; only ``root`` has no default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str = Field(min_length=1, description="folder of the cache, on the shared volume (absolute path)")
    block_tokens: int = Field(
        DEFAULT_BLOCK_TOKENS,
        ge=1,
        le=65_536,
        description="tokens in one cached file; a multiple of the engine's block",
    )
    io_depth: int = Field(
        32, ge=1, le=1_024, description="reads and writes in the kernel's hands at once, per worker"
    )
    io_workers: int = Field(
        12, ge=1, le=1_024, description="how many of them it works on at once; copy_headroom more for reads"
    )
    open_lookahead: int = Field(32, ge=1, le=4_096, description="files opened ahead of the reads, per worker")
    copy_headroom: int = Field(
        4, ge=1, le=1_024, description="staging slots beyond io_depth, held by copies to and from the device"
    )
    staging_bytes: int | None = Field(
        None, ge=1, description="staging memory per worker; default: (io_depth + copy_headroom) slots"
    )
    memory_bytes: int = Field(
        0, ge=0, description="memory per worker, beside staging, in which blocks stay for the next use"
    )
    memory_tier: Literal["none", "lru", "arc", "lirs"] = Field(
        "lirs", description="which blocks stay in that memory"
    )
    preload: Literal["off", "on", "alone"] = Field(
        "on",
        description="read what waiting requests will want into that memory; alone: one request at a time, "
        "and only while no load is under way",
    )
    preload_requests: int = Field(8, ge=1, le=64, description="how many waiting requests are looked up ahead")
    preload_bytes: int | None = Field(
        None, ge=0, description="how much of memory_bytes preloads may take; default: a third of it"
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        "auto", description="O_DIRECT: auto tries it on the real folder"
    )
    ring: Literal["auto", "io_uring", "threads"] = Field(
        "auto", description="I/O engine; auto probes io_uring in a child process"
    )
    checksum: bool = Field(True, description="write and check a digest of every block")
    checksum_threads: int = Field(
        CHECKSUM_THREADS, ge=1, le=64, description="helper threads that compute the digests"
    )
    fsync: bool = Field(False, description="fsync each file before it is published")
    read_bytes_per_s: Rate = Field(0, description="limit of the read rate per worker; 0 = none")
    store_bytes_per_s: Rate = Field(0, description="limit of the write rate per worker; 0 = none")
    store_bytes_per_day: Rate = Field(
        0, description="limit of the bytes written per worker and day; 0 = none"
    )
    store_stop_at: Fraction = Field(0.90, description="stores stop when the volume is this full")
    store_resume_at: Fraction = Field(0.85, description="stores go on when the volume is at most this full")
    on_unsupported: Literal["fail", "disable"] = Field(
        "fail", description="model or setting we do not support: refuse to start, or serve without a cache"
    )
    file_mode: Mode = Field(0o664, description="mode of the files (octal text)")
    dir_mode: Mode = Field(0o2775, description="mode of the folders (octal text)")
    load_deadline_s: Seconds = Field(30.0, description="a load that takes longer becomes a recompute")
    store_deadline_s: Seconds = Field(60.0, description="a store that takes longer is given up")
    lookup_deadline_s: Seconds = Field(1.0, description="a look-up that takes longer is a miss")
    max_queued_stores: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="blocks waiting to be stored, per engine; more are dropped and counted",
    )
    gate: Literal["off", "static", "adaptive"] = Field(
        "adaptive", description="which hits are loaded: all, by measured lengths, or where it is faster"
    )
    thresholds: str = Field(
        "", description="file of measured thresholds, or a folder with one for each node (NODE_NAME)"
    )
    store_policy: Literal["all", "break_even", "second_touch"] = Field(
        "all",
        description="computed blocks that are stored: all, none while no hit can pay, those seen twice",
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute",
        description="what vLLM does with a request whose load failed (its kv_load_failure_policy)",
    )

    @model_validator(mode="after")
    def _check(self) -> Config:
        if not os.path.isabs(self.root) or "\0" in self.root:
            raise ValueError(f"root must be an absolute path, got {self.root!r}")
        if not self.root.isascii():
            raise ValueError("root must be an ASCII path (io_uring takes names only so)")
        if self.thresholds and not os.path.isabs(self.thresholds):
            raise ValueError(f"thresholds must be an absolute path, got {self.thresholds!r}")
        if self.file_mode & 0o600 != 0o600 or self.dir_mode & 0o700 != 0o700:
            raise ValueError(
                "file_mode needs 0600 and dir_mode 0700 at least, or the owner cannot use its cache"
            )
        if self.store_resume_at > self.store_stop_at:
            stop, resume = self.store_stop_at, self.store_resume_at
            raise ValueError(
                f"store_resume_at ({resume}) must not be above store_stop_at ({stop}); lower it too"
            )
        return self

    def preload_blocks(self, file_bytes: int) -> int:
        """How many block files preloads may hold in memory, per worker."""
        if self.preload == "off" or self.memory_tier == "none":
            return 0
        share = self.memory_bytes // 3 if self.preload_bytes is None else self.preload_bytes
        return min(share, self.memory_bytes) // file_bytes

    @property
    def root_path(self) -> str:
        """The root without trailing slashes."""
        return self.root.rstrip("/") or "/"


def parse_config(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """Build the frozen settings from vLLM's extra config and the environment.

    Raises:
        ConfigError: one sentence a line, each naming the key and the remedy.
    """
    environ = os.environ if environ is None else environ
    known = Config.model_fields
    for key in extra:
        if key in REFUSED_KEYS:
            raise ConfigError(
                f"py-kvcache: kv_connector_extra_config: {key!r} is not taken here; {REFUSED_KEYS[key]}"
            )
        if key not in known and key not in VLLM_KEYS:
            close = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"py-kvcache: kv_connector_extra_config: unknown key {key!r}; {hint}")
    for key, value in extra.items():
        if isinstance(value, bool) and key in known and known[key].annotation is not bool:
            raise ConfigError(f"py-kvcache: kv_connector_extra_config: {key} takes no {str(value).lower()}")
    values: dict[str, Any] = {}
    for key in known:
        if key in extra:
            values[key] = extra[key]
        elif (text := environ.get(ENV_PREFIX + key.upper())) not in (None, ""):
            values[key] = text
    if "root" not in values:
        raise ConfigError(
            'py-kvcache: the cache root is missing: set "root" in kv_connector_extra_config '
            f"or {ENV_PREFIX}ROOT"
        )
    try:
        return Config(**values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"]) or "settings"
            lines.append(
                f"{where}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})"
                if item["loc"]
                else item["msg"].removeprefix("Value error, ")
            )
        raise ConfigError("py-kvcache settings: " + "; ".join(lines)) from None
