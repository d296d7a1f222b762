"""In which namespace a request's blocks live; what must be read for that is read off-thread."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from py_kvcache.config import Config
from py_kvcache.identity import adapter_stamp, stable_identity
from py_kvcache.layout import write_config
from py_kvcache.namespace import Spaces
from py_kvcache.plan import Adapter
from py_kvcache.scheduler.probe import Prober

logger = logging.getLogger("vllm.py_kvcache.names")

DESCRIBE_AGAIN_S = 60.0  # a full or read-only volume may be better then
_MOST_ADAPTERS = 1024
_MOST_NAMES = 65_536
_MOST_SPACES = 4096


@dataclass(slots=True)
class AdapterQuestion:
    """What one request's LoRA adapter is; the answer comes from another thread."""

    number: int
    name: str
    path: str
    identity: str = ""
    note: Adapter | None = None
    in_vain: bool = False  # it cannot be read: to wait for the namespace is useless


class Names:
    """Namespace of each request: one for plain ones, one for each LoRA adapter's content."""

    def __init__(self, config: Config, spaces: Spaces, prober: Prober) -> None:
        self._config, self._spaces, self._prober = config, spaces, prober
        self._unreadable: OrderedDict[str, None] = OrderedDict()  # said once each
        # Content of the adapter under each name, "" once there was another: vLLM's own prefix cache, which
        # knows the name only, keeps what the first computed, and the second's blocks rest on it.
        self._first: OrderedDict[str, str] = OrderedDict()
        # When to try to write config.json; never again once it stands.
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
        if not self._spaces.known or (adapter is not None and adapter.note is None):
            return None
        identity = adapter.identity if adapter is not None else None
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

    def identify(self, number: int, name: str, path: str, *, readable: bool = True) -> AdapterQuestion:
        """Begin to look at a request's adapter: its files may have changed since the last one."""
        question = AdapterQuestion(number, name, path, in_vain=not readable)
        if readable:
            self._prober.run(lambda: self._read_adapter(question))
        return question

    def trusts(self, adapter: AdapterQuestion | None) -> bool:
        """Whether no other adapter had its name. True while it is not known."""
        return adapter is None or adapter.note is None or self._first.get(adapter.name) == adapter.identity

    def distrust(self, space: str) -> None:
        """A worker had other weights than the namespace is for: of its names nobody knows who used them."""
        for name, identity in list(self._first.items()):
            if identity and self._spaces.name(identity) == space:
                self._first[name] = ""

    def _read_adapter(self, question: AdapterQuestion) -> None:
        path = question.path
        try:
            stamp = adapter_stamp(path)
            question.identity = stable_identity(path, stamp)
            if self._first.setdefault(question.name, question.identity) != question.identity:
                self._first[question.name] = ""
                raise OSError(f"there was another under the name {question.name} before")
            if len(self._first) > _MOST_NAMES:
                self._first.popitem(last=False)
            # Last: the other thread looks at it.
            question.note = Adapter(question.number, path, stamp, question.identity)
            self._unreadable.pop(path, None)
        except (OSError, ValueError) as error:
            question.in_vain = True
            if path not in self._unreadable:
                logger.warning(
                    "py-kvcache: LoRA adapter %s: %s; its requests are not cached",
                    path,
                    error,
                )
            self._unreadable[path] = None
            if len(self._unreadable) > _MOST_ADAPTERS:
                self._unreadable.popitem(last=False)

    def _write_config(self, name: str, fields: dict[str, Any]) -> None:
        config = self._config
        try:
            write_config(config.root_path, name, fields, dir_mode=config.dir_mode, file_mode=config.file_mode)
        except OSError as error:
            logger.warning("py-kvcache: could not write config.json of %s: %s", name, error)
            return
        except ValueError as error:
            logger.warning("py-kvcache: config.json of %s is unreadable, remove it: %s", name, error)
        self._describe_at[name] = float("inf")
