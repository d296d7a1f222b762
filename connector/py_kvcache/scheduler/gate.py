"""The break-even gate: whether a hit of this engine is loaded or computed, and what that rests on.

The decision itself is policy.decide; here its inputs are kept: rates and backlog (pace.py), the time to
compute a prompt (calibrated, or learned by prefill.py), and which load may be tried for the sake of knowing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from py_kvcache.curves import Curve
from py_kvcache.models import Source, Thresholds
from py_kvcache.scheduler.pace import LoadPace
from py_kvcache.scheduler.policy import Decision, GateInputs, Mode, Reason, decide
from py_kvcache.scheduler.prefill import Prefill, PrefillLearner

log = logging.getLogger("vllm.py_kvcache.gate")

# While nothing is known, one request in so many is loaded to learn.
PROBE_EVERY = 20
# What was measured so long ago may be otherwise now. To find out costs a load that is probably slower than
# computing: all of them together at most this share of the time spent computing.
STALE_S, PROBE_SHARE = 30.0, 0.01
PAYS_FOR_S = 5.0  # how long it is taken for granted that some prefix pays, or that none does


@dataclass(frozen=True, slots=True)
class Hit:
    """What a look-up found; tokens of a prompt's prefix.

    Attributes:
        gpu_tokens: the engine's own prefix cache has so many.
        hit_tokens: it and our cache have so many together.
        memory_blocks: so many of them need no read.
    """

    prompt_tokens: int
    gpu_tokens: int
    hit_tokens: int
    memory_blocks: int = 0


class Gate:
    """One per engine; vLLM's scheduler thread only.

    Args:
        thresholds: what the file says at a time.
    """

    def __init__(
        self, mode: Mode, block_tokens: int, limit: float, thresholds: Callable[[float], Thresholds | None]
    ) -> None:
        self.mode = mode
        self.pace, self.prefill = LoadPace(limit), PrefillLearner()
        self._block_tokens, self._thresholds = block_tokens, thresholds
        self._unknown = 0  # requests met while nothing was known
        self._staked_s = 0.0
        self._said = ""
        self._pays, self._pays_until = True, 0.0
        self._calibrated: tuple[Thresholds | None, Curve | None] = None, None

    def judge(self, hit: Hit, before: Decision | None, now: float) -> Decision:
        """Load all of it, or nothing.

        Args:
            before: the answer for the same request in an earlier step, while it waited.
        """
        if self.mode is Mode.OFF:
            return decide(self.mode, self._inputs(hit, now, None))
        inputs = self._inputs(hit, now, self._thresholds(now))
        decision = decide(self.mode, inputs)
        if not decision.load and self._may_probe(decision, before, now):
            decision = decide(self.mode, replace(inputs, probe=True))
        log.debug("py-kvcache: %s for %s: %s", decision, hit, inputs)
        return decision

    def is_likely(self, hit: Hit, now: float) -> bool:
        """Whether a request that waits would load this, as things are; reading it would tell the rate."""
        decision = decide(self.mode, self._inputs(hit, now, self._thresholds(now)))
        return decision.load or (decision.reason is Reason.UNKNOWN and decision.load_s is None)

    def can_pay(self, longest: int, now: float) -> bool:
        """Whether any prefix of up to so many tokens would be loaded, as things are; True while unknown."""
        if now >= self._pays_until:
            self._pays_until = now + PAYS_FOR_S
            before, self._pays = self._pays, self._find_payer(longest, now)
            if self._pays is not before:
                log.info(
                    "py-kvcache: %s of up to %d tokens is loaded sooner than it is computed (%.2f GB/s)",
                    "a prefix" if self._pays else "no prefix", longest, self.pace.rate / 1e9,
                )  # fmt: skip
        return self._pays

    def _find_payer(self, longest: int, now: float) -> bool:
        file = self._thresholds(now)
        tokens = self._block_tokens
        while tokens <= longest:
            # The whole of a prompt as its hit: nothing pays more.
            inputs = self._inputs(Hit(tokens, 0, tokens), now, file)
            decision = decide(self.mode, replace(inputs, queued_bytes=0))  # a backlog passes
            if decision.load or decision.reason is Reason.UNKNOWN:
                return True
            tokens = longest if tokens < longest < 2 * tokens else 2 * tokens
        return False

    def counted(self, decision: Decision) -> None:
        """The request was admitted with this decision; once for each."""
        if decision.reason is Reason.PROBE and decision.load_s is not None and decision.saved_s is not None:
            self._staked_s += max(0.0, decision.load_s - decision.saved_s)

    def load_bytes(self, hit: Hit) -> int:
        """To be read, per rank: whole blocks, also where the engine has a part of the first."""
        first, last = hit.gpu_tokens // self._block_tokens, -(-hit.hit_tokens // self._block_tokens)
        return max(0, last - first - hit.memory_blocks) * self.pace.block_bytes

    def _inputs(self, hit: Hit, now: float, file: Thresholds | None) -> GateInputs:
        prefill: Curve | Prefill | None = None
        if self.mode is Mode.ADAPTIVE:
            if file is not self._calibrated[0]:
                self._calibrated = file, file.curve() if file else None
            prefill = self._calibrated[1] or self.prefill.model()
            self._say("calibrated" if self._calibrated[1] else str(prefill or ""))
        load_bytes = self.load_bytes(hit)
        source: Source = "disk" if load_bytes or not hit.memory_blocks else "memory"
        return GateInputs(
            hit.prompt_tokens,
            hit.gpu_tokens,
            hit.hit_tokens,
            load_bytes,
            self.pace.rate,
            self.pace.queued_bytes(now),
            self.pace.latency_s,
            prefill,
            file.thresholds.get(source) if file else None,
        )

    def _may_probe(self, decision: Decision, before: Decision | None, now: float) -> bool:
        if before is not None and before.reason in (Reason.PROBE, Reason.UNKNOWN):
            return before.reason is Reason.PROBE
        if decision.reason is Reason.UNKNOWN:
            self._unknown += 1
            return self._unknown % PROBE_EVERY == 1
        if decision.reason is not Reason.SLOWER or now - self.pace.measured_at < STALE_S:
            return False
        loss = (decision.load_s or 0.0) - (decision.saved_s or 0.0)
        return self._staked_s + loss <= PROBE_SHARE * self.prefill.seconds

    def _say(self, source: str) -> None:
        """Once, when it becomes known or another source takes over."""
        kind = source.split(" ", 1)[0]
        if kind and kind != self._said:
            self._said = kind
            log.info("py-kvcache: the time to compute a prompt is %s", source)
