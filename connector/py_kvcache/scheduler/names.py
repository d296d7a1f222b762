"""In which namespace a request's blocks live; what must be written for that is written off-thread."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from py_kvcache.config import Config
from py_kvcache.layout import write_config
from py_kvcache.namespace import Spaces
from py_kvcache.scheduler.adapters import AdapterQuestion, Adapters
from py_kvcache.scheduler.probe import Prober

logger = logging.getLogger("vllm.py_kvcache.names")

DESCRIBE_AGAIN_S = 60.0  # a full or read-only volume may be better then
_MOST_SPACES = 4096


class Names:
    """Namespace of each request: one for plain ones, one for each LoRA adapter's weights."""

    def __init__(self, config: Config, spaces: Spaces, prober: Prober, adapters: Adapters) -> None:
        self._config, self._spaces, self._prober, self._adapters = config, spaces, prober, adapters
        # When to look for config.json again: who removes a namespace under us removes it, too.
        self._describe_at: OrderedDict[str, float] = OrderedDict()

    def set_layouts(self, layouts: Iterable[Mapping[str, Any]]) -> None:
        """The workers described their KV tensors: from now on names are known."""
        if not self._spaces.known:
            self._spaces.set_layouts(layouts)

    def new_epoch(self) -> None:
        """Fresh names for everybody."""
        self._spaces.new_epoch()

    def space_of(self, adapter: AdapterQuestion | None) -> str | None:
        """The namespace, None while it is not known."""
        if not self._spaces.known:
            return None
        identity = None
        if adapter is not None and (identity := self._adapters.identify(adapter)) is None:
            return None
        name = self._spaces.name(identity)
        if time.monotonic() >= self._describe_at.get(name, 0.0):
            if name not in self._describe_at:
                logger.info("py-kvcache: namespace %s", name)
            self._describe_at[name] = time.monotonic() + DESCRIBE_AGAIN_S
            if len(self._describe_at) > _MOST_SPACES:
                self._describe_at.popitem(last=False)
            fields = self._spaces.fields(identity)
            self._prober.run(lambda: self._write_config(name, fields))
        return name

    def _write_config(self, name: str, fields: dict[str, Any]) -> None:
        config = self._config
        try:
            write_config(config.root_path, name, fields, dir_mode=config.dir_mode, file_mode=config.file_mode)
        except OSError as error:
            logger.warning("py-kvcache: could not write config.json of %s: %s", name, error)
        except ValueError as error:
            logger.warning("py-kvcache: config.json of %s is unreadable, remove it: %s", name, error)
            self._describe_at[name] = float("inf")
