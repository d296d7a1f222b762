"""The manager as vLLM's stock scheduler calls it, and a prober that answers when the test says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from py_kvcache import metrics
from py_kvcache.config import parse_config
from py_kvcache.namespace import Spaces
from py_kvcache.plan import Failures, WorkerReport
from py_kvcache.scheduler.manager import Manager
from py_kvcache.scheduler.probe import ChainAnswer
from py_kvcache.vllm_api import LookupResult

HIT, MISS, RETRY, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING
TOKENS = 16  # of one block here


def keys(count: int, chain: int = 0) -> list[bytes]:
    return [bytes([chain]) * 28 + n.to_bytes(4, "big") + bytes(4) for n in range(count)]


class HandProber:
    """Keeps questions and jobs until the test lets them go."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.jobs: list[Any] = []
        self.ready: list[ChainAnswer] = []
        self.ended = False
        self.waits = 0

    def wait(self, timeout_s: float) -> None:
        self.waits += 1

    def ask(self, question: Any) -> None:
        self.questions.append(question)

    def run(self, job: Any) -> None:
        self.jobs.append(job)

    def answers(self) -> list[ChainAnswer]:
        ready, self.ready = self.ready, []
        return ready

    def shutdown(self) -> None:
        self.ended = True

    def reply(self, present: int, code: int = 0) -> None:
        question = self.questions.pop(0)
        self.ready.append(ChainAnswer(question.ticket, min(present, len(question.keys)), code))


class Engine:
    """What vLLM's scheduler does with the manager: passes of look-ups, stores, completions."""

    def __init__(
        self,
        root: Path | str = "/cache",
        *,
        known: bool = True,
        prober: Any = None,
        ranks: int = 1,
        **extra: Any,
    ) -> None:
        self.now = 1_000.0
        self.prober = prober or HandProber()
        self.spaces = Spaces({"model": "org/model"})
        config = parse_config({"root": str(root), "block_tokens": TOKENS, **extra}, {})
        self.manager = Manager(
            config, self.spaces, (0,), 2, ranks, prober=self.prober, clock=lambda: self.now
        )
        if known:
            self.manager.set_layouts([{"slab": False}])

    def admit(self, name: str, chain: list[bytes], params: Any = None, lora: Any = None, **more: Any) -> Any:
        hashes = [half for key in chain for half in (b"half of " + key[:24], key[:-4])]
        tokens = len(chain) * TOKENS + 1
        request = SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            num_prompt_tokens=tokens,
            num_tokens=tokens,
            num_computed_tokens=0,
            lora_request=lora,
            **more,
        )
        self.manager.admit(request)
        context = SimpleNamespace(req_id=name, kv_transfer_params=params)
        self.manager.on_new_request(context)
        return SimpleNamespace(context=context, keys=chain, request=request)

    def ask(self, request: Any) -> list[LookupResult]:
        """One pass as the stock scheduler does it: up to the first MISS."""
        name, results = request.context.req_id, []
        self.manager.begin_lookup(name, 0)
        for key in request.keys:
            results.append(self.manager.lookup(key, request.context))
            if results[-1] is MISS:
                break
        waits = {RETRY, PENDING} & set(results)
        self.manager.end_lookup(name, None if waits else results.count(HIT) * TOKENS)
        return results

    def store(self, request: Any, some: list[bytes] | None = None) -> list[bytes]:
        output = self.manager.prepare_store(request.keys if some is None else some, request.context)
        assert list(output.store_spec.keys) == output.keys_to_store
        return output.keys_to_store

    def fail_load(self, request: Any, faults: dict[bytes, str]) -> None:
        space = self.manager.prepare_load(list(faults), request.context).space
        self.manager.note_report(WorkerReport(failed_loads={1: Failures(space, faults)}))

    def finish(self, request: Any) -> None:
        self.manager.on_request_finished(request.context)
        for _ in range(2):
            self.manager.on_schedule_end(None)

    def counted(self, metric: metrics.Metric, *labels: str) -> float:
        return self.manager._samples.counters.get((metric.name, labels), 0)


def found(engine: Engine, request: Any, present: int) -> list[LookupResult]:
    """Ask, let the probe find this many, ask again."""
    assert set(engine.ask(request)) == {RETRY}
    engine.prober.reply(present)
    return engine.ask(request)
