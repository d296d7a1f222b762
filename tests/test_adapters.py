"""What a worker knows of the adapters that it loaded: told by what it has in memory, not by files."""

from __future__ import annotations

import functools
import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="plans are subclasses of vLLM's")

from py_kvcache import adapters as module
from py_kvcache.adapters import AdapterWatch, Book
from py_kvcache.plan import Adapter


def manager_class() -> Any:
    class Manager:
        """Of vLLM's: what is loaded is a model whose identity is its weights."""

        def __init__(self, config: Any) -> None:
            self.lora_config = config
            self.memory: set[int] = set()

        def _load_adapter(self, lora_request: Any) -> Any:
            if lora_request.weights == "broken file":
                raise ValueError("no adapter")
            return SimpleNamespace(weights=lora_request.weights)

        def list_adapters(self) -> set[int]:
            return self.memory

    return Manager


class Rig:
    """One engine's worker."""

    def __init__(self, watch: AdapterWatch | None = None, kind: Any = None, config: Any = None) -> None:
        self.config = SimpleNamespace() if config is None else config
        self.kind = kind or manager_class()
        self.book = (watch or AdapterWatch()).open(self.kind, self.config, 0)
        self.book._identify = self.identify
        self.hashed = 0
        self.manager = self.kind(self.config)

    def identify(self, model: Any) -> str:
        self.hashed += 1
        if model.weights == "unknown":
            raise TypeError("an adapter holds a function")
        return f"identity of {model.weights}"

    def load(self, name: str, weights: str, number: int = 1, **more: Any) -> Adapter:
        """vLLM reads an adapter; returns what a plan says of it."""
        request = SimpleNamespace(lora_int_id=number, lora_name=name, weights=weights, **more)
        assert self.manager._load_adapter(request).weights == weights
        self.manager.memory.add(number)
        return note(name, weights, number)

    def says(self, adapter: Adapter) -> tuple[bool, bool]:
        return self.book.made(adapter), self.book.will_make(adapter)


def note(name: str, weights: str, number: int = 1) -> Adapter:
    return Adapter(number, name, (f"identity of {weights}",))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_only_what_was_loaded_is_known(rig: Rig):
    assert rig.says(note("a", "one")) == (False, False)
    one = rig.load("a", "one")
    assert rig.says(one) == (True, True)
    assert rig.says(one._replace(number=2)) == (False, False)
    assert rig.says(one._replace(name="b")) == (False, False)
    assert rig.says(note("a", "two")) == (False, False)
    assert rig.says(one._replace(identities=())) == (False, False)


def test_an_adapter_that_is_not_in_memory_is_not_loaded_for(rig: Rig):
    one = rig.load("a", "one")
    rig.manager.memory.clear()
    assert rig.says(one) == (True, False)
    rig.load("a", "one")
    assert rig.says(one) == (True, True)


def test_a_name_that_had_other_weights_once_is_never_trusted_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
):
    one, two = rig.load("a", "one"), rig.load("a", "two")
    assert rig.says(one) == rig.says(two) == (False, False)
    rig.load("a", "one")
    again = rig.load("a", "one", number=2)
    assert rig.says(one) == rig.says(again) == (False, False)
    assert rig.says(rig.load("b", "one", number=3)) == (True, True), "another name is as good as ever"
    assert caplog.text.count("it had other weights before") == 1


def test_what_is_not_cached_any_more_is_not_hashed_any_more(rig: Rig):
    for weights in ("one", "two", "one", "two"):
        rig.load("a", weights)
    assert rig.hashed == 2


def test_weights_that_cannot_be_told_are_nobodys_and_vllm_hears_nothing_of_it(
    rig: Rig, caplog: pytest.LogCaptureFixture
):
    rig.load("a", "unknown")
    one = rig.load("a", "one")
    assert rig.says(one) == (False, False)
    assert caplog.text.count("its weights cannot be told: TypeError") == 1


def test_a_load_that_vllm_fails_says_nothing(rig: Rig):
    one = rig.load("a", "one")
    with pytest.raises(ValueError, match="no adapter"):
        rig.load("a", "broken file")
    assert rig.says(one) == (True, True)


def test_a_request_that_cannot_be_read_spoils_all_and_vllm_hears_nothing_of_it(
    rig: Rig, caplog: pytest.LogCaptureFixture
):
    one = rig.load("a", "one")
    assert rig.manager._load_adapter(SimpleNamespace(weights="x")).weights == "x"
    assert rig.says(one) == (False, False)
    assert "nobody knows which" in caplog.text


def test_a_number_that_has_two_names_spoils_both(rig: Rig):
    a, b = rig.load("a", "one"), rig.load("b", "two")
    other = rig.load("b", "two", number=2)
    assert rig.says(a) == rig.says(b) == rig.says(other) == (False, False)


def test_engines_of_one_process_do_not_meet():
    watch, kind = AdapterWatch(), manager_class()
    one, two = Rig(watch, kind), Rig(watch, kind)
    first = one.load("a", "one")
    assert two.says(first) == (False, False)
    second = two.load("a", "two")
    assert one.says(first) == two.says(second) == (True, True)
    assert one.says(second) == two.says(first) == (False, False)


def test_an_engine_that_is_gone_leaves_nothing_behind():
    watch, kind = AdapterWatch(), manager_class()
    one = Rig(watch, kind)
    one.load("a", "one")
    del one
    gc.collect()
    assert len(watch._books) == 0
    two = Rig(watch, kind)
    assert two.says(two.load("a", "two")) == (True, True)


def test_engines_that_cannot_be_told_apart_cache_no_adapter(caplog: pytest.LogCaptureFixture):
    watch, kind, config = AdapterWatch(), manager_class(), SimpleNamespace()
    one, two = Rig(watch, kind, config), Rig(watch, kind, config)
    a, b = one.load("a", "one"), two.load("b", "two")
    assert one.says(a) == two.says(b) == (False, False)
    assert "share one LoRA configuration" in caplog.text


def test_a_manager_that_vllm_makes_anew_keeps_the_history(rig: Rig):
    one = rig.load("a", "one")
    rig.manager = rig.kind(rig.config)
    gc.collect()
    assert rig.says(one) == (True, False)
    rig.load("a", "two")
    assert rig.says(one) == (False, False)


def test_a_method_that_somebody_else_wrapped_is_watched_too(rig: Rig):
    class Wrapped(rig.kind):  # type: ignore[misc, name-defined]
        @functools.wraps(rig.kind._load_adapter.__wrapped__)
        def _load_adapter(self, lora_request: Any) -> Any:
            return SimpleNamespace(weights=lora_request.weights)

    other = Rig(kind=Wrapped)
    assert other.says(other.load("a", "one")) == (True, True)


def test_twice_wrapped_is_once():
    watch, kind = AdapterWatch(), manager_class()
    rig, _ = Rig(watch, kind), Rig(watch, kind)
    rig.load("a", "one")
    assert rig.hashed == 1


def test_the_books_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(module, "_MOST_NAMES", 3)
    monkeypatch.setattr(module, "_MOST_NUMBERS", 5)
    rig = Rig()
    known = [rig.load(f"n{k}", "one", number=k) for k in range(1, 9)]
    assert [rig.book.made(one) for one in known] == [True] * 3 + [False] * 5
    assert len(rig.book._names) == 3 and len(rig.book._numbers) == 5
    assert caplog.text.count("more than 3 LoRA adapters") == 1
    again = rig.load("n1", "one", number=99)
    assert not rig.book.made(again), "a number that is not kept could have had any name"


def test_a_report_says_what_is_in_memory_when_that_changed_or_the_step_is_idle(rig: Rig):
    book = rig.book
    assert book.held(1, again=False).known == {}
    assert book.held(2, again=False) == (2, None)
    rig.load("a", "one")
    assert book.held(3, again=False) == (3, {1: ("a", "identity of one")})
    assert book.held(4, again=False) == (4, None)
    assert book.held(5, again=True) == (5, {1: ("a", "identity of one")})
    rig.manager.memory = set()
    assert book.held(6, again=False) == (6, {})
    rig.load("a", "one")
    book.held(7, again=False)
    rig.load("a", "two")
    assert book.held(8, again=False) == (8, {1: ("a", "")}), "memory holds the same number"
    rig.manager.memory.add(5)
    assert book.held(9, again=False) == (9, {1: ("a", "")}), "a dummy of vLLM's"


def test_each_rank_compares_its_own_share():
    config = SimpleNamespace()
    book = Book(config, 1, lambda model: "mine")
    manager = manager_class()(config)
    book.loaded(manager, 1, "a", SimpleNamespace())
    assert book.made(Adapter(1, "a", ("other's", "mine")))
    assert not book.made(Adapter(1, "a", ("mine", "other's")))
    assert not book.made(Adapter(1, "a", ("mine",)))


def test_an_adapter_that_is_loaded_in_place_is_not_looked_at_and_not_cached():
    rig = Rig()
    for _ in range(3):
        adapter = rig.load("in place", "a", load_inplace=True)
    assert rig.says(adapter) == (False, False)
    assert rig.hashed == 0
