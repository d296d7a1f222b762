"""How long this engine takes to compute a prompt, learned from the steps that it makes anyway.

A step that computes n tokens whose squares of positions add up to q takes c + a n + b q seconds: a constant,
what each token costs, and what each costs for every token before it (attention).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Span = tuple[int, int]  # tokens of one request before and after a step

# Steps that hold no prompt say nothing of prompts: a few tokens take as long as the weights take to be read.
LEAST_TOKENS = 64
LEAST_STEPS = 4
_REMEMBERED = 256
_OUTLIER = 2.0  # the first steps of a process take several times as long as all later ones


@dataclass(frozen=True, slots=True)
class Prefill:
    """f: seconds to compute a prompt of so many tokens of which nothing is known. Monotone, 0 at 0."""

    per_token: float
    per_square: float
    steps: int  # that it was learned from
    longest: int  # prompt among them, in tokens

    def __call__(self, tokens: float) -> float:
        return self.per_token * tokens + self.per_square * tokens * tokens

    def __str__(self) -> str:
        return f"learned from {self.steps} steps, prompts of up to {self.longest} tokens"


class PrefillLearner:
    """One per engine. Times are any clock's, in seconds."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, float, float]] = deque(maxlen=_REMEMBERED)  # tokens, squares, seconds
        self._longest = self._largest = 0
        self._fitted: Prefill | None = None
        self._stale = False
        self.seconds = 0.0  # of all steps with prompts
        self._began: dict[int, tuple[float, tuple[Span, ...]]] = {}
        self._ended = 0.0

    def step_began(self, number: int, spans: Iterable[Span], now: float) -> None:
        """A step was put together. vLLM may have made the one before and not have its output yet."""
        self._began[number] = now, tuple(spans)

    def step_ended(self, number: int, now: float) -> None:
        """Its output is here. Steps end in their order."""
        known = self._began.pop(number, None)
        before, self._ended = self._ended, now
        for old in [step for step in self._began if step < number]:
            del self._began[old]
        if known is not None:
            self.observe(known[1], now - max(known[0], before))

    def observe(self, spans: Sequence[Span], seconds: float) -> None:
        """One step took so long."""
        if seconds <= 0 or not any(end - begin >= LEAST_TOKENS for begin, end in spans):
            return
        tokens = sum(end - begin for begin, end in spans)
        squares = sum(float(end) * end - float(begin) * begin for begin, end in spans)
        self._rows.append((tokens, squares, seconds))
        self._longest = max(self._longest, *(end for _, end in spans))
        self._largest = max(self._largest, tokens)
        self.seconds += seconds
        self._stale = True

    def model(self) -> Prefill | None:
        """None until there is enough to go by."""
        if self._stale and len(self._rows) >= LEAST_STEPS:
            self._fitted, self._stale = self._fit(), False
        return self._fitted

    def _fit(self) -> Prefill:
        rows = np.array(self._rows)
        values = _solve(rows)
        ratios = rows[:, 2] / np.maximum(_times(rows, values), 1e-9)
        usual = ratios <= _OUTLIER * np.median(ratios)
        if not usual.all():
            values = _solve(rows[usual])
        constant, per_token, per_square = (float(value) for value in values)
        # A prompt of several steps pays the constant for each.
        per_token += constant / self._largest
        return Prefill(per_token, per_square, len(self._rows), self._longest)


def _times(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    columns = np.column_stack([np.ones(len(rows)), rows[:, :2]])
    return np.asarray(columns @ values)


def _solve(rows: np.ndarray) -> np.ndarray:
    """Constant, cost of a token and of a square that fit best, none negative; errors count relatively."""
    columns = np.column_stack([np.ones(len(rows)), rows[:, :2]]) / rows[:, 2:]
    scale = np.maximum(columns.max(axis=0), 1e-30)
    best, least = np.zeros(3), np.inf
    # Of the seven sets of unknowns that may differ from zero, the best one without a negative.
    for count in (1, 2, 3):
        for some in combinations(range(3), count):
            chosen = columns[:, some] / scale[list(some)]
            found = np.linalg.lstsq(chosen, np.ones(len(rows)), rcond=None)[0]
            error = float(((chosen @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(some)] = found / scale[list(some)]
    return best
