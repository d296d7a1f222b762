"""Engines for tests: a child process with a real vLLM on the CPU, and what tests need around it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPT_OUT = {"kv_transfer_params": {"py_kvcache": {"load": False, "store": False}}}

HERE = Path(__file__).parent
CONNECTOR = HERE.parent.parent / "connector"


class EngineError(RuntimeError):
    """The engine's process answered with an error or ended."""


class Session:
    """One engine in a child process; every call waits for the answer, at most `timeout` seconds."""

    def __init__(self, env: dict[str, str] | None = None, timeout: float = 180.0) -> None:
        self.timeout = timeout
        self.log: list[str] = []
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(CONNECTOR), **(env or {})},
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        self.log.extend(self._process.stderr)

    @property
    def log_text(self) -> str:
        """Everything the engine logged so far."""
        return "".join(self.log)

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run one command of driver.Driver. Raises EngineError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            raise EngineError(f"{command}: no answer in {self.timeout} s\n{self.log_text[-3000:]}") from None
        if line is None:
            raise EngineError(f"{command}: the engine's process ended\n{self.log_text[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{command}: {answer['error']}\n{self.log_text[-3000:]}")
        return answer

    def generate(self, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
        """Greedy tokens, cached tokens and seconds."""
        return self.call("generate", prompts=prompts, **more)

    def close(self) -> None:
        """End the process; its log stays."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def tiny_model(folder: Path, **changes: Any) -> str:
    """A Llama of four small layers; with load_format="dummy" its weights come from the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def engine_arguments(
    model: str, root: str | None, *, extra: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Arguments for vllm.LLM; without a root there is no connector."""
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "auto" if any(Path(model).glob("*.safetensors")) else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_log_stats": False,
    }
    if root is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "PyKvCacheConnector",
            "kv_connector_module_path": "py_kvcache.connector",
            "kv_role": "kv_both",
            # A busy machine must not turn hits into misses, nor a decision about times.
            "kv_connector_extra_config": {
                "root": root,
                "block_tokens": 64,
                "lookup_deadline_s": 30,
                "gate": "off",
                **(extra or {}),
            },
        }
    return {**arguments, **changes}


@contextlib.contextmanager
def engine(arguments: dict[str, Any], env: dict[str, str] | None = None) -> Iterator[Session]:
    """A started engine."""
    session = Session({"PYTHONHASHSEED": "0", **(env or {})})
    try:
        session.call("start", **arguments)
        yield session
    finally:
        session.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed; longer ones begin with shorter ones."""
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(tokens)]
