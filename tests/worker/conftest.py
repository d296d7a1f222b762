"""Makes doubles_world.py, doubles.py and publisher_rig.py importable under the names below; gives rigs.

There are no packages under tests/, so the usual imports cannot find them.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest


def _load(name: str, file: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load("worker_world", "doubles_world.py")
_load("worker_doubles", "doubles.py")
_load("worker_publisher", "publisher_rig.py")

# No test may depend on how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def rig() -> Iterator[Callable[..., object]]:
    """Makes reactors over the doubles; see doubles.Rig for the settings."""
    from worker_doubles import Rig

    rigs = []

    def make(**settings):
        rigs.append(Rig(**settings))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


@pytest.fixture(autouse=True)
def _warnings_are_seen() -> Iterator[None]:
    """vLLM, once imported by another test, keeps what its loggers say from caplog.

    Not with monkeypatch: asked for here, it would outlive the other fixtures of every test.
    """
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before


@pytest.fixture
def benches() -> Iterator[Callable[..., object]]:
    """Makes publishers; see publisher_rig.Bench for the settings."""
    from worker_publisher import Bench

    made = []

    def make(*arguments, **settings):
        made.append(Bench(*arguments, **settings))
        return made[-1]

    yield make
    for bench in made:
        assert bench.publisher.shutdown(20)
