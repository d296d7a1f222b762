"""The thresholds file of this node: read again when it changes, off vLLM's thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from py_kvcache.errors import ConfigError
from py_kvcache.models import Thresholds, read_thresholds, thresholds_path

log = logging.getLogger("vllm.py_kvcache.gate")

CHECK_EVERY_S = 5.0

Signature = tuple[int, int, int]


class ThresholdsFile:
    """One per engine.

    Args:
        path: as set by the user, a file or a folder with one for each node; empty for none.
        engine: digest of the engine, None until it is known.
        run: runs a job in another thread, soon.
    """

    def __init__(
        self, path: str, engine: Callable[[], str | None], run: Callable[[Callable[[], None]], None]
    ) -> None:
        self._path, self._engine, self._run = path, engine, run
        self._value: Thresholds | None = None
        self._seen: Signature | None = None
        self._said = ""
        self._next = 0.0
        self._busy = False

    def current(self, now: float) -> Thresholds | None:
        """What the file said when it was last looked at; None without a file that is good for this engine."""
        if self._path and not self._busy and now >= self._next:
            engine = self._engine()
            if engine is not None:
                self._next, self._busy = now + CHECK_EVERY_S, True
                self._run(lambda: self._look(engine))
        return self._value

    def _look(self, engine: str) -> None:
        """In the other thread. A file system that hangs here costs its answer only."""
        try:
            path = thresholds_path(self._path)
            status = os.stat(path)
            signature = status.st_mtime_ns, status.st_size, status.st_ino
            if signature == self._seen:
                return
            self._seen = None  # what could not be read is read again
            value = read_thresholds(path)
            self._seen = signature
            if value.engine != engine:
                raise ConfigError(
                    f"{path} was measured for engine {value.engine}, this one is {engine} (model, types, "
                    "layout, versions and parallelism count): calibrate for it"
                )
            self._value = value
            log.info(
                "py-kvcache: thresholds of %s are in use (%s)", path, ", ".join(value.thresholds) or "none"
            )
        except Exception as error:  # noqa: BLE001 - whatever a file makes of pydantic or a curve: it is no good
            self._value = None
            if isinstance(error, OSError):
                self._seen = None
            self._complain(str(error) or type(error).__name__)
        finally:
            self._busy = False

    def _complain(self, problem: str) -> None:
        if problem != self._said:
            self._said = problem
            log.warning("py-kvcache: no thresholds are in use: %s", problem)
