"""What a worker has loaded under each number of a LoRA adapter.

vLLM tells no connector when a worker reads an adapter: with its first request, before that by API, again in
place, again after it was evicted; always whatever lies in its folder then. So the one method that reads them
is wrapped, once in a process.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from py_kvcache.identity import adapter_stamp, stable_identity
from py_kvcache.plan import Adapter

log = logging.getLogger("vllm.py_kvcache.adapters")

_MARK = "_py_kvcache_watches"


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="py-kvcache-adapter", daemon=True).start()


@dataclass
class _History:
    """All loads under one number.

    What was computed with the first must not meet what is computed with a second that differs: a number
    whose weights changed is not cached any more while the process lives.
    """

    manager: weakref.ref[Any]
    # Stamp of each version that was loaded -> its identity: None until it has been read, "" if it cannot be.
    loads: dict[str, str | None] = field(default_factory=dict)

    def is_always(self, adapter: Adapter) -> bool:
        """Whether every load was of these weights, as far as that is known."""
        found = set(self.loads.values())
        return found == {adapter.identity} or (None in found and self.loads.keys() == {adapter.stamp})


class AdapterWatch:
    """Called from vLLM's thread."""

    def __init__(self, run: Callable[[Callable[[], None]], None] = _in_a_thread) -> None:
        self._run = run
        self._numbers: dict[int, _History] = {}

    def begin(self, manager_class: Any) -> None:
        """Wrap ``_load_adapter`` of vLLM's manager; once is enough for all engines of a process."""
        load = manager_class._load_adapter
        if hasattr(load, _MARK):
            return

        @functools.wraps(load)
        def watched(manager: Any, lora_request: Any) -> Any:
            path = str(lora_request.lora_path)
            before = _stamp(path)
            adapter = load(manager, lora_request)
            self._loaded(int(lora_request.lora_int_id), path, before, manager)
            return adapter

        setattr(watched, _MARK, True)
        manager_class._load_adapter = watched

    def _loaded(self, number: int, path: str, before: str, manager: Any) -> None:
        after = _stamp(path)
        # vLLM downloads what has a hub name; a commit does not change.
        if not before and not os.path.exists(os.path.expanduser(path)):
            before = after
        history = self._numbers.get(number)
        if history is None or history.manager() is None:  # an engine of this process that is gone
            history = self._numbers[number] = _History(weakref.ref(manager))
        if not after or before != after:
            history.loads[""] = ""  # nobody knows what was read
        elif after not in history.loads:
            history.loads[after] = None
            self._run(lambda: self._read(history, path, after))

    @staticmethod
    def _read(history: _History, path: str, stamp: str) -> None:
        try:
            identity = stable_identity(path, stamp)
        except (OSError, ValueError) as error:
            log.warning("py-kvcache: LoRA adapter %s cannot be told (%s); it is not cached", path, error)
            identity = ""
        history.loads[stamp] = identity

    def made(self, adapter: Adapter) -> bool:
        """Whether blocks that were computed with this number were made with these weights."""
        history = self._numbers.get(adapter.number)
        return history is not None and history.is_always(adapter)

    def will_make(self, adapter: Adapter) -> bool:
        """Whether the next step computes with these weights: those in memory, or what lies in the folder."""
        history = self._numbers.get(adapter.number)
        if history is None:
            return _stamp(adapter.path) == adapter.stamp
        manager = history.manager()
        in_memory = manager is not None and adapter.number in manager.list_adapters()
        return history.is_always(adapter) and (in_memory or _stamp(adapter.path) == adapter.stamp)


def _stamp(path: str) -> str:
    try:
        return adapter_stamp(path)
    except (OSError, ValueError):
        return ""


ADAPTERS = AdapterWatch()
