"""May a store begin now? Joins watermark, daily budget and a root that is gone or cannot be written to."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.watermark import CHECK_EVERY_S, DayBudget, Space, Watermark

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_kvcache.worker.fileops import FileOps
    from py_kvcache.worker.rootwatch import RootWatch

log = logging.getLogger(f"vllm.{__name__}")

REFUSED_AGAIN_S = 60.0
WARN_AGAIN_S = 600.0


class StoreGate:
    """Thread-safe; ``enter`` and ``failed`` may block on the file system, everything else returns at once."""

    def __init__(
        self,
        ops: FileOps,
        root: str,
        watermark: Watermark,
        budget: DayBudget,
        clock: Callable[[], float] = time.monotonic,
        watch: RootWatch | None = None,
    ) -> None:
        self._ops, self._root, self._clock = ops, root, clock
        self._lock = threading.Lock()
        self._watermark, self._budget = watermark, budget
        self._off_until, self._off_code = float("-inf"), 0
        self._watch, self._away = watch, False
        self._watched_at = float("-inf")
        self._too_much = 0  # bytes that the budget refused last
        self._warned: dict[str, float] = {}  # reason -> when

    def enter(self, path: str, nbytes: int) -> None:
        """Admit one file of ``nbytes``; the caller owes one ``leave``.

        Raises:
            BlockError: PAUSED; its detail says by what.
        """
        now = self._clock()
        with self._lock:
            self._check_off(path, now)
            due = self._watermark.is_due(now, nbytes)
            watch_due = now - self._watched_at >= CHECK_EVERY_S
        if watch_due:
            self._look_at_root(now)
        if self._away:
            raise BlockError(Fault.PAUSED, path, errno.ENOENT, "the root was unmounted or replaced")
        space = self._look() if due else None
        with self._lock:
            if due:
                self._watermark.look(now, space)
            if not self._watermark.admit(nbytes):
                mark = self._watermark
                self._warn(
                    "watermark",
                    f"{self._root} is filled to the mark of {mark.stop_at:.0%}; "
                    f"stores go on below {mark.resume_at:.0%}",
                )
                raise BlockError(Fault.PAUSED, path, 0, "watermark")
            self._rearm("watermark", now)
            if not self._budget.admit(now, nbytes):
                self._watermark.finish(nbytes, written=False)
                self._too_much = nbytes
                self._warn("budget", f"the budget of {self._budget.limit} bytes a day is spent")
                raise BlockError(Fault.PAUSED, path, 0, "store_bytes_per_day")
            self._too_much = 0
            self._rearm("budget", now)

    def leave(self, nbytes: int, *, written: bool) -> None:
        """The admitted file is published (written) or gone again."""
        with self._lock:
            self._watermark.finish(nbytes, written=written)
            if not written:
                self._budget.give_back(nbytes)

    def failed(self, error: BlockError) -> None:
        """Tell the gate why a store failed: some reasons are about the volume, not about the file."""
        code = error.code
        if error.fault is Fault.NO_SPACE:
            # statvfs knows nothing of quotas: without a pause every store would be copied and refused.
            self._turn_off(code, CHECK_EVERY_S, "is full; stores are paused for a moment at a time")
        elif code in (errno.ENOENT, errno.ENOTDIR):
            self._look_at_root(self._clock())
        elif code == errno.EROFS or (code in (errno.EACCES, errno.EPERM) and not self._may_write()):
            self._turn_off(code, REFUSED_AGAIN_S, "cannot be written to; blocks are loaded but not stored")

    def opened(self) -> None:
        """A store could begin again, so the next refusal is news."""
        if self._off_code:
            with self._lock:
                self._rearm(errno.errorcode.get(self._off_code, "?"), self._clock())
                self._off_code = 0

    @property
    def paused(self) -> bool:
        """State for the gauge."""
        now = self._clock()
        with self._lock:
            return self._away or self._watermark.paused or now < self._off_until or self._is_spent(now)

    def refuses(self) -> bool:
        """True if a store would be refused now without any look at the volume: spare the copy."""
        now = self._clock()
        with self._lock:
            if now < self._off_until or self._is_spent(now):
                return True
            if self._away and now - self._watched_at < CHECK_EVERY_S:
                return True
            return self._watermark.paused and not self._watermark.is_due(now, 0)

    def _is_spent(self, now: float) -> bool:
        return not self._budget.affords(now, self._too_much)

    def _look_at_root(self, now: float) -> None:
        away = self._watch is not None and not self._watch.is_same()
        with self._lock:
            self._watched_at, before, self._away = now, self._away, away
            if away:
                self._warn(
                    "root",
                    f"{self._root} is no longer the volume of the start: it was unmounted or replaced; "
                    "nothing is stored until the same one is back (if you changed it, restart the engine)",
                )
                return
            self._rearm("root", now)
        if before:
            log.info("py-kvcache: %s is back, stores go on", self._root)

    def _check_off(self, path: str, now: float) -> None:
        if now < self._off_until:
            raise BlockError(Fault.PAUSED, path, self._off_code, "stores are off for now")

    def _turn_off(self, code: int, seconds: float, text: str) -> None:
        with self._lock:
            self._off_until, self._off_code = self._clock() + seconds, code
            name = errno.errorcode.get(code, "?")
            self._warn(name, f"{self._root} {text} [{name}] {os.strerror(code)}")

    def _warn(self, reason: str, text: str) -> None:
        if reason not in self._warned:
            self._warned[reason] = self._clock()
            log.warning("py-kvcache: %s", text)

    def _rearm(self, reason: str, now: float) -> None:
        # A volume at its limit flips between full and not full: one warning in ten minutes is enough.
        if now - self._warned.get(reason, now) >= WARN_AGAIN_S:
            del self._warned[reason]

    def _may_write(self) -> bool:
        """Is EACCES about one folder (mixed identities), or about the whole root?"""
        try:
            return self._ops.access(self._root, os.W_OK | os.X_OK)
        except OSError:
            return True

    def _look(self) -> Space | None:
        try:
            found = self._ops.statvfs(self._root)
        except OSError as error:
            log.debug("statvfs of %s: %s", self._root, error)
            return None
        return Space.of(
            frsize=found.f_frsize,
            blocks=found.f_blocks,
            bfree=found.f_bfree,
            bavail=found.f_bavail,
            files=found.f_files,
            ffree=found.f_ffree,
        )
