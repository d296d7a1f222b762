"""What a worker knows of the adapters that it loaded: told by what was read, not by names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="plans are subclasses of vLLM's")

from py_kvcache import adapters as module
from py_kvcache.adapters import AdapterWatch
from py_kvcache.identity import adapter_identity, adapter_stamp
from py_kvcache.plan import Adapter


class Rig:
    """vLLM's manager over one folder; threads run when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.later: list[Callable[[], None]] = []
        self.while_loading: Callable[[], None] = lambda: None
        rig = self

        class Manager:
            def __init__(self) -> None:
                self.held: set[int] = set()

            def _load_adapter(self, lora_request: Any) -> str:
                rig.while_loading()
                return "adapter"

            def list_adapters(self) -> set[int]:
                return self.held

        self.watch = AdapterWatch(self.later.append)
        self.watch.begin(Manager)
        self.watch.begin(Manager)  # twice is once
        self.manager = Manager()

    def write(self, weights: bytes) -> Adapter:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "adapter_config.json").write_text("{}")
        (self.folder / "adapter_model.safetensors").write_bytes(weights)
        path = str(self.folder)
        return Adapter(1, path, adapter_stamp(path), adapter_identity(path))

    def load(self, number: int = 1) -> None:
        request = SimpleNamespace(lora_int_id=number, lora_path=str(self.folder))
        assert self.manager._load_adapter(request) == "adapter"
        self.manager.held.add(number)

    def read(self) -> None:
        while self.later:
            self.later.pop(0)()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "adapter")


@pytest.mark.parametrize("is_read", [False, True])
def test_what_was_loaded_is_known_at_once(rig: Rig, is_read: bool):
    one = rig.write(b"one")
    assert not rig.watch.made(one)
    assert rig.watch.will_make(one), "it will be read from these files"
    rig.load()
    if is_read:
        rig.read()
    assert rig.watch.made(one) and rig.watch.will_make(one)
    assert not rig.watch.made(one._replace(number=2))


def test_files_that_changed_after_the_load_are_not_what_was_loaded(rig: Rig):
    rig.write(b"one")
    rig.load()
    rig.read()
    two = rig.write(b"two")
    assert not rig.watch.made(two) and not rig.watch.will_make(two)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_number_that_had_other_weights_once_is_never_trusted_again(rig: Rig, is_read: bool):
    one = rig.write(b"one")
    rig.load()
    rig.read()
    two = rig.write(b"two")
    rig.load()
    if is_read:
        rig.read()
    for adapter in (one, two):
        assert not rig.watch.made(adapter) and not rig.watch.will_make(adapter)


def test_files_that_were_only_touched_are_the_same_once_they_have_been_read(rig: Rig):
    one = rig.write(b"one")
    rig.load()
    rig.read()
    os.utime(rig.folder / "adapter_model.safetensors", ns=(5, 5))
    touched = one._replace(stamp=adapter_stamp(one.path))
    assert rig.watch.made(touched) and rig.watch.will_make(touched)
    rig.load()
    assert not rig.watch.made(touched), "not read yet"
    rig.read()
    assert rig.watch.made(touched)


def test_a_number_begins_anew_with_another_engine_of_the_process(rig: Rig):
    rig.write(b"one")
    rig.load()
    rig.read()
    two = rig.write(b"two")
    rig.manager = type(rig.manager)()  # the first engine and its manager are gone
    rig.load()
    rig.read()
    assert rig.watch.made(two) and rig.watch.will_make(two)


def test_a_method_that_somebody_else_wrapped_is_watched_too(rig: Rig):
    class Wrapped(type(rig.manager)):  # type: ignore[misc]
        @functools.wraps(type(rig.manager)._load_adapter.__wrapped__)
        def _load_adapter(self, lora_request: Any) -> str:
            return "adapter"

    rig.watch.begin(Wrapped)
    rig.manager = Wrapped()
    one = rig.write(b"one")
    rig.load()
    assert rig.watch.made(one)


def test_an_evicted_adapter_is_what_lies_in_its_folder_now(rig: Rig):
    one = rig.write(b"one")
    rig.load()
    rig.read()
    rig.manager.held.clear()
    assert rig.watch.will_make(one)
    rig.write(b"two")
    assert rig.watch.made(one) and not rig.watch.will_make(one)


def test_files_that_changed_during_the_load_are_nobodys(rig: Rig):
    one = rig.write(b"one")
    rig.while_loading = lambda: rig.write(b"two") and None
    rig.load()
    rig.read()
    two = rig.write(b"two")
    assert not rig.watch.made(one) and not rig.watch.made(two)


def test_files_that_change_before_they_are_read_again_are_nobodys(rig: Rig):
    one = rig.write(b"one")
    rig.load()
    assert rig.watch.made(one)
    two = rig.write(b"two")
    rig.read()
    assert not rig.watch.made(one) and not rig.watch.made(two)


def test_a_folder_that_is_gone_is_nobodys(rig: Rig):
    one = rig.write(b"one")
    for name in os.listdir(rig.folder):
        (rig.folder / name).unlink()
    rig.folder.rmdir()
    assert not rig.watch.will_make(one)


def test_a_hub_name_that_the_load_downloads_is_known_by_its_commit(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    commits: list[str] = []

    def stamp(path: str) -> str:
        if not commits:
            raise FileNotFoundError(2, "not in the cache", path)
        return commits[-1]

    monkeypatch.setattr(module, "adapter_stamp", stamp)
    monkeypatch.setattr(module, "stable_identity", lambda path, stamp: f"identity {stamp}")
    rig.folder = Path("org/name")
    rig.while_loading = lambda: commits.append("abc")
    rig.load()
    hub = Adapter(1, "org/name", "abc", "identity abc")
    assert rig.watch.made(hub)
    rig.read()
    assert rig.watch.made(hub)
