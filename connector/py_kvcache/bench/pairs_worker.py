"""One of the two engines of bench/pairs.py: answers one request at a time, for as long as it is asked.

Started with the path of a task (JSON) and the number of a descriptor for its answers; a line of standard
input is the number of a document, an answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from py_kvcache.bench.procio import folder_bytes
from py_kvcache.bench.serve_worker import counters_of, die_with_parent, end_at_once, start_engine
from py_kvcache.bench.workloads import Document, Shape


async def _serve(task: dict[str, Any], answer: Any) -> None:
    from vllm import SamplingParams

    shape = Shape(**task["shape"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False
    )
    engine = start_engine(task["engine"])
    answer({"ready": True})
    loop = asyncio.get_running_loop()
    asked = 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number, asked = int(line), asked + 1
        prompt = {"prompt_token_ids": Document("document", number, shape.tokens[0]).token_ids(shape)}
        begin, first, last = time.perf_counter(), 0.0, None
        async for output in engine.generate(prompt, sampling, f"pairs-{asked}"):
            first = first or time.perf_counter() - begin
            last = output
        if last is None:
            raise RuntimeError("the engine ended a request without any output")
        answer(
            {
                "ttft_s": first,
                "cached_tokens": last.num_cached_tokens,
                "output_tokens": list(last.outputs[0].token_ids),
                "folder_bytes": folder_bytes(task["folder"]),
                "counters": counters_of(task["counters"]),
            }
        )


def main(arguments: Sequence[str]) -> int:
    """See the module's text."""
    die_with_parent()
    task = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    out = os.fdopen(int(arguments[1]), "w", encoding="utf-8")

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    asyncio.run(_serve(task, answer))
    return 0


if __name__ == "__main__":
    end_at_once(main)
