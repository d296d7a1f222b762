"""The frozen messages between scheduler and workers. KV bytes never travel here, only names.

vLLM pickles a plan into the step's metadata for every rank; 36 to 40 bytes a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from py_kvcache.layout import BlockId
from py_kvcache.metrics import Samples
from py_kvcache.vllm_api import LoadStoreSpec, OffloadingWorkerMetadata


class Adapter(NamedTuple):
    """The LoRA adapter of a request: vLLM's number and name of it, and its weights on each rank, in order.

    See loraweights.py for the identities.
    """

    number: int
    name: str
    identities: tuple[str, ...]


class Held(NamedTuple):
    """The LoRA adapters that a rank has in memory.

    Args:
        step: number of the step (StepNote) that this was said after.
        known: number -> name and identity, "" for a name that is not cached; None: as said before.
    """

    step: int
    known: dict[int, tuple[str, str]] | None


class TransferPlan(LoadStoreSpec):  # type: ignore[misc]
    """Storage blocks of one request to load or to store, in chain order.

    Args:
        space: namespace folder (without the rank part) in which the blocks live.
        keys: vLLM's OffloadKeys, block hash and 4-byte big-endian group.
        indices: position of each block in its prefix chain, 0 first.
        adapter: whose weights the namespace is for; a worker that has others moves nothing.
    """

    def __init__(
        self, space: str, keys: Sequence[bytes], indices: Sequence[int], adapter: Adapter | None = None
    ) -> None:
        if len(keys) != len(indices):
            raise ValueError(f"{len(keys)} keys but {len(indices)} indices")
        self.space = space
        self.keys = tuple(keys)
        self.indices = tuple(indices)
        self.adapter = adapter

    def __repr__(self) -> str:
        return f"TransferPlan({self.space}, {len(self.keys)} blocks)"


@dataclass(frozen=True, slots=True)
class StepNote:
    """What the scheduler tells every rank about a step, beside vLLM's own metadata.

    Args:
        idle: nothing is computed in this step; vLLM makes one after the other while transfers are under way.
        held: requests that ended, whose KV blocks vLLM keeps until we say that these jobs have copied them.
        number: counts the steps, so that the scheduler can tell which one a report belongs to: with
            asynchronous scheduling it comes one or more steps later.
        pressed: blocks that are kept may be what another request waits for.
        wants: what waiting requests will want, most urgent first; None if that has not changed.
        count: gauges are to be reported, by all ranks in the same step, or they do not add up.
    """

    idle: bool
    held: dict[str, frozenset[int]]
    number: int = 0
    pressed: bool = True
    wants: tuple[Want, ...] | None = None
    count: bool = True


@dataclass(frozen=True, slots=True)
class Want:
    """Blocks that a waiting request will probably load, in chain order.

    ``held``: it loads by now. What was read ahead of it stays until it is claimed; nothing more is read.
    """

    space: str
    keys: tuple[bytes, ...]
    held: bool = False


@dataclass(frozen=True, slots=True)
class Failures:
    """Blocks of one job that were not transferred: where they live, and each key's fault label."""

    space: str
    faults: dict[bytes, str]


Meters = tuple[int, float]  # bytes, and seconds in which at least one transfer was under way


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rank has read and written since its start, and the payload of one block, in bytes."""

    reads: Meters
    writes: Meters
    block_bytes: int


class Moves(NamedTuple):
    """Blocks that are in a rank's memory since it last said so, and those that are there no more."""

    came: tuple[BlockId, ...]
    left: tuple[BlockId, ...]


@dataclass
class WorkerReport(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What a rank tells the scheduler each step, beyond the jobs it completed.

    Every rank sends one each step, so that ``aggregate`` never meets the stock class. ``layouts``
    describe the rank's KV tensors; sent until a step carried them. ``adapters`` say for each rank which
    LoRA adapters it has: after each change, and in steps that compute nothing, so that one that was lost
    costs a miss. ``moves`` say for each rank which blocks its memory tier has taken in and given up.
    ``step`` is the number of the step, as its StepNote has it.
    """

    failed_loads: dict[int, Failures] = field(default_factory=dict)
    failed_stores: dict[int, Failures] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    layouts: tuple[dict[str, Any], ...] = ()
    adapters: dict[int, Held] = field(default_factory=dict)
    paces: dict[int, Pace] = field(default_factory=dict)
    moves: dict[int, Moves] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: OffloadingWorkerMetadata) -> WorkerReport:
        """Join another rank's report of the same step; called by vLLM's output aggregator."""
        base = super().aggregate(other)
        joined = WorkerReport(base.completed_jobs, base.transfer_stats)
        for report in (self, other):
            if not isinstance(report, WorkerReport):
                continue
            _join(joined.failed_loads, report.failed_loads)
            _join(joined.failed_stores, report.failed_stores)
            joined.samples.merge_rank(report.samples)
            joined.layouts += report.layouts
            joined.adapters.update(report.adapters)
            joined.paces.update(report.paces)
            joined.moves.update(report.moves)
            joined.step = max(joined.step, report.step)
        return joined


def _join(mine: dict[int, Failures], theirs: dict[int, Failures]) -> None:
    for job, failures in theirs.items():
        old = mine.get(job)
        mine[job] = failures if old is None else Failures(old.space, {**old.faults, **failures.faults})
