"""`py-kvcache verify ROOT`: read every block from the disk and check footer and checksum, in threads.

A first walk counts and learns each part's block size from valid footers; the second hands files to the
threads through a short queue, so memory does not grow with the number of files.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from py_kvcache import layout
from py_kvcache.errors import PROOF_OF_DAMAGE
from py_kvcache.footer import FooterError, unpack_footer
from py_kvcache.tools.blockcheck import Check, StopError, Verdict, check_block, new_buffer
from py_kvcache.tools.inspection import ConfigState
from py_kvcache.tools.scan import (
    Entry,
    Kind,
    file_system_clock,
    open_parent,
    opened_root,
    scan,
    want_namespaces,
    wrong_root,
)
from py_kvcache.tools.verify_report import Progress, VerifyReport

SIZE_TRIES = 16  # footers read per part and group, at most, until one is valid
_QUEUE = 64


@dataclass
class _Group:
    """One part and KV-cache group: what is known of its files' size, and the namespace."""

    is_ours: bool
    sizes: set[int] = field(default_factory=set)
    tries: int = 0


def verify_root(
    root: str,
    *,
    namespace: str = "",
    limit: int = 0,
    delete: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the blocks of a root; see VerifyReport. Raises RootError or ConfigError (no such namespace).

    Args:
        limit: stop after that many blocks; 0 means all.
        delete: unlink what a second, fresh read proves damaged again.
    """
    report = VerifyReport(root, delete, limit)
    began = time.monotonic()
    with opened_root(root) as root_fd:
        run = _Run(root, root_fd, namespace, report, progress or Progress())
        try:
            files, size = run.count()
            run.progress.begin(files, size)
            run.read_all(threads)
        except KeyboardInterrupt:
            report.interrupted = True
    report.seconds = time.monotonic() - began
    return report


class _Run:
    def __init__(
        self, root: str, root_fd: int, pattern: str, report: VerifyReport, progress: Progress
    ) -> None:
        self.root, self.root_fd, self.report, self.progress = root, root_fd, report, progress
        report.wrong_root = wrong_root(root_fd, root)
        self.want = want_namespaces(root_fd, pattern)
        self.clock = file_system_clock(root_fd)
        self.groups: dict[tuple[str, int, int], _Group] = {}
        self.configs: dict[str, bool] = {}
        self.work: queue.Queue[Entry | None] = queue.Queue(_QUEUE)
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    # ---- first walk

    def count(self) -> tuple[int, int]:
        """Files and bytes to read; notes what else there is and learns the block sizes."""
        files = size = 0
        buffer = new_buffer()
        for entry in self._limited():
            if entry.kind is not Kind.BLOCK:
                self._note(entry)
                continue
            files, size = files + 1, size + entry.size
            self._learn(entry, buffer)
            self.progress.counted(files, size)
        return files, size

    def _limited(self) -> Iterator[Entry]:
        blocks = 0
        for entry in scan(self.root_fd, self.want):
            blocks += entry.kind is Kind.BLOCK
            if self.report.limit and blocks > self.report.limit:
                return
            yield entry

    def _note(self, entry: Entry) -> None:
        report = self.report
        if entry.kind is Kind.TEMPORARY:
            report.temporaries += 1
            report.dead_temporaries += self.clock.now - entry.mtime >= layout.TEMP_DEAD_AFTER_S
        elif entry.kind is Kind.ERROR:
            report.errors[errno.errorcode.get(entry.code, str(entry.code))] += 1
            self.report.problem(entry.path, "unreadable", os.strerror(entry.code), code=entry.code)
        elif entry.kind is Kind.UNKNOWN:
            report.unknown[entry.what] += 1
            if entry.block is not None and self._is_ours(entry):
                report.in_the_way += 1
                self.report.problem(entry.path, "foreign", f"a {entry.what} in a block's place")

    def _is_ours(self, entry: Entry) -> bool:
        assert entry.namespace is not None
        name = entry.namespace.namespace
        if name not in self.configs:
            self.configs[name] = ConfigState(self.root, name).is_ours
        return self.configs[name]

    def _group(self, entry: Entry) -> _Group:
        assert entry.block is not None
        key = (entry.block.namespace, entry.block.part, entry.block.group)
        if key not in self.groups:
            self.groups[key] = _Group(self._is_ours(entry))
        return self.groups[key]

    def _learn(self, entry: Entry, buffer: Any) -> None:
        """Take the size of a file whose own footer agrees with it for that of its neighbours."""
        group = self._group(entry)
        if group.sizes or group.tries >= SIZE_TRIES or entry.size % layout.ALIGN or not entry.size:
            return
        group.tries += 1
        with suppress(OSError, FooterError):
            parent = open_parent(self.root_fd, entry.path)
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(os.path.basename(entry.path), flags, dir_fd=parent)
            finally:
                os.close(parent)
            try:
                raw = os.pread(fd, layout.FOOTER_BYTES, entry.size - layout.FOOTER_BYTES)
            finally:
                os.close(fd)
            if layout.file_bytes(unpack_footer(raw).payload_bytes) == entry.size:
                group.sizes.add(entry.size)

    # ---- second walk

    def read_all(self, threads: int) -> None:
        """Feed the threads; a KeyboardInterrupt stops them within one chunk."""
        workers = [threading.Thread(target=self._worker, daemon=True) for _ in range(max(1, threads))]
        for worker in workers:
            worker.start()
        try:
            for entry in self._limited():
                if entry.kind is Kind.BLOCK and not self._put(entry):
                    break
            for _ in workers:
                self._put(None)
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.2)  # a join without limit would not see the interrupt
        except BaseException:
            self.stop.set()
            for worker in workers:
                worker.join(1.0)
            raise
        if self.failure is not None:
            raise self.failure

    def _put(self, entry: Entry | None) -> bool:
        while not self.stop.is_set():
            with suppress(queue.Full):
                self.work.put(entry, timeout=0.2)
                return True
        return False

    def _worker(self) -> None:
        buffer = new_buffer()
        try:
            while not self.stop.is_set():
                with suppress(queue.Empty):
                    entry = self.work.get(timeout=0.2)
                    if entry is None:
                        return
                    self._check(entry, buffer)
        except StopError:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self.failure = error
            self.stop.set()

    def _check(self, entry: Entry, buffer: Any) -> None:
        told = 0

        def on_bytes(n: int) -> None:
            nonlocal told
            if self.stop.is_set():
                raise StopError
            told += n
            self.progress.advance(0, n, 0)

        check = self._judge(entry, buffer, on_bytes)
        is_damaged = check.verdict is Verdict.DAMAGED
        deleted = is_damaged and self.report.delete and self._delete(entry, check, buffer)
        with self.lock:
            self._count(entry, check, deleted)
        self.progress.advance(1, entry.size - told, int(is_damaged))

    def _judge(self, entry: Entry, buffer: Any, on_bytes: Callable[[int], None] = lambda _: None) -> Check:
        assert entry.block is not None
        group = self._group(entry)
        return check_block(
            self.root_fd, entry.path, entry.block.key, buffer,
            sizes=frozenset(group.sizes), namespace_is_ours=group.is_ours, on_bytes=on_bytes,
        )  # fmt: skip

    def _count(self, entry: Entry, check: Check, deleted: bool) -> None:
        report, verdict = self.report, check.verdict
        report.verdicts[verdict.value] += 1
        report.bytes_read += check.bytes
        if verdict is Verdict.DAMAGED and check.fault is not None:
            report.faults[check.fault.value] += 1
            report.deleted += deleted
            report.kept += report.delete and not deleted
        if verdict is Verdict.FOREIGN:
            if not self._group(entry).is_ours:
                return  # another program's cache on the same volume
            report.in_the_way += 1
        if verdict in (Verdict.DAMAGED, Verdict.UNREADABLE, Verdict.FOREIGN):
            fault = check.fault.value if check.fault is not None else ""
            self.report.problem(entry.path, verdict.value, check.detail, fault, check.code, deleted)

    def _delete(self, entry: Entry, first: Check, buffer: Any) -> bool:
        """Unlink what a fresh read proves damaged again, unless the name has come to mean another file."""
        again = self._judge(entry, buffer)
        proved = again.verdict is Verdict.DAMAGED and again.fault in PROOF_OF_DAMAGE
        if not proved or again.inode != first.inode:
            return False
        name = os.path.basename(entry.path)
        try:
            parent = open_parent(self.root_fd, entry.path)
            try:
                seen = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if (seen.st_dev, seen.st_ino) != again.inode:
                    return False
                os.unlink(name, dir_fd=parent)
            finally:
                os.close(parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            with self.lock:
                code = error.errno or 0
                self.report.errors[errno.errorcode.get(code, str(code))] += 1
                self.report.problem(entry.path, "not deleted", os.strerror(code), code=code)
            return False
        return True
