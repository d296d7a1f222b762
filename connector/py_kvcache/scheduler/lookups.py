"""Which blocks a request can load: asked of the file system by the prober's thread, answered steps later.

No method touches the file system, and no request waits for it longer than lookup_deadline_s.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping

from py_kvcache import metrics
from py_kvcache.scheduler.known import Known
from py_kvcache.scheduler.lookup import Presence
from py_kvcache.scheduler.probe import ChainQuestion, Prober
from py_kvcache.scheduler.requests import RequestState
from py_kvcache.vllm_api import LookupResult

# A negative answer holds so long for the same request, which may be asked every step while it waits.
ABSENT_FOR_S = 1.0
# A step without computation waits so long at most for an answer. vLLM would make hundreds of such steps, and
# each system call of a probe's thread would have to win the interpreter back from them. Short, since a step
# with a long look-up has taken 5 to 9 ms already; a local file system answers in less.
IDLE_WAIT_S = 0.001
# While the file system owes an answer, so often one request may ask and wait all the same.
HUNG_RETRY_S = 5.0


class Lookups:
    """One per engine; called by vLLM's scheduler thread only.

    Args:
        requests: by id; the manager's.
        parts: of a block, all of which must be there.
    """

    def __init__(
        self, known: Known, requests: Mapping[str, RequestState], prober: Prober, parts: tuple[int, ...]
    ) -> None:
        self._known, self._requests, self._prober, self._parts = known, requests, prober, parts
        self._config, self._index, self._adapters = known.config, known.index, known.adapters
        self._now = 0.0
        self._asking: dict[int, str] = {}  # ticket -> request
        self._tickets = itertools.count(1)
        self.answered = 0  # questions, so far
        # The file system owes an answer for longer than a look-up may take: nobody waits for it then.
        self._hung = False
        self._ask_again_at = 0.0

    def begin(self, state: RequestState | None, local_tokens: int, now: float) -> None:
        """See Manager.begin_lookup."""
        self.take_answers(now)
        if state is None:
            return
        state.local_tokens = local_tokens
        if state.space is None:
            state.space = self._known.names.space_of(state.adapter)
        state.may_load = state.load and self._adapters.may_load(state.adapter)
        state.unknown.clear()
        state.deferred = False
        self._known.postponed.forget(state)
        if state.waits_since is not None and self._now - state.waits_since >= self._config.lookup_deadline_s:
            state.gave_up = True
            if state.ticket is not None and not self._hung:
                self._hung, self._ask_again_at = True, self._now + HUNG_RETRY_S
        elif self._hung and state.ticket is None:
            # One request in a while may still ask and wait: only one thread or one folder may hang.
            state.gave_up = self._now < self._ask_again_at
            if not state.gave_up:
                self._ask_again_at = self._now + HUNG_RETRY_S

    def lookup(self, state: RequestState, key: bytes) -> LookupResult:
        """See Manager.lookup."""
        if not state.may_load:
            return LookupResult.MISS
        space = state.space
        if space is None:
            # An adapter that no worker has in memory is read by the step that computes with it.
            in_vain = state.adapter is not None and self._adapters.is_in_vain(state.adapter)
            return LookupResult.MISS if state.gave_up or in_vain else self._later(state)
        presence = self._index.presence((space, key), self._now)
        if presence is Presence.SEEN:
            return LookupResult.HIT
        if presence is Presence.BANNED or state.gave_up:
            return LookupResult.MISS
        if presence is Presence.STORING:
            state.deferred = True
            return LookupResult.HIT_PENDING
        stale = self._now >= state.absent_until
        if state.ticket is None and (stale or key not in state.absent):
            state.unknown.append(key)
        # While a stale no is asked again it still stands: a request at the head of the queue is
        # looked up in every step and must not wait each time.
        return LookupResult.MISS if key in state.absent else self._later(state)

    @staticmethod
    def _later(state: RequestState) -> LookupResult:
        state.deferred = True
        return LookupResult.RETRY

    def end(self, request_id: str, state: RequestState, tokens: int | None) -> None:
        """See Manager.end_lookup."""
        if tokens is not None or not state.deferred:
            # Without a deferred block vLLM waits for something else, such as a load of the same blocks
            # by another request, which has a deadline of its own.
            state.waits_since = None
        elif state.waits_since is None:
            state.waits_since = self._now
        if state.unknown and state.ticket is None and state.space is not None:
            self._ask(request_id, state, state.unknown)

    def _ask(self, request_id: str, state: RequestState, keys: list[bytes]) -> None:
        assert state.space is not None
        state.ticket = next(self._tickets)
        state.asked = list(keys)
        self._asking[state.ticket] = request_id
        self._prober.ask(
            ChainQuestion(state.ticket, self._config.root_path, state.space, self._parts, state.asked)
        )

    def foresee(self, request_id: str, state: RequestState, keys: list[bytes], now: float) -> None:
        """Ask about blocks of a request that vLLM has not asked about yet."""
        stale = now >= state.absent_until
        if state.ticket is not None or self._hung or (keys[0] in state.absent and not stale):
            return
        self._ask(request_id, state, keys)

    def wait_if_asking(self) -> None:
        """See Manager.wait_if_asking."""
        if self._asking and not self._hung:
            self._prober.wait(IDLE_WAIT_S)

    def forget(self, state: RequestState) -> None:
        """The request is over: nobody wants its answer."""
        if state.ticket is not None:
            self._asking.pop(state.ticket, None)

    def clear(self) -> None:
        """What was asked so far is of no use any more."""
        self._asking.clear()

    def take_answers(self, now: float) -> None:
        """What the file system has said since the last call."""
        self._now = now
        for answer in self._prober.answers():
            self._hung = False
            self.answered += 1
            if answer.code:
                self._known.count(metrics.PROBE_ERRORS, 1, errno.errorcode.get(answer.code, "other"))
            state = self._requests.get(self._asking.pop(answer.ticket, ""))
            if state is None or state.ticket != answer.ticket or state.space is None:
                continue
            space = state.space
            self._index.saw(((space, key) for key in state.asked[: answer.present]), self._now)
            state.absent = set(state.asked[answer.present :])
            state.absent_until = self._now + ABSENT_FOR_S
            # The file system has answered. How long vLLM then takes to ask again (its steps may be full with
            # other requests) is not a wait for us.
            state.ticket, state.asked, state.waits_since = None, [], None
