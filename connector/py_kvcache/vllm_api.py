"""The only adapter to vLLM's types, 0.26 to 0.33; the rest of the package sees what is named here.

Sources: vllm/v1/kv_offload/base.py, vllm/distributed/kv_transfer/kv_connector/v1/offloading*.
Each version switch says which release brought the change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
    make_offload_key,
)

from py_kvcache import SUPPORTED_VLLM
from py_kvcache.errors import UnsupportedError
from py_kvcache.metrics import ALL, Kind, Samples

__all__ = [
    "GPULoadStoreSpec",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "LoadStoreSpec",
    "LookupResult",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "SupportsHMA",
    "TransferResult",
]

# Groups whose blocks hold plain keys and values of every token, so that a prefix is a prefix.
_FULL_ATTENTION = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# Cryptographic or not, only these are deterministic over processes once their seed is fixed.
_PICKLED_HASHES = frozenset({"sha256", "builtin", "xxhash"})
_UNSEEDED_HASHES = frozenset({"xxhash", "xxhash_cbor"})


class RequestFacts(Protocol):
    """What we read of vLLM's Request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_prompt_tokens: int
    num_tokens: int  # of prompt and answer so far
    num_computed_tokens: int
    lora_request: Any


@dataclass(frozen=True, slots=True)
class Version:
    """vLLM's version as far as switches need it."""

    major: int
    minor: int
    text: str

    def before(self, major: int, minor: int) -> bool:
        """True for releases older than ``major.minor``."""
        return (self.major, self.minor) < (major, minor)


def vllm_version() -> Version:
    """Parse ``vllm.__version__``; development builds without numbers count as unsupported (0.0)."""
    text = str(vllm.__version__)
    parts = text.split("+", maxsplit=1)[0].split(".")
    try:
        return Version(int(parts[0]), int(parts[1]), text)
    except (ValueError, IndexError):
        return Version(0, 0, text)


def metric_definitions() -> dict[str, Any]:
    """Our metrics in the form vLLM's Prometheus class wants."""
    kinds = {
        Kind.COUNTER: OffloadingCounterMetadata,
        Kind.GAUGE: OffloadingGaugeMetadata,
        Kind.FLAG: OffloadingGaugeMetadata,
    }
    return {m.name: kinds[m.kind](documentation=m.help, labelnames=m.labels) for m in ALL}


def to_stats(samples: Samples) -> OffloadingConnectorStats:
    """Turn our samples into the stats object that travels to the API server."""
    stats = OffloadingConnectorStats()
    for (name, labels), amount in samples.counters.items():
        stats.increase_counter(name, amount, labels)
    for (name, labels), value in samples.gauges.items():
        stats.set_gauge(name, value, labels)
    return stats


def storage_hit_source() -> Any:
    """vLLM's name for tokens that came from external storage (0.32; not asked for before)."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.DISK


def extra_config(vllm_config: Any) -> dict[str, Any]:
    """The mutable extra config of this connector's KVTransferConfig."""
    return vllm_config.kv_transfer_config.kv_connector_extra_config  # type: ignore[no-any-return]


def hash_seed(algorithm: str) -> str | None:
    """The seed of the first block's parent hash, None where it is random in each process.

    Since 0.29 sha256 variants fall back to a fixed seed; before, every process drew its own
    unless PYTHONHASHSEED was set (vllm/v1/core/kv_cache_utils.py, init_none_hash).
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if vllm_version().before(0, 29) or algorithm in _UNSEEDED_HASHES:
        return None
    return "vllm-default"


def hash_facts(vllm_config: Any) -> dict[str, Any]:
    """Everything that decides which hash a block of tokens gets."""
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))
    facts: dict[str, Any] = {"algorithm": algorithm, "seed": hash_seed(algorithm)}
    if algorithm in _PICKLED_HASHES:
        # Pickle's bytes differ between Python versions, hence the keys do.
        facts["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return facts


def _spec_names(kv_cache_config: Any) -> list[list[str]]:
    names = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None)
        members = list(inner.values()) if isinstance(inner, Mapping) else [spec]
        names.append(sorted({type(member).__name__ for member in members}))
    return names


def unsupported_reason(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> str | None:
    """One sentence that names the setting we do not serve, and the way out; None if all is well."""
    version = vllm_version()
    if not SUPPORTED_VLLM[0] <= (version.major, version.minor) < SUPPORTED_VLLM[1]:
        return f"vLLM {version.text} is not supported; use 0.26 to 0.33"
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        return f'kv_role is {transfer.kv_role!r}; py-kvcache needs "kv_role": "kv_both"'
    return (
        _unsupported_engine(vllm_config)
        or _unsupported_groups(kv_cache_config, block_tokens, int(vllm_config.model_config.max_model_len))
        or _unsupported_hashes(vllm_config)
    )


def _unsupported_engine(vllm_config: Any) -> str | None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name, label in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
    ):
        if getattr(parallel, name, 1) > 1:
            return f"{label} ({name}={getattr(parallel, name)}) is not supported yet; set it to 1"
    if getattr(cache, "calculate_kv_scales", False):
        return "calculate_kv_scales makes fp8 scales at run time, so stored bytes mean nothing; turn it off"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weight transfer changes the weights without telling a connector; serve without it"
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        return "VLLM_SERVER_DEV_MODE allows weights to change under the cache; unset it"
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0"):
        # An id that comes again in the step after its end: KeyError in _build_store_jobs, or, while we keep
        # the blocks of the ended one, vLLM's assertion on duplicate ids.
        return (
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION lets request ids come again, of which vLLM's offloading "
            "scheduler dies; unset it"
        )
    if _anonymous_media(vllm_config):
        return (
            "with mm_processor_cache_gb=0 and prefix caching off vLLM numbers images instead of hashing "
            "them, so another image would have the same blocks; set either of them"
        )
    budget = extra_config(vllm_config).get("sync_load_budget_bytes", 0)
    if budget or getattr(vllm_config.kv_transfer_config, "sync_load_budget_bytes", 0):
        return "sync_load_budget_bytes > 0 gives wrong text after a failed load (vLLM 0.33); set it to 0"
    return None


def _anonymous_media(vllm_config: Any) -> bool:
    """Whether block hashes say nothing of the images (vllm/renderers/base.py, _process_mm_uuids)."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    no_cache = media is not None and not getattr(media, "mm_processor_cache_gb", 1)
    return no_cache and not has_prefix_caching(vllm_config)


def _unsupported_groups(kv_cache_config: Any, block_tokens: int, max_model_len: int) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    names = _spec_names(kv_cache_config)
    if len(groups) != 1:
        kinds = ", ".join(sorted({n for group in names for n in group})) or "none"
        return f"models with {len(groups)} KV cache groups ({kinds}) are not supported yet, only one is"
    if not set(names[0]) <= _FULL_ATTENTION:
        return f"KV cache of kind {', '.join(names[0])} is not supported yet; only full attention and MLA are"
    spec = groups[0].kv_cache_spec
    if block_tokens > max_model_len:
        return (
            f"block_tokens={block_tokens} is more than the longest request (max_model_len {max_model_len}), "
            "so nothing would ever be stored; set block_tokens lower"
        )
    if getattr(spec, "non_causal", False):
        return "non-causal attention makes a block depend on later tokens; it cannot be cached by prefix"
    if block_tokens % spec.block_size:
        return (
            f"block_tokens={block_tokens} is no multiple of the engine's block of {spec.block_size} tokens; "
            f"set block_tokens to {-(-block_tokens // spec.block_size) * spec.block_size}"
        )
    return None


def _unsupported_hashes(vllm_config: Any) -> str | None:
    facts = hash_facts(vllm_config)
    if facts["seed"] is None:
        return (
            f"prefix hashes ({facts['algorithm']}, vLLM {vllm_version().text}) start from a random seed in "
            "each process, so nothing stored is ever found again; set PYTHONHASHSEED=0 in the environment "
            "of every engine"
        )
    return None


def replication(vllm_config: Any) -> int:
    """Number of ranks that hold equal KV bytes: MLA all of TP, GQA TP over KV heads."""
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    if vllm_config.model_config.use_mla:
        return tp
    return max(1, tp // max(1, int(vllm_config.model_config.get_total_num_kv_heads())))


def choose_recompute(vllm_config: Any, policy: str) -> None:
    """Make a failed load a recompute (vLLM's default fails the request).

    The scheduler reads the policy right after it built its connector. MultiConnector gives us a
    copy of the config while the scheduler reads the outer one, and no field of the copy leads
    there: the caller's frame does.
    """
    vllm_config.kv_transfer_config.kv_load_failure_policy = policy
    frame = sys._getframe()
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ == "MultiConnector":
            outer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
            if outer is not None:
                outer.kv_load_failure_policy = policy
        frame = frame.f_back  # type: ignore[assignment]


def was_aborted(request: Any) -> bool:
    """What vLLM notes of its blocks may be old: a request that was preempted before has others' by then."""
    return getattr(getattr(request, "status", None), "name", "") == "FINISHED_ABORTED"


def is_session(request: Any) -> bool:
    """Streaming input: turn by turn the request gets more of its prompt."""
    return bool(getattr(request, "resumable", False))


def ended_by_itself(request: Any) -> bool:
    """Not aborted: what vLLM does with the blocks of a request aborted during a load is its own business."""
    name = getattr(getattr(request, "status", None), "name", "")
    return name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def lora_manager_class() -> Any:
    """Whose ``_load_adapter(lora_request)`` is the one way in which a worker reads an adapter."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    return WorkerLoRAManager


def has_prefix_caching(vllm_config: Any) -> bool:
    """Of the engine itself, in the memory of its KV cache."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def is_cached(block_pool: Any, block_hash: bytes) -> bool:
    """Whether the engine's own prefix cache has a block, in its first group."""
    return block_pool.get_cached_block(block_hash, [0]) is not None


def tokens_of_a_block(kv_cache_config: Any) -> int:
    """Tokens of a request for each block of vLLM's pool; with several groups it takes one in each."""
    groups = kv_cache_config.kv_cache_groups
    return max(1, min(int(group.kv_cache_spec.block_size) for group in groups) // len(groups))


def key_of(block_hash: bytes) -> bytes:
    """vLLM's key of a block in the first group."""
    return bytes(make_offload_key(block_hash, 0))


def spans(scheduler_output: Any) -> list[tuple[int, int]]:
    """For each request of a step, how many of its tokens are computed before and after it."""
    counts = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    return [(before.get(name, 0), before.get(name, 0) + count) for name, count in counts.items()]


def is_idle(scheduler_output: Any) -> bool:
    """Whether a step computes nothing."""
    return not scheduler_output.total_num_scheduled_tokens


def check_supported_version() -> None:
    """Raise when this vLLM is outside the window; used by the tools that start engines."""
    version = vllm_version()
    if not SUPPORTED_VLLM[0] <= (version.major, version.minor) < SUPPORTED_VLLM[1]:
        raise UnsupportedError(f"vLLM {version.text} is not supported; install vllm>=0.26,<0.34")
