"""Everything that makes blocks of equal hash differ is in the name; nothing else changes it."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as N
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the namespace reads vLLM's configuration through vllm_api")

import torch

from py_kvcache import identity, namespace, vllm_api
from py_kvcache.errors import UnsupportedError
from py_kvcache.identity import display_name
from py_kvcache.layout import parse_namespace_dir
from py_kvcache.namespace import (
    Spaces,
    engine_facts,
    tensor_marks,
)

LAYOUT: dict[str, Any] = {
    "slab": False,
    "tensors": [[[-1, 2, 16, 64], [0, 1, 2, 3], "torch.bfloat16", "cpu"]],
}

HEADER = {"w": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}}


class FullAttentionSpec:
    """Known to vllm_api by the name of its class, like vLLM's own."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class MLAAttentionSpec(FullAttentionSpec):
    """The same for MLA."""


class HfConfig:
    """What transformers' configuration gives us."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def shard(folder: Path, name: str, header: dict[str, Any], data: bytes = b"\0" * 64) -> Path:
    text = json.dumps(header).encode()
    path = folder / name
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.utime(path, ns=(1_700_000_000_000_000_000,) * 2)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    shard(path, "model.safetensors", HEADER)
    return path


class Engine:
    """A configuration whose fields tests change one at a time."""

    def __init__(self, folder: Path) -> None:
        self.block_tokens = 256
        self.layouts: list[Any] = [copy.deepcopy(LAYOUT)]
        self.adapter: str | None = None
        self.folder = folder
        model = N(
            model=str(folder), revision=None, seed=0, hf_config=HfConfig(rope_theta=1e4, hidden_size=64),
            hf_overrides={}, quantization=None, dtype=torch.bfloat16, use_mla=False, max_model_len=4096,
            get_total_num_kv_heads=lambda: 8,
        )  # fmt: skip
        self.config = N(
            model_config=model,
            cache_config=N(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor", kv_cache_layout="HND"),
            parallel_config=N(tensor_parallel_size=4, pipeline_parallel_size=1),
            load_config=N(load_format="auto", model_loader_extra_config={}),
            speculative_config=None,
            lora_config=None,
        )
        self.kv = N(kv_cache_groups=[N(kv_cache_spec=FullAttentionSpec(16), layer_names=["l.0", "l.1"])])

    def facts(self) -> dict[str, Any]:
        return engine_facts(self.config, self.kv, self.block_tokens)

    def name(self) -> str:
        spaces = Spaces(self.facts())
        spaces.set_layouts(self.layouts)
        return spaces.name(self.adapter)


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return Engine(folder)


def set_model(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.config.model_config.__dict__.update(values)


def set_cache(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.config.cache_config.__dict__.update(values)


def set_parallel(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.config.parallel_config.__dict__.update(values)


def set_hf(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.config.model_config.hf_config.values.update(values)


def set_spec(**values: Any) -> Callable[[Engine], None]:
    spec = {"method": "eagle", "model": "draft", "revision": None, "num_speculative_tokens": 3, **values}
    return lambda engine: setattr(engine.config, "speculative_config", N(**spec))


def set_layout(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.layouts[0].update(values)


def set_group(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.kv.kv_cache_groups[0].__dict__.update(values)


@dataclass
class LoRAConfig:
    """As much of vLLM's as tells two apart."""

    lora_dtype: str = "auto"
    target_modules: list[str] | None = None
    default_mm_loras: dict[str, str] | None = None
    max_loras: int = 1
    max_cpu_loras: int = 1


def set_lora(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: setattr(engine.config, "lora_config", LoRAConfig(**values))


def set_foreign_code(engine: Engine) -> None:
    set_hf(auto_map={"AutoModelForCausalLM": "org/code--modeling.Model"})(engine)
    set_model(trust_remote_code=True, code_revision="c" * 40)(engine)


def grow(engine: Engine) -> None:
    path = engine.folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(1_700_000_000_000_000_000,) * 2)


def touch(engine: Engine) -> None:
    os.utime(engine.folder / "model.safetensors", ns=(1_700_000_000_000_000_001,) * 2)


def other_header(engine: Engine) -> None:
    shard(engine.folder, "model.safetensors", {"v": HEADER["w"]})


def second_shard(engine: Engine) -> None:
    shard(engine.folder, "more.safetensors", {})


def other_index(engine: Engine) -> None:
    (engine.folder / "model.safetensors.index.json").write_text("{}")


DIFFERENT: dict[str, Callable[[Engine], None]] = {
    "dtype": set_model(dtype=torch.float16),
    "kv dtype": set_cache(cache_dtype="fp8"),
    "layers skipped by the kv dtype": set_cache(kv_cache_dtype_skip_layers=["0"]),
    "layout string": set_cache(kv_cache_layout="LBHNC"),
    "order of the tensors' dimensions": set_layout(
        tensors=[[[-1, 2, 16, 64], [0, 2, 1, 3], "torch.bfloat16", "cpu"]]
    ),
    "slab instead of per layer": set_layout(slab=True),
    "attention backend": set_layout(backends=["FLASH_ATTN"]),
    "instruction set": set_layout(cpu=["x86_64", "amx_bf16"]),
    "a rank with another layout": lambda engine: engine.layouts.append({"slab": True}),
    "tensor parallelism": set_parallel(tensor_parallel_size=8),
    "pipeline parallelism": set_parallel(pipeline_parallel_size=2),
    "number of KV heads": set_model(get_total_num_kv_heads=lambda: 2),
    "MLA": set_model(use_mla=True),
    "block_tokens": lambda engine: setattr(engine, "block_tokens", 128),
    "engine's block size": set_group(kv_cache_spec=FullAttentionSpec(32)),
    "kind of attention": set_group(kv_cache_spec=MLAAttentionSpec(16)),
    "layers of the group": set_group(layer_names=["l.0"]),
    "prefix hash": set_cache(prefix_caching_hash_algo="sha256"),
    "quantization": set_model(quantization="awq"),
    "quantization config": set_model(quantization_config={"bits": 4}),
    "hf_overrides": set_model(hf_overrides={"rope_theta": 5e5}),
    "RoPE in the model's configuration": set_hf(rope_theta=5e5),
    "load format": lambda engine: setattr(engine.config.load_config, "load_format", "dummy"),
    "loader's options": lambda engine: setattr(
        engine.config.load_config, "model_loader_extra_config", {"a": 1}
    ),
    "size of the weights": grow,
    "mtime of the weights": touch,
    "header of the weights": other_header,
    "one shard more": second_shard,
    "index of the shards": other_index,
    "speculation": set_spec(),
    "draft model": set_spec(model="other"),
    "draft length": set_spec(num_speculative_tokens=4),
    "speculative method": set_spec(method="mtp"),
    "LoRA switched on": set_lora(),
    "type of LoRA weights": set_lora(lora_dtype="bf16"),
    "modules that LoRA applies to": set_lora(target_modules=["o_proj"]),
    "adapters that come with media": set_lora(default_mm_loras={"audio": "/a"}),
    "code of another repository": set_foreign_code,
    "longest request": set_model(max_model_len=8192),
    "longest request fitted to the memory": set_model(original_max_model_len=-1),
    "Llama 4's temperature": set_model(override_generation_config={"attn_temperature_tuning": True}),
    "Llama 4's temperature in the model's file": set_model(
        try_get_generation_config=lambda: {"attn_temperature_tuning": False}
    ),
    "transformers' code instead of vLLM's": set_model(model_impl="transformers"),
    "another class for the model": set_model(model_class_overrides={"A": "b:C"}),
    "revision of the model's own code": set_model(code_revision="abc"),
    "files that the loader leaves out": lambda engine: setattr(
        engine.config.load_config, "ignore_patterns", ["original/*"]
    ),
    "a platform's own settings": lambda engine: setattr(engine.config, "additional_config", {"a": 1}),
    "bytes of the weights": lambda engine: shard(engine.folder, "model.safetensors", HEADER, b"\1" * 64),
    "adapter": lambda engine: setattr(engine, "adapter", "0123"),
}


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_a_change_of_any_of_these_changes_the_name(engine: Engine, what: str):
    before = engine.name()
    DIFFERENT[what](engine)
    assert engine.name() != before


def test_the_changes_above_all_differ_from_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    names = {}
    for what, change in DIFFERENT.items():
        shutil.rmtree(folder)
        folder.mkdir()
        shard(folder, "model.safetensors", HEADER)
        engine = Engine(folder)
        change(engine)
        names[engine.name()] = what
    assert len(names) == len(DIFFERENT)


@pytest.mark.parametrize(("what", "change"), [
    ("the number of blocks", lambda engine: None),
    ("transformers' version", set_hf(transformers_version="9")),
    ("how the dtype is spelled in the model's file", set_hf(torch_dtype="float32", dtype="float32")),
    ("where the configuration was read", set_hf(_name_or_path="/elsewhere")),
    ("a file that is no weights", lambda engine: (engine.folder / "README.md").write_text("hello")),
    ("the order of layer names", set_group(layer_names=["l.1", "l.0"])),
    ("sampling defaults", set_model(override_generation_config={"temperature": 0.5})),
    ("a second rank with the same layout", lambda engine: engine.layouts.append(copy.deepcopy(LAYOUT))),
])  # fmt: skip
def test_what_changes_no_byte_changes_no_name(engine: Engine, what: str, change: Callable[[Engine], Any]):
    before = engine.name()
    change(engine)
    assert engine.name() == before, what


def test_a_length_fitted_to_the_memory_changes_no_name_from_start_to_start(engine: Engine):
    names = []
    for fitted in (3000, 3001):
        set_model(original_max_model_len=-1, max_model_len=fitted)(engine)
        names.append(engine.name())
    assert names[0] == names[1]


def test_the_order_in_which_ranks_describe_themselves_does_not_matter(engine: Engine):
    engine.layouts.append({"slab": True})
    before = engine.name()
    engine.layouts.reverse()
    assert engine.name() == before


def test_the_seed_of_the_prefix_hash_is_in_the_name(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    names = {engine.name()}
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        names.add(engine.name())
    assert len(names) == 3


@pytest.mark.parametrize(
    ("algorithm", "differs"),
    [("sha256", True), ("xxhash", True), ("builtin", True), ("sha256_cbor", False), ("xxhash_cbor", False)],
)
def test_pythons_version_counts_for_hashes_of_pickles_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, algorithm: str, differs: bool
):
    set_cache(prefix_caching_hash_algo=algorithm)(engine)
    before = engine.name()
    monkeypatch.setattr(vllm_api, "sys", N(version_info=N(major=3, minor=99)))
    assert (engine.name() != before) is differs


def test_vllms_whole_version_counts_but_not_what_it_was_built_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    names = []
    same = ("0.32.0", "0.32.0+cpu", "0.32.0+cu130", "0.32.0+rocm6.3")
    for text in (*same, "0.32.1", "0.33.0", "0.32.0+corp1", "0.32.0+corp2.cu130"):
        monkeypatch.setattr(vllm_api.vllm, "__version__", text)
        names.append(engine.name())
    assert len(set(names[: len(same)])) == 1
    assert len(set(names)) == 5


@pytest.mark.parametrize("name", ["text_model_id", "audio_model_id"])
def test_a_model_with_weights_from_other_models_is_refused(engine: Engine, name: str):
    setattr(engine.config.model_config.hf_config, name, "org/other")
    with pytest.raises(UnsupportedError, match=f"org/other .{name}"):
        engine.name()


@pytest.mark.parametrize("what", ["transformers", "plugin"])
def test_other_software_in_the_process_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str):
    before = engine.name()
    if what == "transformers":
        real = identity.metadata.version
        monkeypatch.setattr(
            identity.metadata, "version", lambda name: "9" if name == "transformers" else real(name)
        )
    else:
        point = N(name="p", value="a:b", dist=N(name="my-plugin", version="1"))
        monkeypatch.setattr(identity.metadata, "entry_points", lambda group: [point])
    assert engine.name() != before


@pytest.mark.parametrize("name", ["max_loras", "max_cpu_loras"])
def test_how_many_adapters_are_kept_does_not_count(engine: Engine, name: str):
    set_lora()(engine)
    before = engine.name()
    set_lora(**{name: 4})(engine)
    assert engine.name() == before


def test_two_processes_find_the_same_name(engine: Engine, run_python, tmp_path: Path):
    code = f"""
from types import SimpleNamespace as N
from py_kvcache.namespace import Spaces, engine_facts
class FullAttentionSpec:
    block_size = 16
class Hf:
    def to_dict(self): return {{"b": {{"y", "x"}} and 1, "a": [1, None], "id2label": {{1: "x", 0: "y"}}}}
config = N(
    model_config=N(model={str(engine.folder)!r}, revision=None, seed=0, hf_config=Hf(), hf_overrides={{}},
                   quantization=None, dtype="bf16", use_mla=False, max_model_len=4096,
                   get_total_num_kv_heads=lambda: 8),
    cache_config=N(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
    parallel_config=N(tensor_parallel_size=1, pipeline_parallel_size=1),
    load_config=N(load_format="auto"), speculative_config=None, lora_config=None)
kv = N(kv_cache_groups=[N(kv_cache_spec=FullAttentionSpec(), layer_names=list({{"l.0", "l.1", "l.2"}}))])
spaces = Spaces(engine_facts(config, kv, 256))
spaces.set_layouts([{{"b": 1, "a": 2}}])
print(spaces.name(None))
"""
    assert "PYTHONHASHSEED" not in os.environ
    first, second = run_python(code), run_python(code)
    assert first == second
    assert parse_namespace_dir(first.strip()) is not None


def test_the_name_begins_with_the_models_own(engine: Engine):
    assert re.fullmatch(r"model_[0-9a-f]{16}", engine.name())
    assert re.fullmatch(r"meta-llama_Llama-3.2-3B_[0-9a-f]{16}", _named("meta-llama/Llama-3.2-3B"))
    snapshot = "/hub/models--meta-llama--Llama-3.2-3B/snapshots/" + "a" * 40
    assert [display_name(name) for name in ("/models/m///", "org/m", snapshot)] == [
        "m",
        "org/m",
        "meta-llama/Llama-3.2-3B",
    ]


def _named(model: str) -> str:
    spaces = Spaces({"model": model})
    spaces.set_layouts([])
    return spaces.name(None)


def test_every_epoch_has_names_of_its_own(engine: Engine):
    spaces = Spaces(engine.facts())
    spaces.set_layouts(engine.layouts)
    names = {spaces.name(None), spaces.name("adapter")}
    for _ in range(3):
        spaces.new_epoch()
        assert spaces.known
        names |= {spaces.name(None), spaces.name("adapter")}
    assert len(names) == 8


def test_no_name_is_given_before_the_layouts_are_known(engine: Engine):
    spaces = Spaces(engine.facts())
    assert not spaces.known
    with pytest.raises(AssertionError, match="before the workers described"):
        spaces.name(None)


def test_the_facts_can_be_written_as_json_and_say_what_the_namespace_holds(engine: Engine):
    spaces = Spaces(engine.facts())
    spaces.set_layouts(engine.layouts)
    fields = json.loads(json.dumps(spaces.fields("adapter")))
    assert fields["model"] == engine.folder.name
    assert fields["block_tokens"] == 256
    assert fields["prefix_hash"] == {"algorithm": "sha256_cbor", "seed": "vllm-default"}
    assert fields["adapter"] == "adapter"


def test_dummy_weights_are_told_apart_by_their_seed(engine: Engine):
    engine.config.load_config.load_format = N(value="dummy")
    before = engine.name()
    engine.config.model_config.seed = 1
    assert engine.name() != before


# ---- tensors


def marks(tensor: torch.Tensor, blocks: int) -> Any:
    return tensor_marks({"layer": tensor}, blocks)


def test_the_size_of_the_pool_is_not_in_the_marks_of_tensors():
    assert marks(torch.zeros(2, 100, 16, 8), 100) == marks(torch.zeros(2, 333, 16, 8), 333)
    assert marks(torch.zeros(100, 2, 16, 8), 100) == marks(torch.zeros(333, 2, 16, 8), 333)


def test_it_is_not_in_them_when_the_backend_cuts_blocks_into_smaller_ones():
    assert marks(torch.zeros(400, 16, 8), 100) == marks(torch.zeros(1332, 16, 8), 333)
    assert marks(torch.zeros(400, 16, 8), 100) != marks(torch.zeros(200, 16, 8), 100)


def test_a_dimension_that_happens_to_be_as_large_as_the_pool_stays():
    assert marks(torch.zeros(64, 16, 64), 64) != marks(torch.zeros(64, 16, 128), 64)
    assert marks(torch.zeros(64, 16, 64), 64) == marks(torch.zeros(65, 16, 64), 65)


@pytest.mark.parametrize("other", [
    torch.zeros(2, 100, 32, 8),
    torch.zeros(2, 100, 16, 8, dtype=torch.float16),
    torch.zeros(2, 100, 8, 16).transpose(2, 3),
    torch.zeros(100, 2, 16, 8).transpose(0, 1),
])  # fmt: skip
def test_shape_type_and_order_of_dimensions_are_in_the_marks(other: torch.Tensor):
    assert marks(other, 100) != marks(torch.zeros(2, 100, 16, 8), 100)


def test_equal_tensors_count_once_and_different_ones_do_not_depend_on_order():
    first, second = torch.zeros(10, 4), torch.zeros(10, 8)
    assert tensor_marks({"a": first, "b": first}, 10) == tensor_marks({"a": [first, first]}, 10)
    assert tensor_marks({"a": first, "b": second}, 10) == tensor_marks({"a": second, "b": first}, 10)
    assert len(tensor_marks({"a": first, "b": second}, 10)) == 2


def test_marks_survive_json_on_their_way_to_the_scheduler():
    found = marks(torch.zeros(2, 100, 16, 8), 100)
    first, second = Spaces({"model": "m"}), Spaces({"model": "m"})
    first.set_layouts([{"tensors": found}])
    second.set_layouts([json.loads(json.dumps({"tensors": found}))])
    assert first.name(None) == second.name(None)


def test_the_backends_are_named_once_each():
    def layer(name: str) -> Any:
        return N(get_attn_backend=lambda: N(get_name=lambda: name))

    context = {"a": layer("CPU"), "b": layer("CPU"), "c": layer("MLA"), "d": N()}
    assert namespace.backend_names(N(compilation_config=N(static_forward_context=context))) == ["CPU", "MLA"]
    assert namespace.backend_names(N(compilation_config=N())) == []


def test_the_machine_is_named_with_the_instruction_sets_that_matter():
    found = namespace.cpu_marks()
    assert found[0] == os.uname().machine
    assert found == namespace.cpu_marks()
