"""What is known of the ranks' memories, against plain sets of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.plan import Moves
from py_kvcache.scheduler.residency import Residency

BLOCKS = [("space", bytes([n])) for n in range(6)]
_some = st.lists(st.sampled_from(BLOCKS), max_size=4)


@given(st.lists(st.dictionaries(st.integers(0, 2), st.tuples(_some, _some), max_size=3), max_size=12))
def test_a_block_counts_once_enough_ranks_have_it(steps):
    residency, plain = Residency(), {rank: set() for rank in range(3)}
    for step in steps:
        moves = {
            rank: Moves(tuple(came), tuple(block for block in left if block not in came))
            for rank, (came, left) in step.items()
        }
        for rank, (came, left) in moves.items():
            plain[rank] = (plain[rank] - set(left)) | set(came)
        residency.heard(moves)
        for ranks in (1, 2, 3):
            expected = [sum(block in mine for mine in plain.values()) >= ranks for block in BLOCKS]
            assert residency.count(BLOCKS, ranks) == sum(expected)


def test_a_block_of_another_namespace_is_another_block():
    residency = Residency()
    residency.heard({0: Moves((("a", b"x"),), ())})
    assert residency.count([("a", b"x"), ("b", b"x")], 1) == 1
