"""An engine that answers what it is asked, for as long as it is asked: the child's side of asking.py.

Started with the path of a task (JSON) and the number of a descriptor for its answers; a line of standard
input is a question, an answer is a line, both JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from py_kvcache.bench.procio import at_rest, folder_bytes
from py_kvcache.bench.serve_worker import counters_of, die_with_parent, end_at_once, start_engine
from py_kvcache.bench.workloads import Document, Shape

_NUDGE_TOKENS = 8  # fewer than any block has, so that no cache takes notice

Answer = Callable[[dict[str, Any]], None]


class _Asked:
    def __init__(self, engine: Any, task: dict[str, Any]) -> None:
        self._engine, self._task, self._shape = engine, task, Shape(**task["shape"])
        self._asked = 0

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """All prompts at once; then, if the question wants that, until nothing is written any more."""
        prompts = [Document(**document).token_ids(self._shape) for document in question["documents"]]
        allowed: dict[str, bool] = {name: question[name] for name in ("load", "store") if name in question}
        requests = await asyncio.gather(*(self._ask(prompt, allowed) for prompt in prompts))
        settled = await self._settle(question["settle_s"]) if question.get("settle_s") else None
        return {
            "requests": requests,
            "settled": settled,
            "folder_bytes": folder_bytes(self._task["folder"]),
            "counters": counters_of(self._task["counters"]),
        }

    async def _ask(self, prompt: list[int], allowed: dict[str, bool]) -> dict[str, Any]:
        from vllm import SamplingParams

        self._asked += 1
        ours = {"extra_args": {"kv_transfer_params": {"py_kvcache": allowed}}} if allowed else {}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self._task["max_tokens"], ignore_eos=True, detokenize=False, **ours
        )
        begin, first, last = time.perf_counter(), 0.0, None
        name = f"asked-{self._asked}"
        async for output in self._engine.generate({"prompt_token_ids": prompt}, sampling, name):
            first = first or time.perf_counter() - begin
            last = output
        if last is None:
            raise RuntimeError("the engine ended a request without any output")
        return {
            "ttft_s": first,
            "cached_tokens": last.num_cached_tokens,
            "output_tokens": list(last.outputs[0].token_ids),
        }

    async def _settle(self, at_most_s: float) -> bool:
        async def nudge() -> None:
            await self._ask([1 + self._asked % (self._shape.vocabulary - 1)] * _NUDGE_TOKENS, {})

        def sample() -> tuple[float, ...]:
            counted = sum(counters_of(self._task["counters"]).values())
            return float(folder_bytes(self._task["folder"])), counted

        return await at_rest(sample, nudge, asyncio.sleep, at_most_s)


async def _serve(task: dict[str, Any], answer: Answer) -> None:
    engine = start_engine(task["engine"])
    cache, longest = engine.vllm_config.cache_config, engine.vllm_config.model_config.max_model_len
    answer({"kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size, "longest": longest})
    asked, loop = _Asked(engine, task), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answer(await asked.answer(json.loads(line)))


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
