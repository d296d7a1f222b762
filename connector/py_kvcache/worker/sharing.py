"""One read serves every block that wants the same file: from memory afterwards, or while it is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from py_kvcache.worker.transfer import Event, LoadState

if TYPE_CHECKING:
    from py_kvcache.worker.core import Core
    from py_kvcache.worker.jobs import Transfer
    from py_kvcache.worker.staging import Slot

_MOST_READERS = 1024  # remembered, before those that have ended are forgotten
_FILLED = (LoadState.READY, LoadState.COPYING)
_READS_ON = (LoadState.OPENING, LoadState.OPENED, LoadState.READING, LoadState.VERIFYING, *_FILLED)


class Sharing:
    """Reactor thread only.

    Args:
        serve: called with a block and the slot that it shares from then on.
        read: called with a block that has to read its file itself after all.
    """

    def __init__(
        self, core: Core, serve: Callable[[Transfer, Slot], None], read: Callable[[Transfer], None]
    ) -> None:
        self._core, self._serve, self._read = core, serve, read
        self._readers: dict[str, Transfer] = {}  # by path, who reads it; ended ones included for a while
        self._joined: list[tuple[Transfer, Transfer]] = []  # who waits for whose read

    @property
    def near(self) -> int:
        """Blocks at hand: they need no read of their own, or no more, and are not copied yet."""
        census = self._core.census
        return census[LoadState.JOINED] + census[LoadState.READY] + census[LoadState.COPYING]

    def knows(self, path: str) -> bool:
        """Whether a block needs no read of its own."""
        reader = self._readers.get(path)
        return path in self._core.tier or (reader is not None and reader.state in _READS_ON)

    def is_there(self, t: Transfer) -> bool:
        """Whether a block that is to begin needs no read: its bytes are in a slot, or will be."""
        core, path = self._core, t.work.path
        slot = core.tier.find(path)
        if slot is not None:
            core.counters.spare("memory")
            self._serve(t, slot)
            return True
        reader = self._readers.get(path)
        if reader is None or reader.state not in _READS_ON:
            self._remember(t)
            return False
        core.counters.spare("joined")
        core.move(t, Event.JOIN)
        self._joined.append((t, reader))
        return True

    def follow(self) -> None:
        """Who joined shares the slot once it is filled, or reads itself if that read came to nothing."""
        if not self._joined:
            return
        core, joined = self._core, self._joined
        self._joined = []
        for t, reader in joined:
            if t.state is not LoadState.JOINED:
                continue
            if reader.state in _FILLED:
                assert reader.slot is not None
                core.staging.share(reader.slot)
                self._serve(t, reader.slot)
            elif reader.state in _READS_ON:
                self._joined.append((t, reader))
            else:
                core.move(t, Event.WAIT)
                if not self.is_there(t):
                    self._read(t)

    def _remember(self, t: Transfer) -> None:
        readers = self._readers
        readers[t.work.path] = t
        if len(readers) > _MOST_READERS:
            self._readers = {path: one for path, one in readers.items() if one.state in _READS_ON}
