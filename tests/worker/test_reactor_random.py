"""Any order of jobs, answers, faults, deadlines and flushes: nothing is lost, doubled or reported too early.

The doubles note what must never happen: a slot given to two parties, a descriptor closed twice or in use, a
device copy of a reported job, a job reported twice.
"""

from __future__ import annotations

import errno

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worker_doubles import HOLD, PAYLOAD, Rig, file_of, payload_of

from py_kvcache.errors import Fault
from py_kvcache.worker.jobs import Kind
from py_kvcache.worker.tier import Tier

ERRNOS = [errno.EIO, errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.ENOENT, errno.ENOSPC, errno.ECANCELED]
FATES = {
    "openat": st.sampled_from([None, None, None, *[-code for code in ERRNOS]]),
    "read": st.one_of(st.none(), st.sampled_from([-code for code in ERRNOS]), st.integers(0, 13_000)),
    "write": st.one_of(st.none(), st.sampled_from([-code for code in ERRNOS]), st.integers(0, 13_000)),
    "close": st.none(),
    "seal": st.sampled_from([None, None, None, Fault.IO]),
    "verify": st.sampled_from([None, None, None, Fault.CHECKSUM]),
    "create": st.sampled_from([None, None, None, -errno.ENOSPC, -errno.EIO, Fault.PAUSED]),
    "commit": st.sampled_from([None, None, None, -errno.EIO]),
    "abandon": st.none(),
    "copy_in": st.sampled_from([None, None, None, None, "gone"]),
    "copy_out": st.sampled_from([None, None, None, None, "gone"]),
}


class ReactorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            slots=5 + 4, reserve=2, io_depth=3, lookahead=4, store_files=6, max_queued_stores=12,
            memory_tier="lirs", tier_slots=4,
        )  # fmt: skip
        self.hold_all()
        self.next_job = 0
        self.flushes: list[tuple[object, set[int]]] = []

    @initialize(adds=st.booleans(), policy=st.sampled_from(["lru", "arc", "lirs"]))
    def device(self, adds: bool, policy: str) -> None:
        self.rig.device.adds = adds
        core = self.rig.reactor._core
        core.tier = Tier(self.rig.staging, policy, 4)

    def hold_all(self) -> None:
        for op in FATES:
            self.rig.world.rule(op, HOLD)

    @rule(
        count=st.integers(0, 7),
        seconds=st.sampled_from([0.5, 5.0, 50.0]),
        harm=st.integers(-5, 6),
        how=st.integers(0, 3),
    )
    def load(self, count: int, seconds: float, harm: int, how: int) -> None:
        rig, job_id = self.rig, self.next_job
        self.next_job += 1
        rig.load(job_id, count, seconds)
        if 0 <= harm < count:
            path = rig.path(job_id, harm)
            if how == 0:
                del rig.world.files[path]
            elif how == 1:
                del rig.world.files[path][harm * 1000 :]
            elif how == 2:
                rig.world.files[path][harm] ^= 8
            else:
                rig.world.files[path] = file_of("another")

    @precondition(lambda self: self.rig.submitted)
    @rule(
        data=st.data(), count=st.integers(0, 7), seconds=st.sampled_from([0.5, 5.0, 50.0]), part=st.booleans()
    )
    def load_what_another_job_loads_or_stores(
        self, data: st.DataObject, count: int, seconds: float, part: bool
    ) -> None:
        rig = self.rig
        if part:  # its pages are no whole blocks, which the device does not add up
            rig.device.parts.add(self.next_job)
        of = data.draw(st.sampled_from([job for job in rig.submitted if job not in rig.origin]))
        rig.again(self.next_job, of, count, seconds)
        self.next_job += 1

    @rule(count=st.integers(0, 7), seconds=st.sampled_from([0.5, 5.0, 50.0]))
    def store(self, count: int, seconds: float) -> None:
        self.rig.store(self.next_job, count, seconds)
        self.next_job += 1

    @rule(passes=st.integers(1, 3))
    def passes(self, passes: int) -> None:
        for _ in range(passes):
            self.rig.step()

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.rig.step(seconds)

    @precondition(lambda self: self.rig.world.pending)
    @rule(data=st.data())
    def something_ends(self, data: st.DataObject) -> None:
        world = self.rig.world
        ask = world.pending[data.draw(st.integers(0, len(world.pending) - 1))]
        world.complete(ask, data.draw(FATES[ask.op]))

    @precondition(lambda self: self.rig.world.pending)
    @rule()
    def everything_pending_ends_well(self) -> None:
        self.rig.world.release()
        self.rig.step()
        self.hold_all()

    @rule(where=st.sampled_from(["", "open", "read", "write"]))
    def direct_io_is_refused(self, where: str) -> None:
        self.rig.world.refuse_direct = where

    @precondition(lambda self: self.next_job)
    @rule(data=st.data(), patience=st.sampled_from([0.0, 1.0]))
    def flush(self, data: st.DataObject, patience: float) -> None:
        ids = data.draw(st.sets(st.integers(0, self.next_job - 1), max_size=4))
        self.flushes.append((self.rig.reactor.ask(ids, patience), ids))

    @invariant()
    def nothing_forbidden_has_happened(self) -> None:
        rig = self.rig
        assert not rig.world.wrong, rig.world.wrong
        assert rig.reactor.snapshot().leaks == 0

    @invariant()
    def limits_are_kept(self) -> None:
        rig = self.rig
        assert len(rig.world.held("openat")) <= 4
        assert rig.reactor.snapshot().queued["store"] <= 12
        assert rig.staging.kept <= 4
        assert sum(1 for path in rig.world.fds.values() if path.endswith(".tmp")) <= 6
        assert sum(1 for path in rig.world.fds.values() if not path.endswith(".tmp")) <= 4 + 5 + len(
            rig.world.held("close")
        )

    @invariant()
    def an_answered_flush_means_that_no_copy_runs(self) -> None:
        answered = set().union(*(ids for flush, ids in self.flushes if flush.answered.is_set()))
        copying = {copy.pages[0] for ask in self.rig.world.pending for copy in ask.extra}
        assert not answered & copying

    def teardown(self) -> None:
        rig = self.rig
        try:
            rig.world.release()
            rig.world.refuse_direct = ""
            rig.run(250)
            rig.step(100)
            rig.run(10)
            rig.assert_idle()
            assert all(flush.answered.is_set() for flush, _ in self.flushes)
            self.check_results()
        finally:
            rig.close()

    def check_results(self) -> None:
        rig = self.rig
        for job_id, job in rig.submitted.items():
            failed = rig.faults(job_id)
            assert rig.results[job_id].bytes == PAYLOAD * (len(job.blocks) - len(failed))
            for n in range(len(job.blocks)):
                if job.kind is Kind.LOAD and n not in failed:
                    assert rig.loaded(job_id, n)
                elif job.kind is Kind.STORE:
                    path = rig.path(job_id, n)
                    if n not in failed:
                        assert rig.stored(job_id, n)
                    elif path in rig.world.files:
                        # Given up while its commit was under way: then the file is whole.
                        assert failed[n] in (Fault.TIMEOUT, Fault.CANCELLED)
                        assert rig.world.files[path][:PAYLOAD] == payload_of((job_id, n))


ReactorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestReactorInAnyOrder = ReactorMachine.TestCase
