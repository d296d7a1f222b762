"""The life of one block as a table, without I/O.

A block has at most one party to wait for at any time: the kernel (through the ring), the device, a
checksum helper or a publisher thread. If its job gives it up meanwhile, it becomes ``*_LOST``: reported, but
its slot or descriptor stays until that party lets go. A device copy is never given up, always waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class LoadState(IntEnum):
    """A block on its way from file to device."""

    QUEUED = 0
    OPENING = 1
    OPENED = 2
    READING = 3
    VERIFYING = 4
    READY = 5
    COPYING = 6
    DONE = 7
    FAILED = 8
    OPENING_LOST = 9
    READING_LOST = 10
    VERIFYING_LOST = 11
    JOINED = 24  # another block's read brings the same file


class StoreState(IntEnum):
    """A block on its way from device to file. Numbers differ from LoadState's: both share a census."""

    QUEUED = 12
    COPYING = 13
    HASHING = 14
    CREATING = 15
    WRITING = 16
    PUBLISHING = 17
    DONE = 18
    FAILED = 19
    HASHING_LOST = 20
    CREATING_LOST = 21
    WRITING_LOST = 22
    PUBLISHING_LOST = 23


class Event(IntEnum):
    """What may happen to a block."""

    OPEN = 0  # open handed to the ring
    OPENED = 1
    READ = 2  # slot taken, read handed to the ring
    AGAIN = 3  # short, interrupted or refused as direct: the same operation once more
    FILLED = 4  # all bytes are in the slot
    VERIFIED = 5
    COPY = 6  # copy launched
    COPIED = 7
    SEALED = 8  # footer written
    CREATED = 9  # temporary file is open
    EXISTS = 10  # another writer's file has the final name
    WRITTEN = 11
    PUBLISHED = 12
    FAIL = 13
    DROP = 14  # the job gives the block up
    RELEASED = 15  # whoever had a lost block's slot or descriptor let go
    WAIT = 16  # no descriptor to be had, or nobody reads the file any more: the open comes later
    HIT = 17  # all bytes are in a slot already, which is shared
    JOIN = 18  # somebody reads the same file just now
    SHELVE = 19  # a preload: its slot waits for a load


State = LoadState | StoreState
_L, _S, _E = LoadState, StoreState, Event

LOAD: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        _L.QUEUED: {_E.OPEN: _L.OPENING, _E.HIT: _L.READY, _E.JOIN: _L.JOINED, _E.DROP: _L.FAILED},
        _L.JOINED: {_E.HIT: _L.READY, _E.WAIT: _L.QUEUED, _E.DROP: _L.FAILED},
        _L.OPENING: {
            _E.OPENED: _L.OPENED, _E.AGAIN: _L.OPENING, _E.WAIT: _L.QUEUED, _E.FAIL: _L.FAILED,
            _E.DROP: _L.OPENING_LOST,
        },
        _L.OPENED: {_E.READ: _L.READING, _E.FAIL: _L.FAILED, _E.DROP: _L.FAILED},
        _L.READING: {
            _E.AGAIN: _L.READING, _E.FILLED: _L.VERIFYING, _E.FAIL: _L.FAILED, _E.DROP: _L.READING_LOST,
        },
        _L.VERIFYING: {_E.VERIFIED: _L.READY, _E.FAIL: _L.FAILED, _E.DROP: _L.VERIFYING_LOST},
        _L.READY: {
            _E.COPY: _L.COPYING, _E.SHELVE: _L.DONE, _E.FAIL: _L.FAILED, _E.DROP: _L.FAILED,
        },
        _L.COPYING: {_E.COPIED: _L.DONE, _E.FAIL: _L.FAILED},
        _L.DONE: {},
        _L.FAILED: {},
        _L.OPENING_LOST: {_E.RELEASED: _L.FAILED},
        _L.READING_LOST: {_E.RELEASED: _L.FAILED},
        _L.VERIFYING_LOST: {_E.RELEASED: _L.FAILED},
    }
)  # fmt: skip

STORE: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        _S.QUEUED: {_E.COPY: _S.COPYING, _E.FAIL: _S.FAILED, _E.DROP: _S.FAILED},
        _S.COPYING: {_E.COPIED: _S.HASHING, _E.FAIL: _S.FAILED},
        _S.HASHING: {_E.SEALED: _S.CREATING, _E.FAIL: _S.FAILED, _E.DROP: _S.HASHING_LOST},
        _S.CREATING: {
            _E.CREATED: _S.WRITING, _E.EXISTS: _S.DONE, _E.FAIL: _S.FAILED, _E.DROP: _S.CREATING_LOST,
        },
        _S.WRITING: {
            _E.AGAIN: _S.WRITING, _E.WRITTEN: _S.PUBLISHING, _E.FAIL: _S.FAILED, _E.DROP: _S.WRITING_LOST,
        },
        _S.PUBLISHING: {_E.PUBLISHED: _S.DONE, _E.FAIL: _S.FAILED, _E.DROP: _S.PUBLISHING_LOST},
        _S.DONE: {},
        _S.FAILED: {},
        _S.HASHING_LOST: {_E.RELEASED: _S.FAILED},
        _S.CREATING_LOST: {_E.RELEASED: _S.FAILED},
        _S.WRITING_LOST: {_E.RELEASED: _S.FAILED},
        _S.PUBLISHING_LOST: {_E.RELEASED: _S.FAILED},
    }
)  # fmt: skip

TABLE: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType({**LOAD, **STORE})

# Somebody reads or writes the slot's bytes, or will. While a file is being created nobody does, so a block
# given up then returns its slot at once, however long the file system takes.
HOLDS_SLOT: Final[frozenset[State]] = frozenset(
    {
        _L.READING, _L.VERIFYING, _L.READY, _L.COPYING, _L.READING_LOST, _L.VERIFYING_LOST,
        _S.COPYING, _S.HASHING, _S.CREATING, _S.WRITING, _S.HASHING_LOST, _S.WRITING_LOST,
    }
)  # fmt: skip

# PUBLISHING is missing: there the descriptor is the publisher's.
HOLDS_FD: Final[frozenset[State]] = frozenset(
    {_L.OPENED, _L.READING, _L.READING_LOST, _S.WRITING, _S.WRITING_LOST}
)

COPYING: Final[frozenset[State]] = frozenset({_L.COPYING, _S.COPYING})
LOST: Final[frozenset[State]] = frozenset(state for state, row in TABLE.items() if Event.RELEASED in row)
ENDED: Final[frozenset[State]] = frozenset(state for state, row in TABLE.items() if not row)


class IllegalStepError(RuntimeError):
    """An event that cannot happen in this state: a defect of ours. The state is unchanged."""


def step(state: State, event: Event) -> State:
    """The state that follows. Raises IllegalStepError."""
    try:
        return TABLE[state][event]
    except KeyError:
        raise IllegalStepError(f"{type(state).__name__}.{state.name} does not take {event.name}") from None
