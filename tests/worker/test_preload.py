"""Blocks that are read before a load wants them: last of all, given back in time, taken over."""

from __future__ import annotations

import errno
import random
from collections import Counter

import pytest
from worker_doubles import HOLD, file_of, key_of
from worker_world import LOSE

from py_kvcache.worker.jobs import BlockWork
from py_kvcache.worker.preload import Wanted


@pytest.fixture
def shelved(rig):
    """A rig whose memory has ``keep`` slots, ``shelf`` of them for preloads."""

    def make(keep: int = 8, shelf: int = 6, **settings):
        slots = settings.pop("slots", 6)
        return rig(
            slots=slots + keep, tier_slots=keep, preload_slots=shelf,
            memory_tier=settings.pop("policy", "lru"), **settings,
        )  # fmt: skip

    return make


def want(r, *groups: tuple[int, int], held: tuple[int, ...] = ()) -> None:
    """Each group: number of a load that will come (or has: ``held``), and its blocks. Their files exist."""
    r.reactor.want(tuple(Wanted(works(r, number, count), number in held) for number, count in groups))


def works(r, number: int, count: int) -> tuple[BlockWork, ...]:
    found = []
    for n in range(count):
        path = r.path(number, n)
        r.world.files.setdefault(path, file_of((number, n), n))
        found.append(BlockWork(path, key_of((number, n)), n, (number, n)))
    return tuple(found)


def told(r) -> dict[int, int]:
    """By load, how many blocks are in memory, from all that another thread was told so far."""
    r.members = members = getattr(r, "members", set())
    for path, here in r.reactor.take_moves(1 << 30):
        assert (path in members) is not here, "told twice"
        (members.add if here else members.remove)(path)
    assert all(r.reactor._core.tier.has(path) for path in members)
    assert len(members) == len(r.reactor._core.tier)
    return dict(Counter(int(path.split("/")[2]) for path in members))


def reads(r) -> list[str]:
    return [path for op, path in r.world.log if op == "read"]


def fates(r) -> dict[str, int]:
    return {fate: count for fate, count in r.reactor.snapshot().preloads.items() if count}


@pytest.mark.parametrize("adds", [False, True])
def test_what_was_preloaded_is_loaded_without_a_read(shelved, adds):
    r = shelved(adds=adds)
    want(r, (1, 5))
    r.run()
    assert len(reads(r)) == 5 and r.staging.kept == 5 and told(r) == {1: 5}
    assert not r.device.loads, "nothing is copied before somebody asks"
    r.load(1, 5)
    r.run()
    assert len(reads(r)) == 5 and all(r.loaded(1, n) for n in range(5))
    assert fates(r) == {"claimed": 5} and r.reactor.snapshot().without_read == {"memory": 5}
    assert r.staging.kept == 5, "they stay like all that was loaded"
    r.assert_idle()


def test_no_more_is_preloaded_than_the_shelf_holds_and_the_first_wanted_goes_first(shelved):
    r = shelved(keep=8, shelf=4)
    want(r, (1, 3), (2, 3))
    r.run()
    assert reads(r) == [r.path(1, 0), r.path(1, 1), r.path(1, 2), r.path(2, 0)]
    r.load(1, 3)
    r.run()
    assert len(reads(r)) == 6, "claimed blocks make room"
    r.assert_idle()


def test_what_nobody_wants_any_more_is_given_back_at_once(shelved):
    r = shelved()
    want(r, (1, 3), (2, 2))
    r.run()
    want(r, (2, 2))
    r.step()
    assert r.staging.kept == 2 and fates(r) == {"wasted": 3} and told(r) == {2: 2}
    want(r)
    r.step()
    assert r.staging.kept == 0 and fates(r) == {"wasted": 5}
    r.assert_idle()


def test_reads_of_what_nobody_wants_any_more_end_and_nothing_stays(shelved):
    r = shelved(io_depth=2)
    r.world.rule("read", HOLD)
    want(r, (1, 4))
    r.run(10)  # two are read, two are open
    want(r)
    r.run(10)
    r.world.release()
    r.run()
    assert fates(r) == {"cancelled": 2, "wasted": 2} and r.staging.kept == 0
    r.assert_idle()


def test_blocks_that_requests_share_are_read_once(shelved):
    r = shelved()
    want(r, (1, 3))
    works = tuple(BlockWork(r.path(1, n), key_of((1, n)), n, (1, n)) for n in range(3))
    r.reactor.want((Wanted(works), Wanted(works[:2])))
    r.run()
    assert len(reads(r)) == 3 and told(r) == {1: 3}
    r.assert_idle()


def test_loads_go_before_all_that_is_only_open(shelved):
    r = shelved(keep=8, shelf=8, slots=6, io_depth=2, lookahead=8)
    r.world.rule("read", HOLD)
    want(r, (1, 6))
    r.run(5)
    assert len(r.world.held("read")) == 2
    r.load(2, 3)
    r.run(5)
    r.world.release()
    r.run()
    assert r.results[2].failed == () and all(r.loaded(2, n) for n in range(3))
    order = reads(r)
    assert max(order.index(r.path(2, n)) for n in range(3)) < 5, "behind the two that had begun"
    assert fates(r) == {} and r.staging.kept == 8
    r.assert_idle()


@pytest.mark.parametrize("stage", ["read", "openat"])
def test_a_file_that_hangs_is_not_tried_again_and_costs_one_place(shelved, stage):
    r = shelved(keep=8, shelf=8, slots=6, io_depth=4, lookahead=4)
    r.world.rule(stage, LOSE, path=r.path(1, 0))
    want(r, (1, 1))
    r.run(5)
    for n in range(2, 30):
        r.load(n, 2)
        want(r, (1, 1), (n, 1))
        r.run(10)
        assert r.results[n].failed == ()
    assert sum(op == stage and path == r.path(1, 0) for op, path in r.world.log) == 1


def test_what_was_kept_for_a_load_that_gave_up_goes_too(shelved):
    r = shelved()
    r.world.rule("read", HOLD)
    want(r, (1, 2))
    r.run(5)
    r.load(1, 2, seconds=1.0)
    r.run(5)
    want(r)
    r.run(3)
    r.step(2.0)
    r.run(3)
    assert 1 in r.results
    r.world.release()
    r.run()
    assert r.staging.kept == 0
    r.assert_idle()


def test_loads_that_keep_coming_do_not_keep_preloads_from_their_end(shelved):
    r = shelved(keep=8, shelf=8, slots=6)
    want(r, (1, 4))
    for n in range(2, 40):
        r.load(n, 1)
        r.run(4)
    assert sum(path.startswith("/cache/1/") for path in reads(r)) == 4 and told(r)[1] == 4
    r.run()
    r.assert_idle()


def test_a_bad_file_is_left_alone_for_a_minute(shelved):
    r = shelved()
    r.world.rule("read", -errno.EIO, path="/cache/1/")
    for n in range(10):
        want(r, (1, 3), (100 + n, 1))
        r.run(8)
    bad = [path for path in reads(r) if path.startswith("/cache/1/")]
    assert len(bad) == 3
    r.world.release()
    r.clock.now += 61
    want(r, (1, 3))
    r.run()
    assert told(r) == {1: 3}
    r.assert_idle()


def test_what_was_given_up_for_another_is_read_again_and_told_right(shelved):
    r = shelved(keep=4, shelf=2)
    r.load(1, 2)
    r.run()
    want(r, (1, 2))
    r.run(5)
    assert told(r) == {1: 2}
    r.load(2, 4)
    r.run()
    assert told(r) == {1: 2, 2: 2} and all(r.reactor._core.tier.has(r.path(1, n)) for n in range(2))
    r.assert_idle()


def test_what_is_wanted_is_not_given_up_for_what_is_wanted_later(shelved):
    r = shelved(keep=4, shelf=4)
    r.load(1, 4)
    r.run()
    want(r, (1, 4), (2, 4))
    r.run(200)
    assert len(reads(r)) == 4 and told(r) == {1: 4}
    r.assert_idle()


def test_a_load_takes_a_read_over_that_is_under_way(shelved):
    r = shelved()
    r.world.rule("read", HOLD)
    want(r, (1, 3))
    r.run(5)
    r.load(1, 3)
    r.run(5)
    r.world.release()
    r.run()
    assert len(reads(r)) == 3 and all(r.loaded(1, n) for n in range(3))
    assert fates(r) == {"claimed": 3}
    r.assert_idle()


def test_what_a_load_has_had_is_not_read_again_for_it_and_what_it_has_not_had_yet_stays(shelved):
    r = shelved(keep=3, shelf=3, slots=6, io_depth=2)
    want(r, (1, 3))
    r.run()
    r.world.rule("copy_in", HOLD)
    r.load(1, 2)
    want(r, (1, 3), (2, 1), held=(1,))
    r.run(10)
    assert told(r) == {1: 1, 2: 1}, "its last block, and one of those who wait"
    r.world.release()
    r.run()
    r.load(3, 3)  # nothing of the first load's is worth keeping
    r.run()
    want(r, (1, 3), held=(1,))
    r.run()
    assert Counter(reads(r))[r.path(1, 0)] == 1 and fates(r).get("wasted", 0) == 1, "the one of 2"
    r.assert_idle()


def test_what_a_load_has_used_is_not_kept_as_if_somebody_waited_for_it(shelved):
    r = shelved(keep=8, shelf=2, policy="lirs")
    r.load(1, 7)
    r.run()
    want(r, (2, 5), held=(2,))
    r.load(2, 5)
    r.run()
    assert told(r)[1] == 7, "the new ones pass through the one place that is left"
    want(r, (2, 5), (3, 1), held=(2,))
    r.run()
    assert told(r) == {1: 7, 3: 1}
    r.assert_idle()


def test_what_a_load_will_use_is_not_given_up_before_it_has_come(shelved):
    r = shelved(keep=12, shelf=6, policy="lirs")
    r.reactor._core.tier._retention._most_steady = 6  # as preloads have left it
    r.load(1, 6)
    r.load(2, 6)
    r.run()
    want(r, (2, 6), (3, 6), held=(2,))
    r.run()  # the note of the step; the load comes after its forward was launched
    r.again(4, of=2, count=6)
    r.run()
    assert max(Counter(reads(r)).values()) == 1 and told(r)[3] == 6
    r.assert_idle()


def test_a_prefix_that_somebody_waits_for_stays_when_a_load_has_used_it(shelved):
    r = shelved(keep=12, shelf=6, policy="lirs")
    r.load(9, 12)
    r.run()
    both = works(r, 1, 6), works(r, 2, 6)
    r.reactor.want((Wanted(both[0]), Wanted(both[0] + both[1])))
    r.run()
    r.reactor.want((Wanted(both[0], held=True), Wanted(both[0] + both[1])))
    r.again(50, of=1, count=6)
    r.run()
    r.reactor.want((Wanted(both[0] + both[1]),))
    r.run()
    r.again(51, of=1, count=6)
    r.run()
    assert max(Counter(reads(r)).values()) == 1
    r.assert_idle()


def test_a_load_that_wants_an_opened_file_makes_it_urgent(shelved):
    r = shelved(keep=8, shelf=8, slots=6, io_depth=1, lookahead=8)
    r.world.rule("read", HOLD)
    want(r, (1, 4))
    r.run(5)  # one is read, the others are open
    r.load(1, 4)
    r.load(2, 4)
    r.run(5)
    r.world.release()
    r.run(100)
    assert reads(r)[:4] == [r.path(1, n) for n in range(4)]
    assert all(r.loaded(job, n) for job in (1, 2) for n in range(4))
    r.assert_idle()


@pytest.mark.parametrize("stage", ["openat", "read"])
def test_a_preload_that_fails_is_nobodys_failure(shelved, stage):
    r = shelved()
    r.world.rule(stage, -errno.EIO)
    want(r, (1, 2))
    r.run()
    assert fates(r) == {"cancelled": 2} and r.staging.kept == 0
    r.world.release()
    r.load(1, 2)
    r.run()
    assert r.results[1].failed == ()
    r.assert_idle()


def test_a_preload_that_finds_no_descriptor_keeps_no_load_waiting(shelved):
    r = shelved()
    r.world.rule("openat", -errno.EMFILE)
    want(r, (1, 2))
    r.run(5)
    r.world.release()
    r.load(2, 2)
    r.run()
    assert r.results[2].failed == () and fates(r) == {"cancelled": 2}
    r.assert_idle()


def test_without_a_shelf_nothing_is_preloaded(rig):
    r = rig(slots=14, tier_slots=8)
    want(r, (1, 4))
    r.run()
    assert reads(r) == []
    r.assert_idle()


def test_alone_means_while_no_load_is_under_way(shelved):
    r = shelved(preload_alone=True)
    r.world.rule("copy_in", HOLD)
    r.load(2, 1)
    r.run(5)
    want(r, (1, 2))
    r.run(5)
    assert reads(r) == [r.path(2, 0)]
    r.world.release()
    r.run()
    assert len(reads(r)) == 3
    r.assert_idle()


def test_a_stop_gives_everything_back(shelved):
    r = shelved()
    want(r, (1, 3))
    r.run(3)
    r.reactor.request_stop(1.0)
    r.live(lambda: r.reactor.stopped)
    assert not r.world.fds and not r.world.wrong


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", ["lru", "lirs"])
def test_whatever_comes_in_whatever_order_all_that_is_loaded_is_right(shelved, seed, policy):
    source = random.Random(seed)
    r = shelved(keep=source.randint(1, 8), shelf=source.randint(0, 8), policy=policy, adds=seed % 2 == 0)
    jobs = 100
    for _ in range(40):
        what = source.random()
        if what < 0.4:
            want(r, *[(source.randint(1, 6), source.randint(1, 5)) for _ in range(source.randint(0, 3))])
        elif what < 0.75:
            jobs += 1
            number, count = source.randint(1, 6), source.randint(1, 5)
            for n in range(count):
                r.world.files.setdefault(r.path(number, n), file_of((number, n), n))
            r.again(jobs, number, count)
        elif what < 0.85:
            r.world.rule(source.choice(["read", "openat"]), source.choice([HOLD, -errno.EIO, -errno.EMFILE]))
        else:
            r.world.release()
        r.run(source.randint(0, 6))
        assert r.staging.kept <= r.settings.tier_slots
        told(r)
    r.world.release()
    r.live(lambda: r.results.keys() == r.submitted.keys())
    r.reactor.want(())
    r.run(50)
    for job, result in r.results.items():
        failed = {ordinal for ordinal, _ in result.failed}
        blocks = r.submitted[job].blocks
        assert all(r.loaded(job, n) for n in range(len(blocks)) if n not in failed)
    r.assert_idle()
