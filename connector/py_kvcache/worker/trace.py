"""Timeline of one process in Chrome's trace format (open it in ui.perfetto.dev or chrome://tracing).

The file is valid JSON between flushes, so also after SIGKILL: each flush is one write that puts new events
over the closing bracket and a new bracket behind them. (Perfetto reads a file that is cut short, too.)
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(f"vllm.{__name__}")

_END = b"\n]\n"


class Trace:
    """Collects events from any thread. Times are microseconds of time.monotonic().

    Args:
        path: file to write; if another live process writes there (other ranks, the scheduler), the
            process id is put before its suffix. ``self.path`` is the name in use.
        process: what the timeline calls this process.
        flush_every: events kept in memory between two writes.
    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, *, process: str = "py-kvcache", flush_every: int = 256) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[str, int] = {}
        self._events: list[dict[str, object]] = []
        self._flush_every = max(1, flush_every)
        self._pid = os.getpid()
        self.path, self._fd = _open_own(path, self._pid)
        head = json.dumps({"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": process}})
        data = b"[\n" + head.encode() + _END
        os.pwrite(self._fd, data, 0)
        self._end = len(data) - len(_END)

    def complete(self, name: str, cat: str, ts_us: float, dur_us: float, lane: str, **args: object) -> None:
        """Something that took from ``ts_us`` to ``ts_us + dur_us``. Events of one lane should nest."""
        self._add({"name": name, "cat": cat, "ph": "X", "ts": ts_us, "dur": dur_us}, lane, args)

    def span(self, name: str, cat: str, ts_us: float, dur_us: float, ident: str, **args: object) -> None:
        """As ``complete``, for what overlaps others of its kind: in a row of its own."""
        both = {"name": name, "cat": cat, "id": ident}
        self._add({**both, "ph": "b", "ts": ts_us}, "", args)
        self._add({**both, "ph": "e", "ts": ts_us + dur_us}, "", {})

    def instant(self, name: str, cat: str, ts_us: float, lane: str, **args: object) -> None:
        """Something that happened at a moment."""
        self._add({"name": name, "cat": cat, "ph": "i", "s": "t", "ts": ts_us}, lane, args)

    def counter(self, name: str, ts_us: float, **values: float) -> None:
        """Values that hold from ``ts_us`` on, drawn as a stacked graph."""
        self._add({"name": name, "ph": "C", "ts": ts_us}, "", values)

    def flush(self) -> None:
        """Write what is collected."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write the rest and close the file; later events are dropped. Idempotent."""
        with self._lock:
            self._write()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _add(self, event: dict[str, object], lane: str, args: Mapping[str, object]) -> None:
        with self._lock:
            if self._fd < 0:
                return
            event["pid"], event["tid"] = self._pid, self._lane(lane)
            if args:
                event["args"] = dict(args)
            self._events.append(event)
            if len(self._events) >= self._flush_every:
                self._write()

    def _lane(self, lane: str) -> int:
        tid = self._lanes.get(lane)
        if tid is None:
            tid = self._lanes[lane] = len(self._lanes)
            if lane:
                self._events.append(
                    {"name": "thread_name", "ph": "M", "pid": self._pid, "tid": tid, "args": {"name": lane}}
                )
        return tid

    def _write(self) -> None:
        if self._fd < 0 or not self._events:
            return
        data = b"".join(b",\n" + json.dumps(event, default=repr).encode() for event in self._events)
        self._events.clear()
        try:
            written = os.pwrite(self._fd, data + _END, self._end)
            if written != len(data) + len(_END):
                raise OSError(f"only {written} bytes fit")
            self._end += len(data)
        except OSError as error:
            # A trace is never worth a request: stop tracing, leave the file as valid as it was.
            log.warning("py-kvcache: trace %s ends here: %s", self.path, error)
            try:
                os.ftruncate(self._fd, self._end)
                os.pwrite(self._fd, _END, self._end)
            except OSError as again:
                log.debug("trace %s: %s", self.path, again)
            os.close(self._fd)
            self._fd = -1


def _open_own(path: str, pid: int) -> tuple[str, int]:
    """Open a file that no other live process traces to; its lock goes with the process."""
    stem, suffix = os.path.splitext(path)
    for name in (path, f"{stem}.{pid}{suffix}"):
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if name == path:
                os.close(fd)
                continue
        except OSError as error:
            log.debug("flock of %s: %s", name, error)  # no locks here: the name is ours by good faith
        os.ftruncate(fd, 0)
        return name, fd
    raise AssertionError("the second name is always taken")
