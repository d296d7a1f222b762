"""What several folders of tests need: a stand-in for vLLM, in processes that must start fast."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "connector"

# Importing vLLM takes many seconds. A process that only asks how our modules behave around it gets these
# names instead; torch is met in device.py, which needs none of it at import.
STAND_IN = """
import sys, types
from dataclasses import dataclass, field

def module(name, **names):
    made = types.ModuleType(name)
    made.__dict__.update(names)
    made.__path__ = []
    sys.modules[name] = made
    return made

def classes(*names):
    return {name: type(name, (), {}) for name in names}

@dataclass
class OffloadingWorkerMetadata:
    completed_jobs: dict = field(default_factory=dict)
    transfer_stats: object = None

KV = "vllm.distributed.kv_transfer.kv_connector.v1"
module("torch", Tensor=type("Tensor", (), {}))
module("vllm", __version__="0.32.0")
module(KV, **classes("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA"))
module(KV + ".base", **classes("KVConnectorHandshakeMetadata", "KVConnectorMetadata"))
module(KV + ".offloading.common", OffloadingWorkerMetadata=OffloadingWorkerMetadata,
       **classes("OffloadingConnectorMetadata"))
module(KV + ".offloading.metrics", **classes("OffloadingConnectorStats"))
module(KV + ".offloading_connector", **classes("OffloadingConnector"))
module("vllm.v1.kv_offload.base", **classes(
    "GPULoadStoreSpec", "LoadStoreSpec", "LookupResult", "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata", "OffloadingManager", "OffloadingSpec", "OffloadingWorker",
    "PrepareStoreOutput", "RequestOffloadingContext", "TransferResult", "make_offload_key"))
"""

# Makes importing the named top-level modules fail, whatever is installed.
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is blocked for this test")
sys.meta_path.insert(0, Block())
"""

Run = Callable[..., str]


@pytest.fixture
def run_python() -> Run:
    """Run code in a new Python and return what it printed.

    ``vllm=True`` puts the stand-in in place, ``blocked`` names modules whose import fails there.
    """

    def run(
        code: str, *, vllm: bool = True, blocked: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> str:
        start = (BLOCKED.format(names=set(blocked)) if blocked else "") + (STAND_IN if vllm else "")
        ended = subprocess.run(
            [sys.executable, "-c", start + code],
            env={**os.environ, "PYTHONPATH": str(PACKAGE), **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run
