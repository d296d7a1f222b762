"""An adapter is what vLLM holds of it: every bit counts, and nobody can change it from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="adapters are vLLM's objects")

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from py_kvcache.loraweights import weights_identity


def layer(name: str = "layers.0.q_proj", **changes: Any) -> LoRALayerWeights:
    dtype = changes.pop("dtype", torch.bfloat16)
    fields: dict[str, Any] = {
        "rank": 2, "lora_alpha": 4, "lora_a": torch.arange(12.0).reshape(2, 6).to(dtype),
        "lora_b": torch.arange(8.0).reshape(4, 2).to(dtype), "scaling": 2.0, **changes,
    }  # fmt: skip
    return LoRALayerWeights(name, **fields)


def model(*layers: LoRALayerWeights, number: int = 1, rank: int = 2) -> LoRAModel:
    chosen = layers or (layer(), layer("layers.1.q_proj"))
    return LoRAModel(number, rank, {one.module_name: one for one in chosen})


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    return changed


def test_equal_weights_are_the_same_adapter_whatever_number_and_order_they_come_in():
    first = weights_identity(model())
    assert weights_identity(model()) == first
    assert weights_identity(model(number=7)) == first
    assert weights_identity(model(layer("layers.1.q_proj"), layer())) == first


def test_a_second_look_at_the_same_object_finds_the_same():
    adapter = model()
    assert weights_identity(adapter) == weights_identity(adapter)


def flags_3d() -> LoRAModel:
    adapter = model()
    adapter.is_3d_lora_weight = not getattr(adapter, "is_3d_lora_weight", False)
    return adapter


def with_bias() -> LoRAModel:
    adapter = model()
    adapter.loras["layers.0.q_proj"].bias = torch.ones(4)  # what another release may have
    return adapter


def with_head() -> LoRAModel:
    adapter = model()
    head = SimpleNamespace(module_name="score", weight=torch.ones(2, 2), bias=None)
    adapter.modules_to_save = {"score": head}
    return adapter


OTHERS = {
    "one bit of A": lambda: model(layer(lora_a=one_bit(layer().lora_a)), layer("layers.1.q_proj")),
    "one bit of B": lambda: model(layer(lora_b=one_bit(layer().lora_b)), layer("layers.1.q_proj")),
    "scaling": lambda: model(layer(scaling=2.5), layer("layers.1.q_proj")),
    "alpha": lambda: model(layer(lora_alpha=5), layer("layers.1.q_proj")),
    "rank of a module": lambda: model(layer(rank=3), layer("layers.1.q_proj")),
    "rank": lambda: model(rank=3),
    "another module": lambda: model(layer("layers.0.k_proj"), layer("layers.1.q_proj")),
    "a module less": lambda: model(layer()),
    "type": lambda: model(layer(dtype=torch.float16), layer("layers.1.q_proj")),
    "shape": lambda: model(layer(lora_a=layer().lora_a.reshape(3, 4)), layer("layers.1.q_proj")),
    "A alone": lambda: model(layer(lora_b=None), layer("layers.1.q_proj")),
    "layout of experts": flags_3d,
    "bias": with_bias,
    "classification head": with_head,
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_changes_results_makes_another_adapter(name: str):
    assert weights_identity(OTHERS[name]()) != weights_identity(model())


def test_no_two_of_these_are_taken_for_each_other():
    assert len({weights_identity(make()) for make in OTHERS.values()}) == len(OTHERS)


def test_packed_modules_are_told_by_each_of_their_parts():
    def packed(second: torch.Tensor | None) -> LoRAModel:
        one = layer()
        parts = [one.lora_a, second]
        both = PackedLoRALayerWeights("qkv", 2, [4, 4], parts, [one.lora_b, None], scaling=[1.0, 1.0])
        return LoRAModel(1, 2, {"qkv": both})

    a = layer().lora_a
    found = {weights_identity(packed(second)) for second in (None, a, one_bit(a))}
    assert len(found) == 3 and weights_identity(packed(a.clone())) in found


def test_what_nobody_knows_is_refused():
    adapter = model()
    adapter.hook = lambda: None
    with pytest.raises(TypeError, match="function"):
        weights_identity(adapter)


def test_a_file_that_is_overwritten_in_place_changes_neither_weights_nor_identity(tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(64, 64), "b": torch.ones(64, 64)}, path)
    with safe_open(path, framework="pt") as file:
        # As vLLM reads it where no pinned memory is to be had.
        mapped = layer(lora_a=file.get_tensor("a").to("cpu"), lora_b=file.get_tensor("b").to("cpu"))
    adapter = model(mapped)
    identity = weights_identity(adapter)
    with open(path, "r+b") as raw:
        raw.seek(path.stat().st_size - 64)
        raw.write(b"\xff" * 64)
        raw.seek(path.stat().st_size // 2 - 64)
        raw.write(b"\xff" * 64)
    for tensor in (mapped.lora_a, mapped.lora_b):
        assert bool((tensor == 1).all())
    assert weights_identity(adapter) == identity


FORK = """
import os, torch
torch.set_num_threads(1)  # torch's own threads do not live on in a fork either
from types import SimpleNamespace
from py_kvcache.loraweights import weights_identity
model = SimpleNamespace(weights=torch.zeros(1 << 22))
identity = weights_identity(model)
pid = os.fork()
if pid == 0:
    os._exit(0 if weights_identity(model) == identity else 1)
print(os.waitpid(pid, 0)[1])
"""


def test_a_fork_of_a_process_that_told_an_adapter_tells_it_too(run_python: Callable[..., str]):
    assert run_python(FORK, vllm=False) == "0\n"
