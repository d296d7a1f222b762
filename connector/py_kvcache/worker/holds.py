"""Requests that ended while blocks of theirs were still to be copied: vLLM keeps these until we let go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Question(Protocol):
    """loop.Flush: answered once no job of it touches device memory any more."""

    @property
    def answered(self) -> Answer:
        """See there."""


class Answer(Protocol):
    """The part of threading.Event that is used."""

    def is_set(self) -> bool:
        """Whether it is there."""


@dataclass
class _Hold:
    jobs: frozenset[int]
    steps: int = 0
    hurried: bool = False
    question: Question | None = None


class Holds:
    """vLLM's thread only.

    Args:
        ask: hands the reactor a question about jobs; those that have not been copied go first from then on,
            and are dropped if storage does not let them in time. The second argument says whether that time
            is short, since a request waits for the blocks.
    """

    def __init__(self, ask: Callable[[frozenset[int], bool], Question]) -> None:
        self._ask = ask
        self._pressed = True
        self._holds: dict[str, _Hold] = {}
        self._newest = -1  # store job handed in so far; vLLM numbers jobs upwards

    def submitted(self, job_id: int) -> None:
        """A store job was handed in."""
        self._newest = max(self._newest, job_id)

    def add(self, held: Mapping[str, frozenset[int]], *, pressed: bool) -> None:
        """From the scheduler, at the beginning of a step. ``pressed``: memory is short (see StepNote)."""
        self._pressed = pressed
        for request_id, jobs in held.items():
            self._holds[request_id] = _Hold(jobs)

    def take_released(self) -> set[str]:
        """At the end of each step: requests whose blocks may go."""
        released = set()
        for request_id, hold in self._holds.items():
            hold.steps += 1
            if hold.question is None:
                # vLLM hands the jobs of a step in at the beginning of the next.
                if hold.steps < 2 or any(job > self._newest for job in hold.jobs):
                    continue
                hold.question, hold.hurried = self._ask(hold.jobs, self._pressed), self._pressed
            elif self._pressed and not hold.hurried:
                hold.question, hold.hurried = self._ask(hold.jobs, True), True
            if hold.question.answered.is_set():
                released.add(request_id)
        for request_id in released:
            del self._holds[request_id]
        return released
