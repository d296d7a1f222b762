"""The namespace digest: everything that makes two blocks of equal hash hold different bytes.

A namespace is one folder. Whatever is left out here is a way to serve wrong text, so the rule is:
when in doubt, in. Leaving something in too much costs a cold cache after a change.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

from py_kvcache import vllm_api
from py_kvcache.identity import (
    digest,
    display_name,
    foreign_code,
    model_identity,
    refuse_parts_from_elsewhere,
    software,
)
from py_kvcache.layout import namespace_name

SCHEMA = 1
_MOST_NAMES = 4_096
# The CPU attention backend packs keys for the instruction set that it finds.
_CPU_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "asimd", "bf16"}
)
_HF_NOISE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


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


# Parts of a local version that name a device.
_BUILT_FOR = re.compile(r"cpu|cu\d+|rocm\d*|xpu|tpu|neuron\d*|\d+")

# Of LoRAConfig: how many adapters are kept, and how kernels are captured.
_LORA_NOISE = frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora"})


def _lora_facts(config: Any) -> Any:
    """All else of vLLM's LoRA settings: which modules they apply to, types, layouts."""
    if config is None:
        return None
    names = (field.name for field in dataclasses.fields(config))
    return {name: str(getattr(config, name, None)) for name in names if name not in _LORA_NOISE}


def _build(version: str) -> str:
    """The whole version, since a patch release or somebody's own build may mend what a model computes.

    But not what it was built for, which the marks of the KV tensors tell: 0.30.0 and 0.30.0+cu130 are one.
    """
    public, _, local = version.partition("+")
    own = [part for part in local.split(".") if part and not _BUILT_FOR.fullmatch(part)]
    return "+".join([public, *([".".join(own)] if own else [])])


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
    hf_config = _hf_facts(model)
    refuse_parts_from_elsewhere(getattr(model, "hf_config", None))
    return {
        "schema": SCHEMA,
        "engine": f"vllm {_build(vllm_api.vllm_version().text)}",
        "software": software(),
        "model": display_name(model.model),
        "weights": model_identity(
            model.model,
            model.revision,
            load_format,
            model.seed,
            getattr(getattr(model, "hf_config", None), "_commit_hash", None),
            getattr(load, "download_dir", None),
        ),
        "load": [
            load_format,
            str(getattr(load, "model_loader_extra_config", "")),
            str(getattr(load, "ignore_patterns", "")),
        ],
        "model_code": [
            str(getattr(model, name, None))
            for name in ("model_impl", "model_class_overrides", "code_revision")
        ],
        "foreign_code": foreign_code(hf_config or {}, getattr(model, "code_revision", None))
        if getattr(model, "trust_remote_code", False)
        else [],
        "max_model_len": _length_facts(model),
        "temperature_tuning": _temperature_tuning(model),
        "additional_config": str(getattr(vllm_config, "additional_config", "")),
        "hf_config": digest({"hf": hf_config}),
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
        "lora": _lora_facts(vllm_config.lora_config),
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
        self._names: dict[str | None, str] = {}  # by adapter; each request asks

    @property
    def known(self) -> bool:
        """True once the workers' layouts are known."""
        return self._layouts is not None

    def set_layouts(self, layouts: Iterable[Any]) -> None:
        """Take the descriptions of all ranks; equal ones count once."""
        self._names.clear()
        self._layouts = sorted({json.dumps(layout, sort_keys=True) for layout in layouts})

    def new_epoch(self) -> None:
        """Forget everything stored so far (vLLM's reset_cache)."""
        self._names.clear()
        self._epoch = os.urandom(8).hex()

    def fields(self, adapter: str | None) -> dict[str, Any]:
        """What config.json says."""
        return {**self._facts, "layouts": self._layouts, "epoch": self._epoch, "adapter": adapter}

    def engine(self) -> str | None:
        """Digest of what makes engines as fast as each other, for thresholds; None until it is known.

        All that makes their blocks different, but for resets and adapters.
        """
        return None if self._layouts is None else digest({**self.fields(None), "epoch": ""})

    def name(self, adapter: str | None) -> str:
        """Folder name of the namespace. Call only when ``known``."""
        assert self._layouts is not None, (
            "asked for a namespace before the workers described their KV tensors"
        )
        name = self._names.get(adapter)
        if name is None:
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            name = namespace_name(str(self._facts["model"]), digest(self.fields(adapter)))
            self._names[adapter] = name
        return name
