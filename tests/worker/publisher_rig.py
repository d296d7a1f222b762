"""A publisher on real files, and the calls a reactor makes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from py_kvcache.layout import block_path, file_bytes, part_dir
from py_kvcache.worker.checksum import seal_block, verify_block
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import FileSettings
from py_kvcache.worker.publish import Publisher, PublishSettings

NAMESPACE = "m_0123456789ab"
MIB = 1 << 20
PAYLOAD = MIB - 4096  # so that a file is 1 MiB


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Bench:
    """A publisher, and the calls a reactor makes, one after the other."""

    def __init__(self, root, ops=None, **settings):
        self.root, self.ops, self.clock = str(root), ops or FileOps(), Clock()
        self.wake = threading.Semaphore(0)
        settings = {"store_stop_at": 1.0, "store_resume_at": 1.0} | settings
        settings = PublishSettings(FileSettings(self.root), **settings)
        self.publisher = Publisher(self.ops, settings, self.wake.release, self.clock)
        self.token = 0

    def final(self, number):
        return block_path(part_dir(self.root, NAMESPACE, 0), self.key(number))

    @staticmethod
    def key(number):
        return number.to_bytes(32, "little") + bytes(4)

    def data(self, number, payload=PAYLOAD):
        buffer = bytearray(number.to_bytes(4, "big") * (file_bytes(payload) // 4))
        seal_block(memoryview(buffer), self.key(number), 0, payload, enabled=True)
        return buffer

    def answer(self):
        assert self.wake.acquire(timeout=20), "no result came"
        (result,) = self.publisher.results()
        assert result.token == self.token
        return result

    def create(self, number, nbytes=MIB):
        self.token += 1
        self.publisher.create(self.token, self.final(number), nbytes)
        return self.answer()

    def commit(self, created, number):
        self.token += 1
        self.publisher.commit(self.token, created.fd, created.temp, self.final(number), 0)
        return self.answer()

    def abandon(self, created, error=None):
        self.token += 1
        self.publisher.abandon(self.token, created.fd, created.temp, error)
        return self.answer()

    def store(self, number, payload=PAYLOAD):
        """Create, write, commit or abandon; the last result, or the errno of the write."""
        created = self.create(number, file_bytes(payload))
        if created.error or created.exists:
            return created
        rest = memoryview(self.data(number, payload))
        try:
            while rest:
                rest = rest[os.write(created.fd, rest) :]
        except OSError as error:
            self.abandon(created)
            return error
        return self.commit(created, number)

    def examine(self, number, payload=PAYLOAD):
        self.publisher.quarantine(self.final(number), self.key(number), payload)
        assert self.wake.acquire(timeout=20), "no outcome came"
        (outcome,) = self.publisher.outcomes()
        return outcome

    def is_hit(self, number, payload=PAYLOAD):
        data = memoryview(Path(self.final(number)).read_bytes())
        return verify_block(data, self.key(number), payload, enabled=True) == (None, "")

    def files(self):
        return sorted(str(path) for path in Path(self.root).rglob("*") if path.is_file())


def outcome_of(result):
    return (
        (result.error.fault, result.error.code) if result.error else ("exists" if result.exists else "done")
    )
