"""How full a volume is, by the same count as the store path's watermark."""

from __future__ import annotations

import os

from py_kvcache.worker.watermark import Space


def volume_space(fs: os.statvfs_result) -> Space:
    """Used and usable bytes and inodes, without what is kept for root."""
    return Space.of(
        frsize=fs.f_frsize, blocks=fs.f_blocks, bfree=fs.f_bfree, bavail=fs.f_bavail,
        files=fs.f_files, ffree=fs.f_ffree,
    )  # fmt: skip
