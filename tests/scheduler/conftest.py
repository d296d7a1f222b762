"""Makes rig.py importable as ``scheduler_rig``: there are no packages under tests/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# The manager is a subclass of vLLM's; what is pure is tested without it.
if "scheduler_rig" not in sys.modules and importlib.util.find_spec("vllm") is not None:
    spec = importlib.util.spec_from_file_location("scheduler_rig", Path(__file__).with_name("rig.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scheduler_rig"] = module
    spec.loader.exec_module(module)
