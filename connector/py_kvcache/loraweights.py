"""Which weights a LoRA adapter has that vLLM has loaded: told by what lies in memory, byte for byte.

Files tell less: they change between two looks, and vLLM reads some of them only.
"""

from __future__ import annotations

from typing import Any

import torch
from blake3 import blake3

_SCHEMA = b"py-kvcache adapter 1"
# Of vLLM's LoRAModel: the number under which it was loaded, which says nothing about the weights.
_NOT_WEIGHTS = frozenset({"id"})
_PLAIN = (bool, int, float, str, type(None))


def weights_identity(model: Any) -> str:
    """Hash of all that a LoRAModel holds; equal weights have equal ones in every process.

    Attributes are taken as they come, so that what a later vLLM adds (a bias, a flag, another kind of
    module) counts too. 0.26 to 0.33: modules with rank, alpha, scaling, A and B; the layout of experts;
    classification heads.

    Tensors that may lie in a mapping of the file are replaced by copies first: an engine on a CPU keeps what
    safetensors mapped, so that whoever writes into the file would change weights that are in use.

    Raises:
        TypeError: it holds something of which nobody knows here whether it changes results.
    """
    # One thread: blake3's others do not live on in a fork, which would wait for them for ever.
    found = blake3(_SCHEMA)
    _take_fields(found, model, _NOT_WEIGHTS)
    return str(found.hexdigest(length=16))


def _write(found: blake3, text: str) -> None:
    data = text.encode()
    found.update(len(data).to_bytes(8, "little")).update(data)


def _take(found: blake3, value: Any) -> Any:
    """Hash the value; returns what stands for it from now on."""
    if isinstance(value, torch.Tensor):
        return _take_tensor(found, value)
    if isinstance(value, (*_PLAIN, torch.dtype)):
        _write(found, f"{type(value).__name__} {value!r}")
        return value
    if isinstance(value, (list, tuple)):
        _write(found, f"sequence {len(value)}")
        taken = [_take(found, one) for one in value]
        if not isinstance(value, list):
            return type(value)(taken)
        value[:] = taken
        return value
    if isinstance(value, dict):
        _write(found, f"mapping {len(value)}")
        for name in sorted(value):
            _write(found, name)
            value[name] = _take(found, value[name])
        return value
    _take_fields(found, value)
    return value


def _take_fields(found: blake3, value: Any, without: frozenset[str] = frozenset()) -> None:
    if callable(value) or not hasattr(value, "__dict__"):
        raise TypeError(f"an adapter holds a {type(value).__name__}")
    fields = {name: one for name, one in sorted(vars(value).items()) if name not in without}
    _write(found, f"{type(value).__name__} {len(fields)}")
    for name, one in fields.items():
        _write(found, name)
        if (taken := _take(found, one)) is not one:
            setattr(value, name, taken)


def _take_tensor(found: blake3, tensor: torch.Tensor) -> torch.Tensor:
    # Pinned memory and a device's are copies already; whether other memory is a mapping cannot be asked.
    if tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.clone()
    _write(found, f"tensor {tensor.dtype} {list(tensor.shape)}")
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return tensor
