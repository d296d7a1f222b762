"""Puts a worker's parts together from the settings, and says once which slower ways are used and why."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from py_kvcache.config import Config
from py_kvcache.layout import file_bytes
from py_kvcache.worker.checksum import Checksummer
from py_kvcache.worker.device import Device, make_device
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.inbox import Inbox
from py_kvcache.worker.pages import PageMap
from py_kvcache.worker.parts import ReactorSettings
from py_kvcache.worker.probe import DirectProbe, choose_direct, probe_direct
from py_kvcache.worker.publication import FileSettings
from py_kvcache.worker.publish import Publisher, PublishSettings
from py_kvcache.worker.reactor import Reactor
from py_kvcache.worker.ring import make_ring
from py_kvcache.worker.staging import StagingPool, plan_slots
from py_kvcache.worker.trace import Trace

log = logging.getLogger("vllm.py_kvcache.worker")

TRACE_VARIABLE = "PY_KVCACHE_TRACE"


@dataclass
class Parts:
    """What one worker runs on. ``fallbacks`` maps a slower way in use to the sentence that says why."""

    reactor: Reactor
    device: Device
    publisher: Publisher
    checksum: Checksummer
    waker: Inbox[None]
    wake_fd: int
    trace: Trace | None
    fallbacks: dict[str, str] = field(default_factory=dict)
    closed: bool = False

    def run_aside(self, work: Callable[[], object]) -> None:
        """Run something that may wait for the file system, in a daemon thread of its own."""
        threading.Thread(target=work, name="py-kvcache-aside", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """End everything, in the order in which the parts use each other and all within one timeout.

        Only copies on the device may take longer (see Reactor.stop): their memory is not ours to free.
        """
        if self.closed:
            return
        self.closed = True
        ends = time.monotonic() + timeout_s
        clean = self.reactor.stop(timeout_s)
        self.checksum.shutdown()
        self.publisher.shutdown(max(0.0, ends - time.monotonic()))
        if clean:
            # Else kernel or helpers still have staging memory, which must then outlive us.
            self._close_device()
        self.waker.close()
        if clean:
            os.close(self.wake_fd)
        if self.trace is not None:
            self.trace.close()

    def _close_device(self) -> None:
        try:
            self.device.close()
        except Exception:
            # A driver raises what it likes; what else is open is closed all the same.
            log.exception("py-kvcache: the device could not be closed")


def open_trace(rank: int) -> Trace | None:
    """The timeline named by PY_KVCACHE_TRACE; ranks beyond the first get a suffix."""
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return None
    try:
        return Trace(path if rank == 0 else f"{path}.rank{rank}", process=f"py-kvcache worker {rank}")
    except OSError as error:
        log.warning("py-kvcache: no timeline is written, %s=%s: %s", TRACE_VARIABLE, path, error.strerror)
        return None


def use_direct(config: Config, probe: DirectProbe) -> tuple[bool, str | None]:
    """Whether to open with O_DIRECT, and why not if the user would have liked it. Raises ConfigError."""
    return choose_direct(config.direct_io, probe)


def build(config: Config, kv_caches: Any, page_map: PageMap, rank: int) -> Parts:
    """Build and start a worker. Raises ConfigError, KvCacheError or OSError, before any thread runs."""
    root = config.root_path
    slot_bytes = file_bytes(page_map.payload_bytes)
    plan = plan_slots(
        slot_bytes,
        io_depth=config.io_depth,
        copy_headroom=config.copy_headroom,
        staging_bytes=config.staging_bytes,
        memory_bytes=0 if config.memory_tier == "none" else config.memory_bytes,
    )
    for warning in plan.warnings:
        log.warning("py-kvcache: %s", warning)
    fallbacks: dict[str, str] = {}
    direct, reason = use_direct(config, probe_direct(root))
    if reason is not None:
        fallbacks["buffered"] = reason
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    waker: Inbox[None] = Inbox(wake_fd)  # only its wake(), which is safe against a closed eventfd
    entries = 2 * (config.io_depth + config.open_lookahead) + 64
    # Writes that hang never take the last ones: see ReactorSettings.store_depth.
    workers = config.io_workers + config.copy_headroom
    ring, reason = make_ring(config.ring, entries, workers, wake_fd, root)
    if reason is not None:
        fallbacks["threads"] = reason
    for mode, why in fallbacks.items():
        log.warning(
            "py-kvcache: slower I/O (%s) is used: %s; `py-kvcache doctor %s` tells more", mode, why, root
        )
    trace = open_trace(rank)
    device = make_device(kv_caches, page_map, waker.wake, checksum=config.checksum)
    staging = StagingPool(device.allocate(plan.nbytes), slot_bytes, reserve_for_loads=plan.reserve_for_loads)
    publisher = Publisher(FileOps(), _publish_settings(config, direct), waker.wake)
    checksum = Checksummer(config.checksum_threads, waker.wake, enabled=config.checksum)
    reactor = Reactor(
        ring=ring,
        wake_fd=wake_fd,
        staging=staging,
        device=device,
        checksum=checksum,
        publisher=publisher,
        settings=ReactorSettings(
            payload_bytes=page_map.payload_bytes,
            file_bytes=slot_bytes,
            io_depth=plan.io_depth,
            store_depth=config.io_workers,
            open_lookahead=config.open_lookahead,
            max_queued_stores=config.max_queued_stores,
            direct=direct,
            read_bytes_per_s=config.read_bytes_per_s,
            store_bytes_per_s=config.store_bytes_per_s,
            memory_tier=config.memory_tier,
            tier_slots=plan.tier_slots,
            preload_slots=config.preload_blocks(slot_bytes),
            # Of the files that may be open ahead loads keep half, however slowly preloads are read.
            preload_depth=max(1, min(config.io_workers, config.open_lookahead // 2)),
            preload_alone=config.preload == "alone",
        ),
        trace=trace,
    )
    log.info(
        "py-kvcache: %d slots of %.1f MiB (%.0f MiB), %d of them for blocks that stay, %s, %s, blocks of %d "
        "tokens in %s",
        plan.slots, slot_bytes / (1 << 20), plan.slots * slot_bytes / (1 << 20), plan.tier_slots, ring.name,
        "O_DIRECT" if direct else "buffered", config.block_tokens, root,
    )  # fmt: skip
    return Parts(reactor, device, publisher, checksum, waker, wake_fd, trace, fallbacks)


def _publish_settings(config: Config, direct: bool) -> PublishSettings:
    return PublishSettings(
        files=FileSettings(
            root=config.root_path, file_mode=config.file_mode, dir_mode=config.dir_mode, fsync=config.fsync
        ),
        direct=direct,
        checksum=config.checksum,
        store_stop_at=config.store_stop_at,
        store_resume_at=config.store_resume_at,
        store_bytes_per_day=config.store_bytes_per_day,
    )
