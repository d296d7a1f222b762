"""Which lengths a calibration visits: a grid, then where the curves cross, then what is least sure."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from py_kvcache.calibrate.visits import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Seen,
    end_of_storage,
    first_grid,
    next_prefix,
    suffix_points,
)

BLOCK = 256


def crossing(seen: dict[int, Seen]) -> int | None:
    """The shortest measured length from which loading is faster at all longer ones; None if it never is."""
    least = None
    for prefix in sorted(seen, reverse=True):
        if seen[prefix].rounds and seen[prefix].gain <= 0:
            break
        least = prefix
    return least


class World:
    """Two true curves, and noise; visits take what they take."""

    def __init__(self, load: Callable[[int], float], noise: float, seed: int = 0) -> None:
        self._load, self._noise, self._random = load, noise, random.Random(seed)
        self.seen: dict[int, Seen] = {}
        self.visits: list[int] = []
        self.costs: dict[int, float] = {}

    @staticmethod
    def compute(tokens: int) -> float:
        return 0.01 + 1e-4 * tokens + 2e-9 * tokens**2

    def visit(self, prefix: int) -> float:
        self.visits.append(prefix)
        noisy = [
            curve(prefix) * (1 + self._noise * self._random.gauss(0, 1))
            for curve in (self.compute, self._load)
        ]
        before = self.seen.get(prefix, Seen((), ()))
        self.seen[prefix] = Seen((*before.compute, noisy[0]), (*before.load, noisy[1]))
        self.costs[prefix] = sum(noisy)
        return self.costs[prefix]

    def run(self, longest: int = 32_768, seconds: float = 1e9) -> None:
        grid = first_grid(BLOCK, longest)
        while (prefix := next_prefix(self.seen, grid, BLOCK, seconds, self.costs)) is not None:
            seconds -= self.visit(prefix)
            assert len(self.visits) < 300


def flat_load(tokens: int) -> float:
    """Crosses at about 9,300 tokens."""
    return 0.5 + 6e-5 * tokens


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_the_crossing_is_bracketed_narrowly(noise: float, seed: int):
    world = World(flat_load, noise, seed)
    world.run()
    truth = next(t for t in range(0, 32_768, BLOCK) if flat_load(t) < world.compute(t))
    found = crossing(world.seen)
    assert found is not None and abs(found - truth) <= (0.1 + 4 * noise) * truth + BLOCK
    assert all(LEAST_ROUNDS <= seen.rounds <= MOST_ROUNDS for seen in world.seen.values())


def test_most_visits_are_where_the_curves_are_close():
    world = World(flat_load, 0.05, 1)
    world.run()
    near = [prefix for prefix in world.visits if 6_000 < prefix < 14_000]
    assert len(near) > len(world.visits) / 3


def test_where_loading_never_or_always_pays_the_grid_is_enough():
    for load in (lambda tokens: 10.0 + 1e-3 * tokens, lambda tokens: 1e-4 + 1e-6 * tokens):
        world = World(load, 0.01)
        world.run()
        assert set(world.seen) == set(first_grid(BLOCK, 32_768))
        assert len(world.visits) == LEAST_ROUNDS * len(world.seen)
    assert crossing(world.seen) == BLOCK


def test_no_visit_is_begun_that_the_time_would_not_do_for():
    world = World(flat_load, 0.01)
    world.costs = {BLOCK: 0.6, 32_768: 8.0}
    world.run(seconds=20)
    assert sum(world.costs[prefix] for prefix in world.visits) <= 21
    assert not World(flat_load, 0.01).seen
    assert next_prefix({}, (BLOCK,), BLOCK, 0.5, {BLOCK: 0.6}) is None


def test_memory_gets_its_turn_after_an_engine_that_starts_as_slowly_as_the_first():
    assert end_of_storage(now=40, last=100, start_s=20, share=0.25) == 40 + 0.75 * 40
    assert end_of_storage(now=80, last=100, start_s=80, share=0.25) == 90, "half of what is left at least"
    assert end_of_storage(now=120, last=100, start_s=80, share=0.25) == 120


def test_the_grid_goes_from_one_block_to_the_longest_prefix_that_fits():
    assert first_grid(256, 255) == ()
    assert first_grid(256, 256) == (256,)
    assert first_grid(256, 800) == (256, 512, 768)
    grid = first_grid(256, 131_072)
    assert grid[0] == 256 and grid[-1] == 131_072 and len(grid) == 6
    assert all(prefix % 256 == 0 for prefix in grid)


def test_suffixes_are_checked_at_lengths_that_were_measured_and_fit():
    world = World(flat_load, 0.0)
    world.run()
    points = suffix_points(world.seen, BLOCK, 32_768)
    assert 1 <= len(points) <= 3
    assert all(
        prefix in world.seen and suffix >= BLOCK and prefix + suffix <= 32_768 for prefix, suffix in points
    )
    assert suffix_points({256: Seen((1.0,), (1.0,))}, BLOCK, 32_768) == ()
