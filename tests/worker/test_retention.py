"""Policies of the memory tier: what each keeps, beside a plain reference, on traces that matter."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_kvcache.worker.lirs import Lirs
from py_kvcache.worker.retention import Arc, Lru, Retention, make_retention

KINDS = ("lru", "arc", "lirs")


def key(number: int) -> str:
    return f"{number:02d}"


def use(policy: Retention, block: str) -> bool:
    """One use, as the tier makes it. Returns whether it was a hit."""
    if policy.hit(block):
        return True
    if len(policy) >= policy.capacity:
        victim = policy.evict(block)
        assert victim is not None
        if victim == block:
            return False
    policy.admit(block)
    return False


def misses(policy: Retention, trace: Iterable[int]) -> list[int]:
    return [number for number in trace if not use(policy, key(number))]


class PlainLru:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.order = capacity, list[int]()

    def use(self, x: int) -> bool:
        hit = x in self.order
        if hit:
            self.order.remove(x)
        elif len(self.order) == self.capacity:
            self.order.pop(0)
        self.order.append(x)
        return hit


class PlainArc:
    """Figure 4 of the paper, line by line; lists end with the most recently used."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = list[int](), list[int](), list[int](), list[int]()

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def use(self, x: int) -> bool:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:
            self.p = min(c, self.p + max(len(b2) / len(b1), 1))
            self.replace(x)
            b1.remove(x)
            t2.append(x)
            return False
        if x in b2:
            self.p = max(0, self.p - max(len(b1) / len(b2), 1))
            self.replace(x)
            b2.remove(x)
            t2.append(x)
            return False
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.pop(0)
                self.replace(x)
            else:
                t1.pop(0)
        else:
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if total >= c:
                if total == 2 * c:
                    b2.pop(0)
                self.replace(x)
        t1.append(x)
        return False


class PlainLirs:
    """The paper's stack S and list Q as lists, last used at the end; memory bounded as ours."""

    def __init__(self, c: int) -> None:
        self.c, self.most = c, c - max(1, c // 32)
        self.s, self.q = list[int](), list[int]()
        self.steady = set[int]()

    def prune(self) -> None:
        while self.s and self.s[0] not in self.steady:
            self.s.pop(0)

    def promote(self, x: int) -> None:
        self.steady.add(x)
        if x in self.s:
            self.s.remove(x)
        self.s.append(x)
        if len(self.steady) > self.most:
            bottom = next(y for y in self.s if y in self.steady)
            self.steady.remove(bottom)
            self.q.append(bottom)
        self.prune()

    def use(self, x: int) -> bool:
        if x in self.steady:
            self.s.remove(x)
            self.s.append(x)
            self.prune()
            return True
        if x in self.q:
            self.q.remove(x)
            if x in self.s:
                self.promote(x)
            else:
                self.s.append(x)
                self.q.append(x)
            return True
        if len(self.steady) + len(self.q) == self.c:
            self.q.pop(0)
        if x in self.s or len(self.steady) < self.most:
            self.promote(x)
        else:
            self.s.append(x)
            self.q.append(x)
        if len(self.s) > 3 * self.c:
            gone = [y for y in self.s if y not in self.steady and y not in self.q]
            for y in gone[: len(self.s) - 2 * self.c]:
                self.s.remove(y)
        return False


PLAIN = {"lru": PlainLru, "arc": PlainArc, "lirs": PlainLirs}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(2, 12), trace=st.lists(st.integers(0, 20), max_size=300))
def test_each_hits_and_misses_where_a_plain_reference_does(
    kind: str, capacity: int, trace: list[int]
) -> None:
    policy, plain = make_retention(kind, capacity), PLAIN[kind](capacity)
    assert [use(policy, key(x)) for x in trace] == [plain.use(x) for x in trace]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(
    capacity=st.integers(2, 10),
    steps=st.lists(st.tuples(st.sampled_from("udpex"), st.integers(0, 25)), max_size=200),
)
def test_whatever_comes_residents_are_those_admitted_and_not_given_up_and_memories_are_bounded(
    kind: str, capacity: int, steps: list[tuple[str, int]]
) -> None:
    """Uses, drops, evictions with pinned blocks, and expectations, in any order."""
    policy, resident = make_retention(kind, capacity), set[str]()
    for what, number in steps:
        block = key(number)
        if what == "u":
            assert policy.hit(block) == (block in resident)
            if block not in resident:
                if len(resident) == capacity:
                    victim = policy.evict(block)
                    assert victim in resident | {block}
                    if victim == block:
                        continue
                    resident.discard(victim)
                policy.admit(block)
                resident.add(block)
        elif what == "d":
            policy.drop(block)
            resident.discard(block)
        elif what == "p":
            pinned = {k for k in resident if int(k) % 3 == number % 3}
            victim = policy.evict(None, pinned)
            assert (victim is None) == (resident <= pinned)
            assert victim is None or victim in resident - pinned
            resident.discard(victim or "")
        elif what == "e":
            policy.expect({key(n): n - number for n in range(number, number + 5)})
        else:
            policy.expect({})
        assert len(policy) == len(resident) <= capacity
        assert all((key(n) in policy) == (key(n) in resident) for n in range(26))
        assert getattr(policy, "remembered", 0) <= 3 * capacity


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_admitted_once(kind: str) -> None:
    policy = make_retention(kind, 4)
    policy.admit(key(1))
    with pytest.raises(ValueError, match="resident already"):
        policy.admit(key(1))


def read_share(policy: Retention, trace: Sequence[int], skip: int) -> float:
    """Of the uses behind the first ``skip``, the share that had to be read."""
    misses(policy, trace[:skip])
    return len(misses(policy, trace[skip:])) / (len(trace) - skip)


def test_a_loop_over_twice_the_memory_reads_half_with_lirs_and_all_with_the_others() -> None:
    loop = list(range(400)) * 10
    assert read_share(Lirs(200), loop, 800) <= 0.53
    assert read_share(Lru(200), loop, 800) == 1.0
    assert read_share(Arc(200), loop, 800) == 1.0


@pytest.mark.parametrize("kind", ["arc", "lirs"])
def test_a_scan_leaves_the_hot_blocks_where_they_are(kind: str) -> None:
    policy, generator = make_retention(kind, 100), random.Random(1)
    hot = list(range(80))
    misses(policy, [generator.choice(hot) for _ in range(2000)])
    scanned: list[int] = []
    for number in range(1000, 3000):
        scanned += misses(policy, [number, generator.choice(hot)])
    assert sum(number in hot for number in scanned) <= 40, "of 2,000 uses of hot blocks"


def test_lru_loses_the_hot_blocks_to_a_scan() -> None:
    policy, generator = Lru(100), random.Random(1)
    hot = list(range(80))
    misses(policy, [generator.choice(hot) for _ in range(2000)])
    read = misses(policy, [x for n in range(1000, 3000) for x in (n, generator.choice(hot))])
    assert sum(number in hot for number in read) > 400


def test_what_waits_goes_last_and_of_it_what_is_wanted_last() -> None:
    policy = Lirs(4)
    for number in range(4):
        policy.admit(key(number))
    policy.expect({key(0): 2, key(1): 0, key(3): 1})
    assert policy.evict(key(9)) == key(9), "nobody waits for it, and it is new"
    policy.expect({key(0): 2, key(1): 0, key(2): 3, key(3): 1, key(9): 5})
    assert policy.evict(key(9)) == key(9), "the last of those that somebody waits for"
    policy.expect({key(0): 2, key(1): 7, key(2): 3, key(3): 1, key(9): 5})
    assert policy.evict(key(9)) == key(1)
    policy.expect({key(0): 2, key(3): 1})
    assert policy.evict() == key(2)
    assert policy.evict() == key(0)


def test_with_the_queue_in_sight_a_round_robin_reads_what_nobody_can_avoid() -> None:
    """Documents of 10 blocks in turns, of which the queue shows all: as much stays as the memory holds."""
    policy, documents = Lirs(60), [[key(10 * d + b) for b in range(10)] for d in range(12)]
    read = uses = 0
    for turn in range(12 * 20):
        coming = [documents[(turn + ahead) % 12] for ahead in range(12)]
        policy.expect({block: ahead for ahead, blocks in enumerate(coming) for block in blocks})
        for block in coming[0]:
            hit = use(policy, block)
            if turn >= 24:
                uses, read = uses + 1, read + (not hit)
    assert read / uses <= 0.6


def squeezed(policy: Retention, room: int) -> None:
    """Others take room in between: blocks that the policy never hears of."""
    while len(policy) > policy.capacity - room:
        assert policy.evict() is not None


def test_lirs_keeps_the_same_blocks_of_a_loop_whoever_takes_a_part_of_the_memory_in_each_turn():
    policy = Lirs(64, lent=24)
    loop = range(256)
    reads = 0
    for turn in range(10):
        for number in loop:
            if number % 16 == 0:
                squeezed(policy, 24)
            reads += not use(policy, key(number)) and turn >= 5
    # 40 are left, of which one round's newcomers are given up each time.
    assert 1 - reads / (5 * len(loop)) == pytest.approx(39 / 256, abs=0.01)


def test_lirs_takes_back_what_nobody_asks_for_any_more():
    policy = Lirs(64, lent=48)
    squeezed_for = 5 * 256
    for n in range(20 * 256):
        if n < squeezed_for and n % 16 == 0:
            squeezed(policy, 48)
        use(policy, key(n % 256))
    hits = sum(policy.hit(key(n)) for n in range(256))
    assert hits >= 60


def test_lirs_forgets_a_moment_in_which_others_had_to_take_more_than_their_share():
    policy = Lirs(96, lent=32)
    for n in range(200):
        use(policy, key(n))
    passing = set(policy._passing)
    for _ in range(60):
        assert policy.evict(None, passing) is not None  # all else was being copied
    for n in range(10 * 200):
        if n % 20 == 0:
            squeezed(policy, 32)
        use(policy, key(n % 200))
    assert policy._steady >= 96 - 32 - 3
