"""Staging slots: how many there are, and who has each of them.

One aligned (on CUDA: pinned) allocation cut into slots of one block file each. Nothing is sized by a
request: with few slots a long prompt takes more turns, not more memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from py_kvcache.errors import ConfigError
from py_kvcache.layout import ALIGN

MIN_SLOTS = 3  # one being read, one being copied, one being stored


class Use(IntEnum):
    """Who has a slot."""

    FREE = 0
    LOAD = 1
    STORE = 2
    STUCK = 3  # its block was given up, but kernel or helper still owns the bytes
    KEPT = 4  # nobody has it, but its block is worth having: the memory tier's


@dataclass(slots=True, eq=False)
class Slot:
    """``buffer`` is 1-D uint8 of one block file, at byte ``offset`` of the allocation."""

    index: int
    offset: int
    buffer: memoryview = field(repr=False)
    use: Use = Use.FREE
    holders: int = 0  # blocks under way that have it; more than one only read it
    kept: bool = False  # by the memory tier, whoever else has it
    proved: bool = False  # these bytes, as they are here, belong to their footer's digest


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What the settings come to on this model; ``warnings`` are sentences for the log."""

    slots: int  # those of the memory tier included
    io_depth: int
    copy_headroom: int
    reserve_for_loads: int
    slot_bytes: int
    tier_slots: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the allocation."""
        return self.slots * self.slot_bytes


def plan_slots(
    slot_bytes: int,
    *,
    io_depth: int,
    copy_headroom: int,
    staging_bytes: int | None = None,
    memory_bytes: int = 0,
) -> SlotPlan:
    """Count slots. Default: what the I/O depth and the copies need; a number of bytes is divided instead.

    Args:
        slot_bytes: size of one block file, footer included.
        staging_bytes: memory to use, rounded down to whole slots; None for the default.
        memory_bytes: memory for blocks that stay, beside that; rounded down, too.
    Raises:
        ConfigError: fewer than three slots.
    """
    slots = io_depth + copy_headroom if staging_bytes is None else staging_bytes // slot_bytes
    if slots < MIN_SLOTS:
        given = (
            f"io_depth {io_depth} + copy_headroom {copy_headroom} come to {slots}"
            if staging_bytes is None
            else f"staging_bytes {staging_bytes} holds {slots}"
        )
        raise ConfigError(
            f"at least {MIN_SLOTS} staging slots of {slot_bytes} bytes are needed, {given}: "
            f"set staging_bytes to {MIN_SLOTS * slot_bytes} or more, or make block_tokens smaller"
        )
    # Too little for both: two thirds for I/O, so that copies never drain the disk pipeline altogether.
    fits = slots >= io_depth + copy_headroom
    headroom = copy_headroom if fits else min(copy_headroom, max(1, slots // 3))
    depth = min(io_depth, slots - headroom)
    warnings = []
    if depth < io_depth or headroom < copy_headroom:
        warnings.append(
            f"staging memory holds {slots} slots of {slot_bytes} bytes: io_depth is {depth} instead of "
            f"{io_depth}, copy headroom {headroom} instead of {copy_headroom}"
        )
    # What stores leave alone: enough to begin reads at once however many writes hang, and no more, since
    # without loads stores should have the whole depth.
    tier = memory_bytes // slot_bytes
    if memory_bytes and not tier:
        warnings.append(
            f"memory_bytes {memory_bytes} holds no slot of {slot_bytes} bytes: nothing stays in memory"
        )
    return SlotPlan(slots + tier, depth, slots - depth, slots - depth, slot_bytes, tier, tuple(warnings))


class StagingPool:
    """Hands out slots; reactor thread only.

    Args:
        memory: 1-D uint8, at least one slot long; a rest that holds no whole slot is left unused.
        slot_bytes: a multiple of 4,096, as direct I/O needs.
        reserve_for_loads: slots that stores leave alone, so that a slow disk full of writes cannot
            keep a read waiting.
    """

    def __init__(self, memory: memoryview, slot_bytes: int, *, reserve_for_loads: int) -> None:
        if slot_bytes <= 0 or slot_bytes % ALIGN:
            raise ValueError(f"slot size {slot_bytes} is no multiple of {ALIGN}")
        if memory.format != "B" or memory.ndim != 1:
            raise ValueError("staging memory must be one-dimensional bytes")
        total = memory.nbytes // slot_bytes
        if not 0 <= reserve_for_loads < total:
            raise ValueError(f"{reserve_for_loads} of {total} slots reserved leaves none for stores")
        self._slots = [
            Slot(i, i * slot_bytes, memory[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(total)
        ]
        self._free = self._slots[::-1]  # a stack: the slot used last is the one still in the CPU's caches
        self._counts = [total, 0, 0, 0, 0]
        self.total = total
        self.reserve_for_loads = reserve_for_loads

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return self._counts[Use.FREE]

    @property
    def used(self) -> int:
        """Slots that somebody has, stuck ones included."""
        return self._counts[Use.LOAD] + self._counts[Use.STORE] + self._counts[Use.STUCK]

    @property
    def kept(self) -> int:
        """Slots that nobody has but the memory tier."""
        return self._counts[Use.KEPT]

    def by_use(self) -> dict[str, int]:
        """Number of slots by use, for the gauge."""
        return {use.name.lower(): self._counts[use] for use in Use}

    def take(self, use: Use) -> Slot | None:
        """A free slot for ``Use.LOAD`` or ``Use.STORE``, or None if there is none for that use."""
        keep = self.reserve_for_loads if use is Use.STORE else 0
        if len(self._free) <= keep:
            return None
        slot = self._free.pop()
        slot.holders, slot.proved = 1, False
        self._set(slot, use)
        return slot

    def share(self, slot: Slot) -> None:
        """One more block reads what a slot holds: one that is kept, or that somebody has filled."""
        if slot.use not in (Use.KEPT, Use.LOAD, Use.STORE):
            raise RuntimeError(f"slot {slot.index} is {slot.use.name} and cannot be shared")
        slot.holders += 1
        if slot.use is Use.KEPT:
            self._set(slot, Use.LOAD)

    def keep(self, slot: Slot) -> None:
        """The tier has it, too, from now on."""
        self._check_held(slot)
        slot.kept = True

    def let_go(self, slot: Slot) -> None:
        """The tier does not want it any more."""
        if not slot.kept:
            raise RuntimeError(f"slot {slot.index} is not kept")
        slot.kept = False
        if not slot.holders:
            self._set(slot, Use.FREE)
            self._free.append(slot)

    def mark_stuck(self, slot: Slot) -> None:
        """The block is given up, the bytes are not ours yet: still used, told apart in the gauge."""
        self._check_held(slot)
        self._set(slot, Use.STUCK)

    def release(self, slot: Slot) -> None:
        """Give a slot back. Raises RuntimeError if nobody has it: two owners mean wrong text."""
        self._check_held(slot)
        slot.holders -= 1
        if slot.holders:
            return
        if slot.kept:
            self._set(slot, Use.KEPT)
        else:
            self._set(slot, Use.FREE)
            self._free.append(slot)

    def check_idle(self, expected_used: int = 0) -> str | None:
        """None if all is well when nothing is going on, else what is wrong, in words."""
        states = [0] * len(Use)
        for slot in self._slots:
            states[slot.use] += 1
        added_up = self.free + self.used + self.kept
        if states != self._counts or len(self._free) != self.free or added_up != self.total:
            return f"slot counts disagree: {self.by_use()} counted, {states} found, {len(self._free)} listed"
        if self.used != expected_used:
            return f"{self.used} of {self.total} slots are in use, expected {expected_used}"
        return None

    def _check_held(self, slot: Slot) -> None:
        if not slot.holders:
            raise RuntimeError(f"slot {slot.index} is already free")

    def _set(self, slot: Slot, use: Use) -> None:
        self._counts[slot.use] -= 1
        self._counts[use] += 1
        slot.use = use
