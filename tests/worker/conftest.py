"""Makes doubles.py importable as ``worker_doubles``: there are no packages under tests/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import hypothesis

NAME = "worker_doubles"

if NAME not in sys.modules:
    spec = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("doubles.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)

# No test may depend on how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
