"""One process after the other: start, follow its events, end it with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py_kvcache.bench.procio import process_stats

_LOOK_EVERY_S = 0.1
_GRACE_S = 10.0
_GONE_S = 30.0
PARENT = "PY_KVCACHE_BENCH_PARENT"  # tells a child who started it
_TAIL_LINES = 12
_GROUP, _UTIME, _STIME = 2, 11, 12  # of what process_stats tells
_CAUSES = 4
# "ValueError: ...", also behind a logger's prefix.
_CAUSE = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): .*")
_TAIL_BYTES = 16 << 10

OnEvent = Callable[[dict[str, Any]], None]


@dataclass
class Ended:
    """What a process told, and why it did not end well (None if it did)."""

    events: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    log_tail: list[str] = field(default_factory=list)


def command_of(module: str) -> list[str]:
    """How a module of ours is started; its task's path comes last."""
    return [sys.executable, "-m", module]


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, in which a child finds our package, and ``own`` above it.

    vLLM's CPU engines keep one core for themselves, and one more for each worker beside any KV connector:
    unless told otherwise, every system gets all cores, or what is compared is that.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        PARENT: str(os.getpid()),
        **own,
    }


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    events: Path,
    log: Path,
    timeout_s: float,
    on_event: OnEvent,
) -> Ended:
    """Run to the end or to the timeout, telling ``on_event`` each event as it comes.

    Whatever happens here, KeyboardInterrupt included, nothing of the child's is left running.
    """
    begin = time.monotonic()
    ended = Ended()
    follower = _Follower(events, ended, on_event)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment),
            # A group of its own, which can be ended as a whole.
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - begin < timeout_s:
                time.sleep(_LOOK_EVERY_S)
                follower.look()
            late = process.poll() is None
        finally:
            end_group(process)
    follower.look()
    ended.seconds = time.monotonic() - begin
    if late:
        ended.error = f"not done after {timeout_s:g} s"
    elif process.returncode != 0:
        ended.error = ending(process.returncode)
    elif not any(event.get("event") == "done" for event in ended.events):
        ended.error = "it ended before it was done"
    if ended.error is not None:
        ended.log_tail = [*causes(log), *tail(log)]
    return ended


class _Follower:
    """Reads whole lines of a file that grows."""

    def __init__(self, path: Path, ended: Ended, on_event: OnEvent) -> None:
        self._path, self._ended, self._on_event = path, ended, on_event
        self._offset = 0

    def look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            self._ended.events.append(event)
            self._on_event(event)


def ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def interrupt_on_sigterm() -> None:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does: what it started and wrote goes with it."""

    def stop(_number: int, _frame: object) -> None:
        for again in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)  # the first is being obeyed
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End the child and what it started, and wait until all are gone: the next one needs their memory."""
    end = time.monotonic() + _GONE_S
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()
    while group_members(process.pid) and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def group_ticks(group: int) -> int:
    """CPU time of a process group so far, in clock ticks (mostly 10 ms)."""
    return sum(
        int(fields[_UTIME]) + int(fields[_STIME])
        for _pid, fields in process_stats()
        if int(fields[_GROUP]) == group
    )


def group_members(group: int) -> list[int]:
    """Ids of the processes in a process group that are not dead yet."""
    return [
        pid
        for pid, (state, _parent, its_group, *_) in process_stats()
        if int(its_group) == group and state not in "ZX"
    ]


def causes(log: Path) -> list[str]:
    """The first different errors in a log: vLLM's last lines only say that its engine core failed."""
    found: dict[str, None] = {}
    with log.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _CAUSE.search(line)
            if match is not None:
                found[match[0].rstrip()[:300]] = None
            if len(found) == _CAUSES:
                break
    return list(found)


def tail(log: Path) -> list[str]:
    """The last lines that are not empty."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]
