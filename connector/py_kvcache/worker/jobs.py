"""Jobs as they come in and go out, and the one record that a block has while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from py_kvcache.worker.transfer import LoadState, State, StoreState

if TYPE_CHECKING:
    from py_kvcache.errors import BlockError
    from py_kvcache.worker.staging import Slot


class Kind(Enum):
    """Direction of a job; the value is a metric label."""

    LOAD = "load"
    STORE = "store"
    PRELOAD = "preload"  # the reactor's own: nobody hands one in, nobody hears of its end


@dataclass(frozen=True, slots=True)
class BlockWork:
    """One storage block. ``pages`` says where it lies on the device and is opaque here."""

    path: str
    key: bytes
    index: int  # position in its prefix chain
    pages: object


@dataclass(frozen=True, slots=True)
class Job:
    """What one request wants moved, blocks in chain order.

    ``after`` is the device event that the copies wait for, recorded when the job was made; ``deadline`` is
    by the reactor's clock (``time.monotonic``).
    """

    job_id: int
    kind: Kind
    blocks: tuple[BlockWork, ...]
    after: object | None
    deadline: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """Comes exactly once for each job. No device memory of the job is touched any more.

    ``failed`` holds the blocks that were not transferred, by position in the job, ascending; ``bytes`` is the
    payload of the others; ``seconds`` runs from the reactor's receipt.
    """

    job_id: int
    kind: Kind
    failed: tuple[tuple[int, BlockError], ...]
    bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class Transfer:
    """One block under way. ``slot``, ``fd`` and ``temp`` are set exactly while the block has them."""

    run: Running
    ordinal: int
    work: BlockWork
    state: State
    serial: int  # order of begin: first job first, chain order within
    direct: bool
    token: int = -1  # under which somebody will answer
    since: float = 0.0  # when the current operation began
    slot: Slot | None = None
    fd: int = -1
    temp: str = ""
    offset: int = 0  # in the file, of the operation in the kernel
    reached: int = 0  # how far into the file any operation got
    retries: int = 0
    error: BlockError | None = None  # its own, once failed
    refused: int = 0  # errno with which an O_DIRECT operation was refused


@dataclass(slots=True, eq=False)
class Running:
    """A job under way. Blocks begin in order; those from ``begun`` to ``limit`` have not."""

    job: Job
    arrived: float
    limit: int
    begun: int = 0
    done: int = 0
    over: BlockError | None = None  # set when the job was given up: blocks being copied end with it
    active: set[Transfer] = field(default_factory=set)  # begun, not ended, not lost
    copying: int = 0
    failed: dict[int, BlockError] = field(default_factory=dict)
    finished: bool = False

    @property
    def touches_device(self) -> bool:
        """Whether device memory of this job may still be read or written."""
        if self.finished:
            return False
        kind = self.job.kind
        return kind is Kind.LOAD or (kind is Kind.STORE and self.begun < self.limit) or self.copying > 0


FIRST_STATE: dict[Kind, State] = {
    Kind.LOAD: LoadState.QUEUED, Kind.STORE: StoreState.QUEUED, Kind.PRELOAD: LoadState.QUEUED
}  # fmt: skip
