"""What the reactor says: warnings, rarely, and the timeline, if somebody wants it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py_kvcache.worker.jobs import Running, Transfer
    from py_kvcache.worker.parts import Timeline

log = logging.getLogger("vllm.py_kvcache.worker.journal")

QUIET_S = 60.0


class Journal:
    """Reactor thread only.

    Args:
        trace: None for no timeline.
    """

    def __init__(self, trace: Timeline | None) -> None:
        self.trace = trace
        self._uses: dict[str, int] = {}
        self._said: dict[tuple[str, ...], tuple[float, int]] = {}  # kind -> when, how many since

    def warn(self, now: float, kind: tuple[str, ...], text: str) -> None:
        """Warn, once a minute for each kind: a dead disk must not fill the log as well."""
        when, since = self._said.get(kind, (float("-inf"), 0))
        if now - when < QUIET_S:
            self._said[kind] = when, since + 1
            return
        self._said[kind] = now, 0
        log.warning("py-kvcache: %s%s", text, f" ({since} more of this kind before)" if since else "")

    def block(self, now: float, t: Transfer, name: str) -> None:
        """One bar, from the begin of the block's current operation to now."""
        if self.trace is None:
            return
        lane = f"slot {t.slot.index}" if t.slot is not None else "files"
        job = t.run.job
        self.trace.complete(
            name, job.kind.value, t.since * 1e6, (now - t.since) * 1e6, lane,
            job=job.job_id, block=t.work.index,
        )  # fmt: skip

    def job(self, now: float, run: Running) -> None:
        """One bar, from the job's arrival to now, when its last block ended."""
        if self.trace is not None:
            job = run.job
            self.trace.span(
                f"{job.kind.value} job", job.kind.value, run.arrived * 1e6, (now - run.arrived) * 1e6,
                f"{job.kind.value} {job.job_id}", blocks=len(job.blocks), done=run.done,
            )  # fmt: skip

    def submit(self, began: float, ended: float) -> None:
        """One bar for what handing the queue to the kernel took."""
        if self.trace is not None:
            self.trace.complete("submit", "ring", began * 1e6, (ended - began) * 1e6, "reactor")

    def slots(self, now: float, uses: dict[str, int]) -> None:
        """One sample of the slots' use, where it changed."""
        if self.trace is not None and uses != self._uses:
            self._uses = uses
            self.trace.counter("slots", now * 1e6, **uses)

    def rest(self) -> None:
        """The worker is idle: who looks at the timeline now shall find all of it."""
        if self.trace is not None:
            self.trace.flush()
