"""In which namespace a request's blocks live; what must be read for that is read off-thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from py_kvcache.config import Config
from py_kvcache.layout import write_config
from py_kvcache.namespace import Spaces, adapter_identity
from py_kvcache.scheduler.probe import Prober

logger = logging.getLogger("vllm.py_kvcache.names")

AdapterKey = tuple[str, int]  # path and vLLM's number of a LoRA adapter

UNREADABLE = "unreadable"
DESCRIBE_AGAIN_S = 60.0  # a full or read-only volume may be better then


class Names:
    """Namespace of each request: one for plain ones, one for each LoRA adapter's content."""

    def __init__(self, config: Config, spaces: Spaces, prober: Prober) -> None:
        self._config, self._spaces, self._prober = config, spaces, prober
        self._adapters: dict[AdapterKey, str | None] = {}
        self._used: set[str] = set()
        self._described: set[str] = set()  # namespaces whose config.json stands, or never will
        self._describe_at: dict[str, float] = {}

    def set_layouts(self, layouts: Iterable[Mapping[str, Any]]) -> None:
        """The workers described their KV tensors: from now on names are known."""
        if not self._spaces.known:
            self._spaces.set_layouts(layouts)

    @property
    def used(self) -> tuple[str, ...]:
        """Every namespace that a request of this engine was in."""
        return tuple(self._used)

    def new_epoch(self) -> None:
        """Fresh names for everybody."""
        self._spaces.new_epoch()

    def space_of(self, adapter_key: AdapterKey | None) -> str | None:
        """The namespace, None while it is not known."""
        if not self._spaces.known:
            return None
        adapter = None
        if adapter_key is not None:
            adapter = self._adapters.get(adapter_key)
            if adapter is None or adapter == UNREADABLE:
                return None
        name = self._spaces.name(adapter)
        self._used.add(name)
        if name not in self._described and time.monotonic() >= self._describe_at.get(name, 0.0):
            self._describe_at[name] = time.monotonic() + DESCRIBE_AGAIN_S
            fields = self._spaces.fields(adapter)
            self._prober.run(lambda: self._write_config(name, fields))
        return name

    def in_vain(self, adapter_key: AdapterKey | None) -> bool:
        """True if waiting for a namespace is useless: the adapter cannot be read."""
        return adapter_key is not None and self._adapters.get(adapter_key) == UNREADABLE

    def identify(self, adapter_key: AdapterKey, again: bool) -> None:
        """Begin to read an adapter's identity, unless it is known and need not be read ``again``."""
        known = self._adapters.get(adapter_key, UNREADABLE)
        if known == UNREADABLE or again:
            self._adapters[adapter_key] = None
            self._prober.run(lambda: self._read_adapter(adapter_key))

    def _read_adapter(self, adapter_key: AdapterKey) -> None:
        try:
            self._adapters[adapter_key] = adapter_identity(adapter_key[0])
        except (OSError, ValueError) as error:
            # Tried again with its next request; until then nothing waits for it.
            self._adapters[adapter_key] = UNREADABLE
            logger.warning(
                "py-kvcache: LoRA adapter %s cannot be read (%s); its requests are not cached",
                adapter_key[0], error,
            )  # fmt: skip

    def _write_config(self, name: str, fields: dict[str, Any]) -> None:
        config = self._config
        try:
            write_config(config.root_path, name, fields, dir_mode=config.dir_mode, file_mode=config.file_mode)
        except OSError as error:
            logger.warning("py-kvcache: could not write config.json of %s: %s", name, error)
            return
        except ValueError as error:
            logger.warning("py-kvcache: config.json of %s is unreadable, remove it: %s", name, error)
        self._described.add(name)
