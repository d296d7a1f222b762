"""The process of one system in one round: builds the engine, runs a workload's steps, writes JSON lines.

Started by children.py with the path of a task (JSON). Answers go to the file that the task names, one line
an event, so that what was measured before a crash is kept; whatever vLLM prints goes to its log.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from py_kvcache.bench.children import PARENT
from py_kvcache.bench.procio import at_rest, difference, folder_bytes, read_io
from py_kvcache.bench.workloads import WORKLOADS, Document, Shape, Step

_NUDGE_TOKENS = 8  # fewer than any block has, so that no cache takes notice
_PR_SET_PDEATHSIG = 1

# All that counts is stored when the steps are done, and an orderly end takes vLLM many seconds of a GPU's
# time, begun by the engine's destructor: so it is kept, and who started this process kills what is left.
_KEPT: list[Any] = []

Emit = Callable[[dict[str, Any]], None]


def die_with_parent() -> None:
    """End this process and all that it started once who started it is gone, however that ended.

    It must lead its process group. vLLM's own processes would outlive it: they watch for an orderly end.
    """
    signal.signal(signal.SIGTERM, lambda _number, _frame: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have gone while Python started; then nobody tells.
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os._exit(1)


def open_events(path: str) -> Emit:
    """A function that appends one event to the file, at once."""

    def emit(event: dict[str, Any]) -> None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    return emit


def counters_of(prefix: str) -> dict[str, float]:
    """Counters of this process that begin so, by name and by those labels that tell more than the engine."""
    if not prefix:
        return {}
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if metric.type != "counter" or not metric.name.startswith(prefix):
            continue
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                name = metric.name + (
                    f"{{{','.join(f'{k}={v}' for k, v in labels.items())}}}" if labels else ""
                )
                found[name] = found.get(name, 0.0) + sample.value
    return found


class _Measurement:
    """One engine and what is asked of it."""

    def __init__(self, engine: Any, task: dict[str, Any], emit: Emit) -> None:
        from vllm import SamplingParams

        self._engine, self._task, self._emit = engine, task, emit
        self._shape = Shape(**task["shape"])
        self._asked = 0
        self._sampling = {
            tokens: SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for tokens in (2, task["max_tokens"])
        }
        self._begin = time.perf_counter()

    async def _ask(self, prompt: list[int], max_tokens: int) -> tuple[float, float, Any]:
        """Seconds to the first and the last output from submission, and the last output."""
        self._asked += 1
        begin = time.perf_counter()
        first = None
        last: Any = None
        outputs = self._engine.generate(
            {"prompt_token_ids": prompt}, self._sampling[max_tokens], f"bench-{self._asked}"
        )
        async for output in outputs:
            if first is None:
                first = time.perf_counter() - begin
            last = output
        if first is None:
            raise RuntimeError("the engine ended a request without any output")
        return first, time.perf_counter() - begin, last

    async def _measure(self, document: Document, prompt: list[int], begin: float) -> dict[str, Any]:
        submitted = time.perf_counter() - begin
        ttft, seconds, output = await self._ask(prompt, self._task["max_tokens"])
        return {
            "document": document.number,
            "submitted_s": submitted,
            "ttft_s": ttft,
            "seconds": seconds,
            "prompt_tokens": len(prompt),
            "cached_tokens": output.num_cached_tokens,
            "output_tokens": list(output.outputs[0].token_ids),
        }

    async def _nudge(self) -> None:
        prompt = [1 + self._asked % (self._shape.vocabulary - 1)] * _NUDGE_TOKENS
        await self._ask(prompt, 2)

    async def _settle(self) -> bool:
        """Wait for what the system writes behind the answers."""
        if not self._task["settle_s"]:
            return True
        folder, wanted = self._task["folder"], [self._task["reads"], self._task["writes"]]

        def sample() -> tuple[float, ...]:
            io = read_io(os.getpid()) or {}
            counters = counters_of(self._task["counters"])
            moved = (counters.get(name, 0.0) for name in wanted)
            return (io.get("wchar", 0), io.get("write_bytes", 0), folder_bytes(folder), *moved)

        return await at_rest(sample, self._nudge, asyncio.sleep, self._task["settle_s"])

    async def run(self, step: Step) -> None:
        """One step, its rest, and one event with all of it."""
        self._emit({"event": "begin", "text": step.text})
        prompts = [document.token_ids(self._shape) for document in step.documents]
        io, counters = read_io(os.getpid()), counters_of(self._task["counters"])
        began, begin = time.perf_counter() - self._begin, time.perf_counter()
        room = asyncio.Semaphore(step.running or len(prompts))

        async def in_turn(document: Document, prompt: list[int]) -> dict[str, Any]:
            async with room:  # first come, first served
                return await self._measure(document, prompt, begin)

        requests = await asyncio.gather(*map(in_turn, step.documents, prompts))
        seconds = time.perf_counter() - begin
        during = difference(read_io(os.getpid()), io)
        settled = await self._settle()
        after = counters_of(self._task["counters"])
        self._emit(
            {
                "event": "phase",
                "tokens": step.tokens,
                "phase": step.phase,
                "began_s": began,
                "seconds": seconds,
                "requests": requests,
                "settled": settled,
                "settle_s": time.perf_counter() - begin - seconds,
                "io_until_answered": during,
                "io": difference(read_io(os.getpid()), io),
                "counters": {name: value - counters.get(name, 0.0) for name, value in after.items()},
                "folder_bytes": folder_bytes(self._task["folder"]),
            }
        )


def start_engine(options: dict[str, Any]) -> Any:
    """vLLM's asynchronous engine, its core in a process of its own, as a server has it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if "kv_transfer_config" in options:
        options = {**options, "kv_transfer_config": KVTransferConfig(**options["kv_transfer_config"])}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


def _facts() -> dict[str, Any]:
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": str(torch.__version__)}


async def _main(task: dict[str, Any], emit: Emit) -> None:
    begin = time.perf_counter()
    engine = start_engine(task["engine"])
    _KEPT.append(engine)
    emit({"event": "started", "startup_s": time.perf_counter() - begin, **_facts()})
    measurement = _Measurement(engine, task, emit)
    for step in WORKLOADS[task["workload"]].steps(Shape(**task["shape"])):
        await measurement.run(step)
    emit({"event": "done"})


def main(arguments: Sequence[str]) -> int:
    """See the module's text."""
    die_with_parent()
    task = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    emit = open_events(task["events"])
    asyncio.run(_main(task, emit))
    return 0


def _end(code: int) -> NoReturn:
    """At once: Python's own end takes ten seconds with all that vLLM imports, and may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    _end(1)


def end_at_once(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a process's main function and end, however it ends, without Python's own end."""
    sys.excepthook = _fail
    _end(main(sys.argv[1:]))


if __name__ == "__main__":
    end_at_once(main)
