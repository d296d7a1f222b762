"""What `bench serve` is asked to do: parsed and checked once, frozen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from py_kvcache.bench.variants import Variant, parse_systems
from py_kvcache.bench.workloads import WORKLOADS, Shape
from py_kvcache.bench.workspace import MOST_ROUNDS, MOST_VALUES
from py_kvcache.errors import ConfigError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer*", "*.model", "vocab*")
_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
_ROOM = 16  # tokens of max_model_len beyond prompt and answer


@dataclass(frozen=True)
class ServeConfig:
    """Settings of one run.

    Args:
        model: folder with at least config.json; without weights they are random, without a tokenizer none is
            used (prompts are token ids).
        root: folder on the volume to measure; each system gets a folder of its own in it.
        out: folder for report, logs and pictures.
        systems: names and variants, as systems.parse_systems takes them.
        tokens: lengths of documents.
        engine: options of vLLM's engine, for every system.
        environment: variables of every system's process.
        options: options by system's name, beneath those of a variant.
        child_timeout_s: for one system in one round.
        settle_s: at most so long after each step for what is written behind the answers.
        budget_s: begin no further process when it would probably end later than that; 0 = no limit.
        resume: keep what ``out`` has of an earlier run with the same settings, and do the rest.
    """

    model: str
    root: str
    out: str
    systems: str = "recompute,prefix-cache,vllm-cpu-offload,vllm-fs-tier,lmcache,py-kvcache,floor"
    tokens: tuple[int, ...] = (10_000,)
    documents: int = 6
    rounds: int = 3
    workload: str = "long-doc"
    max_tokens: int = 1
    prewarm: int = 2
    seed: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    child_timeout_s: float = 900.0
    settle_s: float = 60.0
    budget_s: float = 0.0
    resume: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be run."""
        if self.workload not in WORKLOADS:
            raise ConfigError(f"{self.workload!r} is no workload; known: {', '.join(WORKLOADS)}")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise ConfigError(f"rounds must be from 1 to {MOST_ROUNDS:,}")
        if not 1 <= len(self.tokens) <= MOST_VALUES or min(self.tokens) < 1:
            raise ConfigError(f"tokens must be 1 to {MOST_VALUES} lengths of 1 or more")
        if len(set(self.tokens)) < len(self.tokens):
            raise ConfigError("tokens must be different lengths")
        if not 1 <= self.documents <= 1000 or not 0 <= self.prewarm <= 1000 or self.max_tokens < 1:
            raise ConfigError("documents must be from 1 to 1,000, prewarm from 0, max_tokens from 1")
        for name in ("child_timeout_s", "settle_s", "budget_s"):
            value = getattr(self, name)
            least = 0 if name == "budget_s" else 1
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name} must be {least} or more")
        if not Path(self.model, "config.json").is_file():
            raise ConfigError(f"{self.model} holds no config.json; give the folder of a model")
        if not self.out:
            raise ConfigError("out is empty; give a folder for the results")
        self.variants  # noqa: B018  # raises for a wrong one

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The systems, parsed."""
        return parse_systems(self.systems, self.options)

    @property
    def shape(self) -> Shape:
        """Of the workload."""
        vocabulary = self._model.get("vocab_size")
        if not isinstance(vocabulary, int) or vocabulary < 2:
            raise ConfigError(f"{self.model}/config.json has no vocab_size")
        return Shape(self.tokens, self.documents, self.prewarm, vocabulary, self.seed)

    @property
    def _model(self) -> dict[str, Any]:
        try:
            found = json.loads(Path(self.model, "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.model}/config.json is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{self.model}/config.json is no JSON object")
        inner = found.get("text_config")
        return {**found, **inner} if isinstance(inner, dict) else found

    def engine_options(self) -> dict[str, Any]:
        """For vLLM's engine, common to all systems."""
        folder = Path(self.model)
        options: dict[str, Any] = {
            "model": str(folder.resolve()),
            "seed": 0,
            "enable_prefix_caching": False,
            "max_model_len": max(self.tokens) + WORKLOADS[self.workload].growth + self.max_tokens + _ROOM,
            "disable_log_stats": False,  # own counters come with them
        }
        if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            options["load_format"] = "dummy"
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
            options["skip_tokenizer_init"] = True
        return {**options, **self.engine}

    def kv_bytes(self) -> int:
        """What all documents take as files, about; 0 if config.json does not tell (MLA, hybrids)."""
        model = self._model
        heads = model.get("num_key_value_heads") or model.get("num_attention_heads")
        width = model.get("head_dim")
        if not width and model.get("num_attention_heads"):
            width = model.get("hidden_size", 0) // model["num_attention_heads"]
        dtype = self.engine.get("dtype", "auto")
        name = str(model.get("torch_dtype") or model.get("dtype") if dtype == "auto" else dtype)
        layers = model.get("num_hidden_layers")
        if not (heads and width and layers) or "kv_lora_rank" in model or name not in _BYTES:
            return 0
        each = 2 * int(layers) * int(heads) * int(width) * _BYTES[name]  # of a token
        return each * sum(self.tokens) * (self.documents + self.prewarm)

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {**asdict(self), "tokens": list(self.tokens)}

    def same_work(self, other: Mapping[str, Any]) -> bool:
        """Whether a report's settings measured the same, so that their rounds can be joined."""
        mine = self.as_json()
        free = {"root", "out", "rounds", "systems", "child_timeout_s", "budget_s", "resume", "model"}
        return all(other.get(name) == value for name, value in mine.items() if name not in free)


def from_mapping(values: Mapping[str, Any]) -> ServeConfig:
    """Settings from a JSON object. Raises ConfigError for unknown, missing or wrong ones."""
    known = {item.name: item for item in fields(ServeConfig)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
    missing = [name for name in ("model", "root", "out") if not values.get(name)]
    if missing:
        raise ConfigError(f"{missing[0]} is missing")
    for name, value in values.items():
        if not _fits(str(known[name].type), value):
            raise ConfigError(f"{name} cannot be {json.dumps(value)[:60]}")
    taken = dict(values)
    if "tokens" in taken:
        taken["tokens"] = tuple(taken["tokens"])
    return ServeConfig(**taken)


def _fits(kind: str, value: object) -> bool:
    """Whether a JSON value can be of the type with that name."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind.startswith("Mapping"):
        return isinstance(value, Mapping)
    if kind.startswith("tuple"):
        return isinstance(value, list | tuple) and all(
            isinstance(one, int) and not isinstance(one, bool) for one in value
        )
    return {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": number,
        "float": number or isinstance(value, float),
    }[kind]
