"""Break-even rules over whole tokens, exact: every prefix is looked at.

f[x], seconds to compute a prompt of x tokens; g[x], seconds until the first token when x tokens are cached.
Both are tables with an entry for each number of tokens from 0 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from py_kvcache.curves import Curve
from py_kvcache.errors import KvCacheError

Seconds = NDArray[np.float64]


def tabulate(curve: Curve, longest: int) -> Seconds:
    """Its value at 0, 1, ... ``longest`` tokens; shape (longest + 1,)."""
    tokens = np.arange(longest + 1, dtype=np.float64)
    values = np.empty_like(tokens)
    # searchsorted tells for each knot the first whole number at or beyond it.
    edges = [0, *np.searchsorted(tokens, [point[0] for point in curve.points]), longest + 1]
    for number, (first, end) in enumerate(pairwise(edges)):
        values[first:end] = curve.piece(number, tokens[first:end])
    return np.maximum(values, 0.0)


def paper_threshold(f: Seconds, g: Seconds, prompt: int, start: int = 0) -> int | None:
    """Least prefix P, from ``start`` on, with g(P) + f(prompt - P) < f(prompt); None if none pays."""
    if start > prompt:
        return None
    rest = f[: prompt - start + 1][::-1]
    pays = g[start : prompt + 1] + rest < f[prompt]
    return start + int(np.argmax(pays)) if pays.any() else None


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where loading a prefix begins to pay.

    Attributes:
        least: prefix from which on it pays up to the last length; None if it does not pay there.
        turns: how often that changes over the lengths; more than 1 is odd.
    """

    least: int | None
    turns: int


def exact_threshold(f: Seconds, g: Seconds, start: int, end: int) -> Crossing:
    """Least P with g(Q) < f(Q) for all Q from P to ``end``, P from ``start`` on."""
    pays = g[start : end + 1] < f[start : end + 1]
    turns = int(np.count_nonzero(pays[1:] != pays[:-1]))
    if not pays.size or not pays[-1]:
        return Crossing(None, turns)
    does_not = np.flatnonzero(~pays)
    return Crossing(start + (int(does_not[-1]) + 1 if does_not.size else 0), turns)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of storage, for a prefix of so many tokens.

    Attributes:
        needed: with which loading takes as long as computing; None if not even an endless one would do.
        had: what the transfer got.
    """

    tokens: int
    kv_bytes: int
    needed: float | None
    had: float


def bandwidth(tokens: int, kv_bytes: int, f_s: float, g_s: float, copy_s: float) -> Bandwidth:
    """Needed is KV bytes / (f - (g - copy)).

    Args:
        f_s, g_s, copy_s: seconds to compute so many tokens; to the first token with them cached; of their
            transfer.
    Raises:
        KvCacheError: no bytes were moved, or in no time.
    """
    if kv_bytes <= 0 or copy_s <= 0:
        raise KvCacheError(
            f"a load of {tokens:,} tokens moved {kv_bytes:,} bytes in {copy_s:.4g} s: that is no bandwidth; "
            "measure prefixes of a block or more"
        )
    spare = f_s - (g_s - copy_s)
    return Bandwidth(tokens, kv_bytes, kv_bytes / spare if spare > 0 else None, kv_bytes / copy_s)
