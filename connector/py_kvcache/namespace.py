"""The namespace digest: everything that makes two blocks of equal hash hold different bytes.

A namespace is one folder. Whatever is left out here is a way to serve wrong text, so the rule is:
when in doubt, in. Leaving something in too much costs a cold cache after a change.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

from py_kvcache import vllm_api
from py_kvcache.errors import UnsupportedError
from py_kvcache.layout import namespace_name
from py_kvcache.weights import SHARD_ENDINGS, content_mark, weights_mark

SCHEMA = 1
# The CPU attention backend packs keys for the instruction set that it finds.
_CPU_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "asimd", "bf16"}
)
_HF_NOISE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


_SNAPSHOT = re.compile("models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def digest(fields: Mapping[str, Any]) -> str:
    """First 16 hex digits of sha256 over the fields as sorted JSON."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _commit_of(model: str, revision: str | None, *names: str) -> str | None:
    """The commit behind a hub name, read from the local hub cache, where vLLM itself found the model.

    Raises:
        ValueError: not a hub name.
    """
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        found = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(found, str) and "snapshots" in (parts := found.split(os.sep)):
            return parts[parts.index("snapshots") + 1]
    return None


def model_identity(model: str, revision: str | None, load_format: str, seed: int) -> dict[str, Any]:
    """Which weights these are: a commit, or the marks of local files; dummy weights come from a seed.

    Raises:
        UnsupportedError: nothing here tells one version of the weights from another.
    """
    if load_format == "dummy":
        return {"dummy_seed": seed}
    if os.path.exists(model):
        # Offline, vLLM is given the hub cache's own folder; its commit is the same on every node, the
        # times of its files are not.
        if (snapshot := _SNAPSHOT.search(os.path.abspath(model))) is not None:
            return {"commit": snapshot["commit"]}
        if marks := weights_mark(model):
            return {"files": marks}
        raise UnsupportedError(
            f"{model} holds no weight files ({', '.join(SHARD_ENDINGS)}), so a change of the weights would "
            "go unseen; use a local copy or a hub name"
        )
    commit = _commit_of(model, revision, "config.json", "params.json")
    if commit is None and re.fullmatch("[0-9a-f]{40}", revision or ""):
        commit = revision
    if commit is None:
        raise UnsupportedError(
            f"the commit of {model} is not in the local hub cache, so a change of the weights would go "
            "unseen; give --revision as a full commit hash, or use a local folder"
        )
    return {"commit": commit}


def display_name(model: str) -> str:
    """Name of the model for people, in folder names: no local path, no bare commit hash."""
    if (snapshot := _SNAPSHOT.search(model)) is not None:
        return snapshot["repo"].replace("--", "/")
    return os.path.basename(model.rstrip("/")) if os.path.isabs(model) or os.path.exists(model) else model


def adapter_identity(path: str) -> str:
    """Hash of a LoRA adapter's files; its name and path say nothing about its weights.

    Raises:
        OSError: the folder cannot be read, or no commit is known for a hub name.
        ValueError: neither a path nor a hub name.
    """
    if not os.path.exists(path):
        commit = _commit_of(path, None, "adapter_config.json")
        if commit is None:
            raise FileNotFoundError(errno.ENOENT, "neither a folder nor in the local hub cache", path)
        return digest({"adapter": path, "commit": commit})
    files = [(name, os.path.join(path, name)) for name in sorted(os.listdir(path))]
    return digest(
        {
            "adapter": [
                [name, content_mark(file)]
                for name, file in files
                if name.endswith((*SHARD_ENDINGS, ".json")) and os.path.isfile(file)
            ]
        }
    )


def cpu_marks() -> list[str]:
    """Machine and the instruction sets that decide how the CPU backend lays out keys."""
    flags: set[str] = set()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    flags = set(line.split(":", 1)[1].split()) & _CPU_FLAGS
                    break
    except OSError:
        flags = {"unknown"}
    return [platform.machine(), *sorted(flags)]


def _without_pool(shape: list[int], num_blocks: int) -> tuple[int, ...]:
    """The shape with the pool's dimension as minus the number of kernel blocks in one block.

    A backend may cut each block into smaller ones, so that this dimension is a multiple of the pool.
    """
    for position, size in enumerate(shape):
        if size >= num_blocks and size % num_blocks == 0:
            shape[position] = -(size // num_blocks)
            break
    return tuple(shape)


def tensor_marks(kv_caches: Mapping[str, Any], num_blocks: int) -> list[list[Any]]:
    """Shape, order of dimensions and type of each distinct KV tensor, without the pool's size.

    Args:
        kv_caches: layer name -> tensor or list of tensors, as vLLM registers them.
        num_blocks: size of the pool, left out of the shapes since it changes nothing in a block.
    """
    marks: set[tuple[Any, ...]] = set()
    for value in kv_caches.values():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            shape = _without_pool([int(size) for size in tensor.shape], num_blocks)
            order = tuple(sorted(range(tensor.dim()), key=lambda d, t=tensor: -t.stride(d)))  # type: ignore[misc]
            marks.add((shape, order, str(tensor.dtype), tensor.device.type))
    return [list(mark) for mark in sorted(marks)]


def backend_names(vllm_config: Any) -> list[str]:
    """Names of the attention backends that wrote the blocks, as far as the layers tell."""
    context = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    names = set()
    for layer in context.values():
        backend = getattr(layer, "get_attn_backend", None)
        if backend is not None:
            names.add(backend().get_name())
    return sorted(names)


def _hf_facts(model_config: Any) -> Any:
    config = getattr(model_config, "hf_config", None)
    if config is None:
        return None
    return {key: value for key, value in config.to_dict().items() if key not in _HF_NOISE}


def _length_facts(model: Any) -> Any:
    """The longest request, which some models look at when they are built.

    LongRoPE (Phi-3, Phi-4) takes its long factors by it, Llama 4 its attention temperature; vLLM's models
    may read it anywhere. Fitted to the memory by vLLM (-1), it varies from start to start, and the models
    were built before that with what the model's own configuration allows.
    """
    return "auto" if getattr(model, "original_max_model_len", None) == -1 else int(model.max_model_len)


def _temperature_tuning(model: Any) -> Any:
    """Llama 4 takes this from among the sampling defaults, of which nothing else reaches a model."""
    name = "attn_temperature_tuning"
    override = getattr(model, "override_generation_config", None) or {}
    own: dict[str, Any] = getattr(model, "try_get_generation_config", dict)() or {}
    return override.get(name, own.get(name))


def engine_facts(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> dict[str, Any]:
    """All that the scheduler knows and that decides the bytes of a block; written to config.json."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    load = vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    spec = vllm_config.speculative_config
    version = vllm_api.vllm_version()
    return {
        "schema": SCHEMA,
        "engine": f"vllm {version.major}.{version.minor}",
        "model": display_name(model.model),
        "weights": model_identity(model.model, model.revision, load_format, model.seed),
        "load": [
            load_format,
            str(getattr(load, "model_loader_extra_config", "")),
            str(getattr(load, "ignore_patterns", "")),
        ],
        "model_code": [
            str(getattr(model, name, None))
            for name in ("model_impl", "model_class_overrides", "code_revision")
        ],
        "max_model_len": _length_facts(model),
        "temperature_tuning": _temperature_tuning(model),
        "additional_config": str(getattr(vllm_config, "additional_config", "")),
        "hf_config": digest({"hf": _hf_facts(model)}),
        "multimodal": str(getattr(model, "multimodal_config", None)),
        "hf_overrides": str(getattr(model, "hf_overrides", "")),
        "quantization": [str(model.quantization), str(getattr(model, "quantization_config", ""))],
        "dtype": str(model.dtype),
        "kv_dtype": [str(cache.cache_dtype), str(getattr(cache, "kv_cache_dtype_skip_layers", []))],
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "block_tokens": block_tokens,
        "groups": [
            {
                "block_size": group.kv_cache_spec.block_size,
                "layers": sorted(group.layer_names),
                "kind": names,
            }
            for group, names in zip(
                kv_cache_config.kv_cache_groups, vllm_api._spec_names(kv_cache_config), strict=True
            )
        ],
        "parallel": {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "replicas": vllm_api.replication(vllm_config),
        },
        "prefix_hash": vllm_api.hash_facts(vllm_config),
        "speculative": None
        if spec is None
        else [
            str(getattr(spec, name, None))
            for name in ("method", "model", "revision", "num_speculative_tokens")
        ],
        "lora": None
        if vllm_config.lora_config is None
        else str(getattr(vllm_config.lora_config, "lora_dtype", "")),
    }


class Spaces:
    """Names of the namespaces of one engine: one for plain requests, one for each LoRA adapter.

    ``layouts`` are the descriptions that the workers sent of their KV tensors; without them no name
    is known yet. A reset gives every name a random epoch, so that nothing stored before is found.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = dict(facts)
        self._epoch = ""
        self._layouts: list[Any] | None = None

    @property
    def known(self) -> bool:
        """True once the workers' layouts are known."""
        return self._layouts is not None

    def set_layouts(self, layouts: Iterable[Any]) -> None:
        """Take the descriptions of all ranks; equal ones count once."""
        self._layouts = sorted({json.dumps(layout, sort_keys=True) for layout in layouts})

    def new_epoch(self) -> None:
        """Forget everything stored so far (vLLM's reset_cache)."""
        self._epoch = os.urandom(8).hex()

    def fields(self, adapter: str | None) -> dict[str, Any]:
        """What config.json says."""
        return {**self._facts, "layouts": self._layouts, "epoch": self._epoch, "adapter": adapter}

    def name(self, adapter: str | None) -> str:
        """Folder name of the namespace. Call only when ``known``."""
        assert self._layouts is not None, (
            "asked for a namespace before the workers described their KV tensors"
        )
        return namespace_name(str(self._facts["model"]), digest(self.fields(adapter)))
