"""One read serves every block that wants the same file: from memory afterwards, or while it is under way.

A slot's bytes are checked where they are used. Where the device adds up what it copies, each copy has its own
check; a block that it cannot add up (a part of one) may only share a slot that is proved as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from py_kvcache.worker.transfer import Event, LoadState

if TYPE_CHECKING:
    from py_kvcache.worker.core import Core
    from py_kvcache.worker.jobs import BlockWork, Transfer
    from py_kvcache.worker.parts import Copier
    from py_kvcache.worker.staging import Slot

# Blocks that need no read of their own and are begun: a pass must not begin any number, and those that wait
# for a read that hangs must not keep others from what is at hand.
_MOST_AT_HAND, _MOST_JOINED = 128, 512
_MOST_READERS = 1024  # remembered, before those that have ended are forgotten
_FILLED = (LoadState.READY, LoadState.COPYING)
_ON_THEIR_WAY = (LoadState.OPENING, LoadState.OPENED, LoadState.READING, LoadState.VERIFYING)


class Sharing:
    """Reactor thread only.

    Args:
        serve: called with a block and the slot that it shares from then on.
        read: called with a block that has to look for its file again.
        hasten: called with a block whose read has become as urgent as that of the one that joined it.
    """

    def __init__(
        self,
        core: Core,
        device: Copier,
        serve: Callable[[Transfer, Slot], None],
        read: Callable[[Transfer], None],
        hasten: Callable[[Transfer], None],
    ) -> None:
        self._core, self._device, self._serve, self._read = core, device, serve, read
        self._hasten = hasten
        self._readers: dict[str, Transfer] = {}  # by path, who reads it; ended ones included for a while
        self._joined: list[tuple[Transfer, Transfer]] = []  # who waits for whose read

    @property
    def full(self) -> bool:
        """Whether no block may begin for now."""
        census = self._core.census
        at_hand = census[LoadState.READY] + census[LoadState.COPYING]
        return at_hand >= _MOST_AT_HAND or census[LoadState.JOINED] >= _MOST_JOINED

    def is_joined(self, reader: Transfer) -> bool:
        """Whether another block waits for this one's read."""
        return any(other is reader and t.state is LoadState.JOINED for t, other in self._joined)

    def is_read(self, path: str) -> bool:
        """Whether somebody reads this file, or copies what he has read of it."""
        reader = self._readers.get(path)
        return reader is not None and _reads(reader)

    def serves(self, work: BlockWork) -> bool:
        """Whether a block needs no read of its own."""
        proved = not self._device.adds_up(work.pages)
        return self._core.tier.has(work.path, proved=proved) or self._reader_for(work) is not None

    def is_there(self, t: Transfer) -> bool:
        """Whether a block that is to begin needs no read: its bytes are in a slot, or will be."""
        core, work = self._core, t.work
        slot = core.tier.find(work.path, proved=not self._device.adds_up(work.pages))
        if slot is not None:
            core.counters.spare("memory")
            self._serve(t, slot)
            return True
        reader = self._reader_for(work)
        if reader is None:
            self.remember(t)
            return False
        if reader.state in _FILLED:
            self._share_with(t, reader)
        else:
            core.move(t, Event.JOIN)
            self._joined.append((t, reader))
            if t.serial < reader.serial:
                reader.serial = t.serial
                self._hasten(reader)
        return True

    def follow(self) -> None:
        """Who joined shares the slot once it is filled, or looks again if that read came to nothing."""
        if not self._joined:
            return
        core, joined = self._core, self._joined
        self._joined = []
        for t, reader in joined:
            if t.state is not LoadState.JOINED:
                continue
            if reader.state in _ON_THEIR_WAY:
                self._joined.append((t, reader))
            elif reader.state in _FILLED:
                self._share_with(t, reader)
            else:
                core.move(t, Event.WAIT)
                self._read(t)

    def _share_with(self, t: Transfer, reader: Transfer) -> None:
        assert reader.slot is not None
        self._core.staging.share(reader.slot)
        self._core.counters.spare("joined")
        self._serve(t, reader.slot)

    def _reader_for(self, work: BlockWork) -> Transfer | None:
        """Who reads the file for this block, too.

        Not where nobody would check it: only a CPU proves the reader's bytes as they are in the slot.
        """
        reader = self._readers.get(work.path)
        if reader is None or not _reads(reader):
            return None
        adds_up = self._device.adds_up
        return reader if adds_up(work.pages) or not adds_up(reader.work.pages) else None

    def remember(self, t: Transfer) -> None:
        """This block reads its file; others may join."""
        readers = self._readers
        readers[t.work.path] = t
        if len(readers) > _MOST_READERS:
            self._readers = {path: one for path, one in readers.items() if _reads(one)}


def _reads(reader: Transfer) -> bool:
    return reader.state in _ON_THEIR_WAY or reader.state in _FILLED
