"""What `bench serve` compares: one entry for each system, made of public options only.

An entry says what an engine is given, why the system cannot run here, which counters are its own and what
it leaves behind. To add a system, add an entry.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_WORKER, _FLOOR = "py_kvcache.bench.serve_worker", "py_kvcache.bench.floor"
GB = 10**9


@dataclass(frozen=True)
class Host:
    """What decides whether a system can run here."""

    gpu: bool
    importable: Callable[[str], bool]

    @staticmethod
    def find() -> Host:
        """This machine, without importing torch."""
        gpu = shutil.which("nvidia-smi") is not None or os.path.exists("/dev/nvidia0")
        return Host(
            gpu or os.path.exists("/dev/kfd"), lambda name: importlib.util.find_spec(name) is not None
        )


@dataclass(frozen=True)
class Place:
    """Where and how one engine of a system runs; ``folder`` is its own and empty."""

    folder: str
    engine_id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def rest(self, *taken: str) -> dict[str, Any]:
        """Options but those an entry has used itself."""
        return {name: value for name, value in self.options.items() if name not in taken}


def _nothing(_place: Place) -> dict[str, Any]:
    return {}


def _no_variables(_place: Place) -> dict[str, str]:
    return {}


def _never(_host: Host) -> str | None:
    return None


@dataclass(frozen=True)
class System:
    """One entry.

    Args:
        engine: options for vLLM's engine beyond those common to all.
        environment: variables of its process.
        missing: why it cannot run on a host; None if it can.
        counters: prefix of its own Prometheus counters; "" if it has none in the API server's process.
        reads, writes: those of them that count bytes from and to its cache; "" if there is none.
        memory_gb: host memory that it takes from /dev/shm, by its options.
        leftovers: paths outside its folder to remove afterwards.
        uses_disk: whether every document becomes files in its folder.
        files_of: the system whose files it reads, after which it runs; "" for systems with their own.
        options: names of options that it takes; None for any (the system itself refuses wrong ones).
        module: what runs as its process.
    """

    name: str
    about: str
    engine: Callable[[Place], dict[str, Any]] = _nothing
    environment: Callable[[Place], dict[str, str]] = _no_variables
    missing: Callable[[Host], str | None] = _never
    counters: str = ""
    reads: str = ""
    writes: str = ""
    memory_gb: Callable[[Mapping[str, Any]], float] = lambda _options: 0.0
    leftovers: Callable[[Place], list[str]] = lambda _place: []
    uses_disk: bool = False
    files_of: str = ""
    options: tuple[str, ...] | None = None
    module: str = _WORKER


def _connector(place: Place, name: str, extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_role": "kv_both",
            "engine_id": place.engine_id,
            **({"kv_connector_extra_config": extra} if extra else {}),
            **more,
        }
    }


def _needs_gpu(host: Host) -> str | None:
    return None if host.gpu else "vLLM's offloading to CPU memory does not support CPU engines"


def _needs_lmcache(host: Host) -> str | None:
    if not host.importable("lmcache"):
        return "the Python package lmcache is not installed"
    return None if host.gpu else "LMCache's connector is compared on GPUs only"


def _cpu_offload(place: Place) -> dict[str, Any]:
    extra = {
        "block_size": 64,  # as in vLLM's guide
        "cpu_bytes_to_use": int(place.options.get("cpu_gb", 60) * GB),
        **place.rest("cpu_gb"),
    }
    return _connector(place, "OffloadingConnector", extra)


_FS_TIER_GB = 24
_TIER_OPTIONS = ("n_read_threads", "n_write_threads")


def _fs_tier(place: Place) -> dict[str, Any]:
    tier = {name: place.options[name] for name in _TIER_OPTIONS if name in place.options}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "block_size": 256,  # tokens in a file, as ours have; vLLM's default, one engine block, is slower
        "cpu_bytes_to_use": int(place.options.get("cpu_gb", _FS_TIER_GB) * GB),
        "secondary_tiers": [{"type": "fs", "root_dir": place.folder, **tier}],
        **place.rest("cpu_gb", *_TIER_OPTIONS),
    }
    return _connector(place, "OffloadingConnector", extra)


def _lmcache_variables(place: Place) -> dict[str, str]:
    settings: dict[str, Any] = {
        "chunk_size": 256,
        "local_cpu": False,
        "max_local_cpu_size": place.options.get("cpu_gb", 8),  # what disk reads and writes pass through
        "local_disk": f"file://{place.folder}/",
        "max_local_disk_size": 500,
        "track_usage": False,
        **place.rest("cpu_gb"),
    }
    return {f"LMCACHE_{name.upper()}": _as_text(value) for name, value in settings.items()}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_WORDS_OF_OURS = ("direct_io", "gate", "preload")


def _py_kvcache(place: Place) -> dict[str, Any]:
    # The data path is what is measured; whether to use it is another question, and gate=adaptive asks it.
    extra = {"root": place.folder, "gate": "off", **place.options}
    # A variant's on and off have become truth values, which most of our settings have in words.
    for name, value in extra.items():
        if isinstance(value, bool) and name in _WORDS_OF_OURS:
            extra[name] = "on" if value else "off"
    return _connector(place, "PyKvCacheConnector", extra, kv_connector_module_path="py_kvcache.connector")


def _fixed_seed(_place: Place) -> dict[str, str]:
    # Below vLLM 0.29 block hashes, and so file names, are random in each process without it.
    return {"PYTHONHASHSEED": "0"}


_ENTRIES = (
    System("recompute", "vLLM without any cache", options=()),
    System(
        "prefix-cache",
        "vLLM's own prefix cache in GPU memory",
        engine=lambda _place: {"enable_prefix_caching": True},
        options=(),
    ),
    System(
        "vllm-cpu-offload",
        "vLLM's OffloadingConnector to pinned memory (cpu_gb, 60)",
        engine=_cpu_offload,
        environment=_fixed_seed,
        missing=_needs_gpu,
        counters="vllm:kv_offload_",
        reads="vllm:kv_offload_load_bytes",
        writes="vllm:kv_offload_store_bytes",
    ),
    System(
        "vllm-fs-tier",
        "vLLM's tiered offloading: memory (cpu_gb, 24), then files",
        engine=_fs_tier,
        environment=_fixed_seed,
        missing=_needs_gpu,
        counters="vllm:kv_offload_",
        reads="vllm:kv_offload_load_bytes",
        writes="vllm:kv_offload_store_bytes",
        memory_gb=lambda options: options.get("cpu_gb", _FS_TIER_GB),
        # Its memory is a file here, which an engine that was killed leaves.
        leftovers=lambda place: [f"/dev/shm/vllm_offload_{place.engine_id}*.mmap"],
        uses_disk=True,
    ),
    System(
        "lmcache",
        "LMCache's disk back end alone, in vLLM's process",
        engine=lambda place: _connector(place, "LMCacheConnectorV1", {}),
        environment=lambda place: {**_fixed_seed(place), **_lmcache_variables(place)},
        missing=_needs_lmcache,
        uses_disk=True,
    ),
    System(
        "py-kvcache",
        "this connector, disk only",
        engine=_py_kvcache,
        environment=_fixed_seed,
        counters="vllm:py_kvcache_",
        reads="vllm:py_kvcache_load_bytes",
        writes="vllm:py_kvcache_store_bytes",
        uses_disk=True,
    ),
    System(
        "floor",
        "the files of py-kvcache through the same ring and copies, without vLLM",
        files_of="py-kvcache",
        module=_FLOOR,
    ),
)
SYSTEMS: Mapping[str, System] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
BASELINE, FLOOR = "recompute", "floor"
