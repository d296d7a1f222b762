"""Real engines: the harness is importable, every test here is marked `engine`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

HERE = Path(__file__).parent

# Two engines at a time on two cores (`make test`): OpenMP's idle threads spin, and take the other's core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KMP_BLOCKTIME", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny Llama, with weights under which one other token changes the text."""
    from nursery import real_model

    return real_model(tmp_path_factory.mktemp("tiny"))
