"""What the reactor is put together from, as far as it uses them, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from py_kvcache.digest import BlockSums
    from py_kvcache.errors import BlockError
    from py_kvcache.worker.checksum import ChecksumResult
    from py_kvcache.worker.publish import PublishResult


class SlotCopy(NamedTuple):
    """One storage block to copy: its slot, its pages, and the device event it must wait for (None: none)."""

    buffer: memoryview
    pages: Any
    after: Any


class DeviceEvent(Protocol):
    """The end of a batch of copies."""

    def done(self) -> bool:
        """Never blocks; raises if the copies failed."""

    def sums(self, number: int) -> BlockSums | None:
        """Of that block of the batch, as the device has it, once done; None where it adds nothing up.

        Good until the block's slot is copied again.
        """


def is_pending(event: DeviceEvent) -> bool:
    """Whether copies go on; those that failed do not."""
    try:
        return not event.done()
    except Exception:  # noqa: BLE001 - a driver raises what it likes
        return False


class Copier(Protocol):
    """The part of device.Device that copies. A call that raises must have left nothing in flight."""

    @property
    def poll_s(self) -> float | None:
        """How often to ask events; None if the device wakes the reactor itself."""

    def adds_up(self, pages: Any) -> bool:
        """Whether a copy of these pages comes with the sums of their block."""

    def load(self, copies: Sequence[SlotCopy]) -> DeviceEvent:
        """Slots to device, one launch."""

    def store(self, copies: Sequence[SlotCopy]) -> DeviceEvent:
        """Device to slots."""


class Sealer(Protocol):
    """checksum.Checksummer."""

    def seal(
        self,
        token: int,
        buffer: memoryview,
        key: bytes,
        index: int,
        payload_bytes: int,
        sums: BlockSums | None = None,
    ) -> None:
        """Write the footer into the slot."""

    def verify(self, token: int, buffer: memoryview, key: bytes, payload_bytes: int) -> None:
        """Check the footer of a slot and its digest."""

    def results(self) -> list[ChecksumResult]:
        """What is done since the last call."""


class FilePublisher(Protocol):
    """publish.Publisher."""

    @property
    def direct(self) -> bool:
        """Whether files are created with O_DIRECT."""

    @direct.setter
    def direct(self, value: bool) -> None: ...

    def create(self, token: int, final: str, nbytes: int) -> None:
        """Open a temporary file beside ``final``."""

    def commit(self, token: int, fd: int, temp: str, final: str, index: int) -> None:
        """Close and publish."""

    def abandon(self, token: int, fd: int, temp: str, error: BlockError | None = None) -> None:
        """Close and remove; ``error`` says why."""

    def refuses(self) -> bool:
        """True if a create would be refused now."""

    def quarantine(self, path: str, key: bytes, payload_bytes: int) -> None:
        """Remove a file if a second look proves it damaged."""

    def results(self) -> list[PublishResult]:
        """What is done since the last call."""


class Timeline(Protocol):
    """trace.Trace."""

    def complete(self, name: str, cat: str, ts_us: float, dur_us: float, lane: str, **args: object) -> None:
        """One bar."""

    def span(self, name: str, cat: str, ts_us: float, dur_us: float, ident: str, **args: object) -> None:
        """One bar of a row of its own."""

    def counter(self, name: str, ts_us: float, **values: float) -> None:
        """One sample of some curves."""

    def flush(self) -> None:
        """Write what is collected."""


@dataclass(frozen=True, slots=True)
class ReactorSettings:
    """All sizes in bytes, all limits per worker.

    Attributes:
        payload_bytes: of one block, without padding and footer.
        file_bytes: of one block file, which is also the slot's size.
        io_depth: reads in flight, and stores between the launch of their copy and the end of their write.
        store_depth: of these the stores, at most. Fewer than the ring works on at once: a read must not queue
            behind writes that hang.
        open_lookahead: files being opened or open ahead of their read.
        store_files: stores under way in all, which bounds their descriptors however slow publishing is.
        max_queued_stores: store blocks waiting; more are dropped with QUEUE_FULL.
        direct: open with O_DIRECT.
        read_bytes_per_s, store_bytes_per_s: 0 for no limit.
        memory_tier, tier_slots: policy and size of the memory tier; no slots, no tier.
        preload_slots: how many of its slots preloads may take.
        preload_depth: how many of them are read at once.
        preload_alone: only while no load is under way.
    """

    payload_bytes: int
    file_bytes: int
    io_depth: int = 16
    store_depth: int = 16
    open_lookahead: int = 32
    store_files: int = 64
    max_queued_stores: int = 512
    direct: bool = True
    read_bytes_per_s: float = 0
    store_bytes_per_s: float = 0
    memory_tier: str = "lirs"
    tier_slots: int = 0
    preload_slots: int = 0
    preload_depth: int = 12
    preload_alone: bool = False
