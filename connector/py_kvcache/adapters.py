"""Which LoRA adapters a worker has in memory, and what every load under their names was.

vLLM tells no connector when a worker reads an adapter: with its first request, before that by API, again in
place, again after it was evicted; always whatever lies in its folder then. So the one method that reads them
is wrapped, once in a process.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from py_kvcache.loraweights import weights_identity
from py_kvcache.plan import Adapter, Held

log = logging.getLogger("vllm.py_kvcache.adapters")

_MARK = "_py_kvcache_watches"
_MOST_NAMES = 4096
_MOST_NUMBERS = 65_536


class Book:
    """The adapters of one engine's worker. Called from vLLM's thread.

    vLLM's prefix cache knows an adapter by its name only: whatever was computed under a name may stand in
    front of what is computed next. So a name is cached as long as every load under it was of the same
    weights, and never again once one was not, or once nobody knows.
    """

    def __init__(
        self, lora_config: Any, rank: int = 0, identify: Callable[[Any], str] = weights_identity
    ) -> None:
        self._config, self._rank, self._identify = lora_config, rank, identify
        self._manager: weakref.ref[Any] | None = None
        self._names: dict[str, str] = {}  # identity of all loads under a name; "" if it is not cached
        self._numbers: dict[int, str] = {}  # the name of each number; one with two names spoils both
        self._is_lost = False  # nobody knows what was loaded under any name
        self._is_full = False
        self._told: set[int] | None = None  # what was in memory at the last report; None: tell anew

    def is_of(self, manager: Any) -> bool:
        """Whether vLLM's manager is this engine's: engines have nothing but their configuration in common."""
        return manager.lora_config is self._config

    def lose(self) -> None:
        """Something was loaded, and nobody knows what."""
        self._is_lost, self._told = True, None

    def loaded(self, manager: Any, number: int, name: str, model: Any) -> None:
        """vLLM has read an adapter; None: it is not looked at. Replaces its tensors, see weights_identity."""
        other = self._manager() if self._manager is not None else None
        if other is None:
            # The first, or vLLM has made its manager anew; its prefix cache may be the old one all the same.
            self._manager = weakref.ref(manager)
        elif other is not manager:
            log.warning("py-kvcache: two engines share one LoRA configuration; no adapter is cached")
            self.lose()
        self._told = None
        first = self._numbers.get(number)
        if first is None and len(self._numbers) < _MOST_NUMBERS:
            self._numbers[number] = name
        elif first != name:
            # Requests of either name may have been computed with the other's weights.
            self._note(name, "", "its number had another name before")
            if first is not None:
                self._note(first, "", "its number has another name now")
        if self._names.get(name) != "" and not self._is_lost:
            self._note(name, *self._identity(model))

    def _identity(self, model: Any) -> tuple[str, str]:
        if model is None:
            return "", "it is loaded in place"
        try:
            return self._identify(model), "it had other weights before"
        except Exception as error:  # noqa: BLE001 - vLLM has loaded it well; whatever is wrong is ours
            return "", f"its weights cannot be told: {type(error).__name__}: {error}"

    def _note(self, name: str, identity: str, reason: str) -> None:
        before = self._names.get(name)
        if before is None and len(self._names) >= _MOST_NAMES:
            if not self._is_full:
                log.warning("py-kvcache: more than %d LoRA adapters; new ones are not cached", _MOST_NAMES)
            self._is_full = True
            return
        self._names[name] = identity if before in (None, identity) else ""
        if before != "" and self._names[name] == "":
            log.warning("py-kvcache: LoRA adapter %s: %s; it is not cached any more", name, reason)

    def _of(self, name: str) -> str:
        return "" if self._is_lost else self._names.get(name, "")

    def _in_memory(self) -> set[int]:
        manager = self._manager() if self._manager is not None else None
        return set() if manager is None else set(manager.list_adapters())

    def held(self, step: int, again: bool) -> Held:
        """For the scheduler: what is in memory, if that changed since the last call or ``again``."""
        memory = self._in_memory()
        if memory == self._told and not again:
            return Held(step, None)
        self._told = memory
        names = {number: self._numbers[number] for number in memory if number in self._numbers}
        return Held(step, {number: (name, self._of(name)) for number, name in names.items()})

    def made(self, adapter: Adapter) -> bool:
        """Whether all that was computed under the adapter's name was made with these weights."""
        identity = self._of(adapter.name)
        return (
            identity != ""
            and self._numbers.get(adapter.number) == adapter.name
            and adapter.identities[self._rank : self._rank + 1] == (identity,)
        )

    def will_make(self, adapter: Adapter) -> bool:
        """Whether the next step computes with these weights: made(), and nothing has to be read for it."""
        return self.made(adapter) and adapter.number in self._in_memory()


class AdapterWatch:
    """Tells each engine of a process what its workers load."""

    def __init__(self) -> None:
        self._books: weakref.WeakSet[Book] = weakref.WeakSet()

    def open(self, manager_class: Any, lora_config: Any, rank: int) -> Book:
        """The book of an engine, for as long as somebody keeps it."""
        self._wrap(manager_class)
        book = Book(lora_config, rank)
        self._books.add(book)
        return book

    def _wrap(self, manager_class: Any) -> None:
        load = manager_class._load_adapter
        if hasattr(load, _MARK):
            return

        @functools.wraps(load)
        def watched(manager: Any, lora_request: Any) -> Any:
            adapter = load(manager, lora_request)
            self._loaded(manager, lora_request, adapter)
            return adapter

        setattr(watched, _MARK, True)
        manager_class._load_adapter = watched

    def _loaded(self, manager: Any, lora_request: Any, model: Any) -> None:
        books = list(self._books)
        try:
            number, name = int(lora_request.lora_int_id), str(lora_request.lora_name)
            # In place it is read again in each step, perhaps: to tell it each time would slow every request.
            model = None if getattr(lora_request, "load_inplace", False) else model
            of_it = [book for book in books if book.is_of(manager)]
            if not of_it:
                log.info("py-kvcache: LoRA adapter %s was loaded by an engine without this connector", name)
            for book in of_it:
                book.loaded(manager, number, name, model)
        except Exception:
            log.exception("py-kvcache: a LoRA adapter was loaded, and nobody knows which; none is cached")
            for book in books:
                book.lose()


ADAPTERS = AdapterWatch()
