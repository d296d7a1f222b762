"""`py-kvcache`, and `python -m py_kvcache` where no script was installed (payload on PYTHONPATH)."""

from __future__ import annotations

import sys

_NEEDED = ("numpy", "blake3", "pydantic", "rich", "typer")  # the extra "cli"; a vLLM environment has them all


def main() -> None:
    """The command line."""
    try:
        from py_kvcache.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        sys.exit(
            f"py-kvcache: {error.name} is missing here. Run this in vLLM's environment, or: pip install "
            "'py-kvcache[cli]' (from a checkout: pip install '/path/to/this/checkout[cli]')"
        )
    run()


if __name__ == "__main__":
    main()
