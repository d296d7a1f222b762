"""What a calibration asks of its engine: to compute a prompt, to store it, to load it."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from py_kvcache.bench.asking import AskedEngine
from py_kvcache.bench.serve_config import ServeConfig
from py_kvcache.bench.variants import parse_systems
from py_kvcache.config import DEFAULT_BLOCK_TOKENS
from py_kvcache.errors import ConfigError, KvCacheError
from py_kvcache.layout import parse_namespace_dir

_SETTLE_S: Final = 120.0
_LEAST_BUDGET_S: Final = 10.0
_NUDGE: Final[Mapping[str, Any]] = {"documents": [{"role": "nudge", "number": 0, "tokens": 8}]}
_PREFIX: Final = "vllm:py_kvcache_"
_OWN = 1  # tokens behind a cached prefix: vLLM always computes the last one


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of one calibration.

    Args:
        serve: model, root, out, the engine's options and environment.
        settings: ours, as in kv_connector_extra_config; root and gate are replaced.
        budget_s: no visit is begun that would probably end later; starting engines counts.
        concurrency: requests at once; one set of curves for each.
        longest: tokens of a prefix; 0 for the engine's limit.
        resume: go on with the samples that ``out`` has, if they are of the same engine.
    """

    serve: ServeConfig
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget_s: float = 600.0
    concurrency: tuple[int, ...] = (1,)
    longest: int = 0
    resume: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be run."""
        if self.budget_s < _LEAST_BUDGET_S:
            raise ConfigError(
                f"the budget must be {_LEAST_BUDGET_S:g} s or more; starting vLLM alone takes it"
            )
        if not self.concurrency or min(self.concurrency) < 1 or max(self.concurrency) > 256:
            raise ConfigError("concurrency must be numbers from 1 to 256")
        if len(set(self.concurrency)) < len(self.concurrency):
            raise ConfigError("concurrency must be different numbers")
        if self.longest < 0:
            raise ConfigError("longest must be 0 or more tokens")

    @property
    def block_tokens(self) -> int:
        """Of one file."""
        return int(self.settings.get("block_tokens", DEFAULT_BLOCK_TOKENS))


@dataclass(frozen=True)
class Timed:
    """One measurement: mean time to first token, and of the load behind it how long it was under way."""

    ttft_s: float
    copy_s: float | None
    from_disk: bool


class Asked:
    """One engine; documents of the same length and number are the same prompt.

    Args:
        ready: the engine's first answer.
    """

    def __init__(self, engine: AskedEngine, folder: str, block_tokens: int, ready: Mapping[str, int]) -> None:
        self._engine, self._folder, self._block = engine, folder, block_tokens
        self.kv_tokens, self.longest = ready["kv_tokens"], ready["longest"]
        self._stored: set[tuple[int, int]] = set()  # prefix, how many documents
        self._fresh = 0

    def warm_up(self) -> None:
        """The first request of each kind takes several times as long as others."""
        for _ in range(2):
            self.compute(self._block, 1)
            self.store(self._block, 1)
            self.load(self._block, 1)

    def compute(self, prefix: int, count: int) -> Timed:
        """So many fresh prompts at once, neither loaded nor stored."""
        documents = [self._document("fresh", self._fresh + n, prefix) for n in range(count)]
        self._fresh += count
        answer = self._ask(documents, load=False, store=False)
        if any(request["cached_tokens"] for request in answer["requests"]):
            raise KvCacheError("a prompt that is new was found in a cache: turn prefix caching off")
        return Timed(_mean(answer), None, False)

    def store(self, prefix: int, count: int) -> None:
        """Have the documents in storage; nothing happens if they are."""
        if (prefix, count) in self._stored:
            return
        documents = [self._document("stored", n, prefix) for n in range(count)]
        self._ask(documents, load=False, store=True, settle_s=_SETTLE_S)
        self._stored.add((prefix, count))

    def load(self, prefix: int, count: int, behind: int = _OWN) -> Timed:
        """The stored documents, each with so many tokens more. Raises KvCacheError if they are not loaded."""
        documents = [self._document("stored", n, prefix) | {"grown": behind - _OWN} for n in range(count)]
        before = self._count()
        answer = self._ask(documents, load=True, store=False)
        after = self._count()
        cached = [request["cached_tokens"] or 0 for request in answer["requests"]]
        if min(cached) < prefix:
            raise KvCacheError(
                f"of {prefix} tokens that were stored only {min(cached)} were loaded ({_troubles(after)}); "
                "look into the engine's log in the results' folder"
            )
        seconds = after.get("load_seconds", 0.0) - before.get("load_seconds", 0.0)
        reads = after.get("load_blocks", 0.0) - before.get("load_blocks", 0.0)
        spared = _without_read(after) - _without_read(before)
        return Timed(_mean(answer), seconds / count if seconds > 0 else None, reads > spared)

    @property
    def block_bytes(self) -> int:
        """Of one block of one rank, as a rank's counters have it."""
        counters = self._count()
        blocks = counters.get("store_blocks", 0.0)
        if not blocks:
            raise KvCacheError("nothing was stored; look into the engine's log in the results' folder")
        return round(counters["store_bytes"] / blocks)

    def digest(self) -> str:
        """Of the engine, as thresholds for it carry it."""
        for name in os.listdir(self._folder):
            parsed = parse_namespace_dir(name)
            if parsed is not None:
                return parsed.digest[:16]
        raise KvCacheError("the engine has made no namespace; look into its log in the results' folder")

    def _document(self, role: str, number: int, prefix: int) -> dict[str, Any]:
        return {"role": role, "number": number, "tokens": prefix + _OWN}

    def _ask(self, documents: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
        return self._engine.ask({"documents": documents, **how})

    def _count(self) -> dict[str, float]:
        """The counters now: they come with an answer, so something short is asked."""
        counters: dict[str, float] = self._engine.ask({**_NUDGE, "load": False, "store": False})["counters"]
        return {name.removeprefix(_PREFIX): value for name, value in counters.items()}


@contextlib.contextmanager
def asked_engine(
    config: MeasureConfig, folder: str, settings: Mapping[str, Any], tell: Callable[[str], None]
) -> Iterator[Asked]:
    """The user's engine with our connector, warm; ``settings`` stand above the user's."""
    Path(config.serve.out).mkdir(parents=True, exist_ok=True)
    place = os.path.join(folder, f"cache-{len(os.listdir(folder))}")
    os.mkdir(place)
    ours = {**config.settings, **settings, "gate": "off", "preload": "off", "root": place}
    (variant,) = parse_systems("py-kvcache", {"py-kvcache": ours})
    options = config.serve.engine_options()
    if "max_model_len" not in config.serve.engine:
        del options["max_model_len"]  # the model's own, as in the engine that is calibrated for
    tell("starting vLLM")
    with contextlib.closing(
        AskedEngine(config.serve, variant, place, Path(config.serve.out), options)
    ) as engine:
        asked = Asked(engine, place, config.block_tokens, engine.wait())
        tell("warming up")
        asked.warm_up()
        yield asked


def _mean(answer: Mapping[str, Any]) -> float:
    return statistics.fmean(request["ttft_s"] for request in answer["requests"])


def _without_read(counters: Mapping[str, float]) -> float:
    return sum(value for name, value in counters.items() if name.startswith("loads_without_read"))


def _troubles(counters: Mapping[str, float]) -> str:
    """Counters that say why."""
    signs = ("load_failures", "stores_dropped", "store_failures", "lookups")
    told = [f"{name} {value:g}" for name, value in counters.items() if name.startswith(signs) and value]
    return "; ".join(told) or "no counter tells why"
