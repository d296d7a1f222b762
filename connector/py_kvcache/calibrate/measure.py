"""`py-kvcache calibrate measure`: time to first token of prompts that are computed, and that are loaded.

One engine of the user's with our connector, and a folder of its own on the real volume that is removed
afterwards. Computing is measured with the connector on and declining. Results are written after every visit:
a run that is cut off keeps what it has, and the next one goes on from there.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from py_kvcache.bench.hostfacts import gpu_facts, versions
from py_kvcache.bench.workspace import Progress, machine, no_progress, workspace
from py_kvcache.calibrate.asked import Asked, MeasureConfig, Timed, asked_engine
from py_kvcache.calibrate.visits import Seen, end_of_storage, first_grid, next_prefix, suffix_points
from py_kvcache.errors import ConfigError
from py_kvcache.models import CALIBRATION_SCHEMA, Calibration, Sample, SampleSet, read_calibration

FILE_NAME: Final = "calibration.json"
SCHEMA: Final = "py-kvcache.calibrate.measure/1"
_SUFFIX_ROUNDS, _MEMORY_ROUNDS = 3, 3
_MEMORY_SHARE = 0.3
_STEPS = 1000  # of the progress bar: thousandths of the budget
_ANOTHER = "give another folder, or --no-resume to replace it"


def run(config: MeasureConfig, *, on_progress: Progress = no_progress) -> Calibration:
    """Measure; the result is in ``out``/calibration.json too.

    Raises:
        ConfigError: impossible settings. KvCacheError: the engine ended, or what it stored was not loaded.
        RootError: root cannot be used or is full. OSError: for ``out``.
    """
    out = Path(config.serve.out)
    out.mkdir(parents=True, exist_ok=True)
    measurement = _Measurement(config, out / FILE_NAME, on_progress)
    with workspace(config.serve.root, 0) as folder:
        measurement.from_disk(folder)
        if config.settings.get("memory_bytes"):
            measurement.from_memory(folder)
    return measurement.save()


class _Measurement:
    def __init__(self, config: MeasureConfig, path: Path, on_progress: Progress) -> None:
        self._config, self._path, self._on_progress = config, path, on_progress
        self._last = time.monotonic() + config.budget_s
        self._share = _MEMORY_SHARE if config.settings.get("memory_bytes") else 0.0
        self._end = self._last
        self._samples: dict[int, list[Sample]] = {number: [] for number in config.concurrency}
        self._skipped: list[str] = []
        self._facts: dict[str, Any] = {}
        self._costs: dict[int, dict[int, float]] = defaultdict(dict)
        self._earlier = self._load_earlier() if config.resume else None

    # ---- results

    def _load_earlier(self) -> Calibration | None:
        if not self._path.exists():
            return None
        earlier = read_calibration(str(self._path))
        if earlier.arguments != self._arguments():
            raise ConfigError(f"{self._path} was measured with other settings; {_ANOTHER}")
        return earlier

    def _arguments(self) -> dict[str, Any]:
        serve = self._config.serve
        settings = {name: value for name, value in self._config.settings.items() if name != "root"}
        return {"model": os.path.abspath(serve.model), "engine": dict(serve.engine), "settings": settings}

    def _calibration(self) -> Calibration:
        sets = [
            SampleSet(concurrency=number, samples=tuple(samples))
            for number, samples in self._samples.items()
            if samples
        ]
        root = self._config.serve.root
        return Calibration.model_validate(
            {
                "schema": CALIBRATION_SCHEMA,
                **self._facts,
                "block_tokens": self._config.block_tokens,
                "machine": {**machine(root), **gpu_facts(), "versions": versions()},
                "arguments": self._arguments(),
                "skipped": tuple(self._skipped),
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "sets": tuple(sets),
            }
        )

    def save(self) -> Calibration:
        """Write what there is, whole or not at all."""
        calibration = self._calibration()
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(calibration.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._path)
        return calibration

    # ---- measuring

    def from_disk(self, folder: str) -> None:
        """Curves of computing and of loading from storage, and the checks of suffixes."""
        began = time.monotonic()
        with asked_engine(self._config, folder, {"memory_bytes": 0}, self._tell) as asked:
            now = time.monotonic()
            if self._share:
                self._end = end_of_storage(now, self._last, now - began, self._share)
            self._learn_engine(asked)
            for number in self._config.concurrency:
                self._set(asked, number)

    def from_memory(self, folder: str) -> None:
        """Of loading from the memory tier, at the lengths that were measured from storage."""
        self._end = self._last
        with asked_engine(self._config, folder, {}, self._tell) as asked:
            for number in self._config.concurrency:
                prefixes = sorted({s.prefix for s in self._samples[number] if s.kind == "disk"})
                for round_ in range(_MEMORY_ROUNDS):
                    for prefix in prefixes:
                        if self._end - time.monotonic() < self._costs[number].get(prefix, 0.0):
                            continue
                        self._tell(f"{prefix} tokens from memory")
                        asked.store(prefix, number)
                        asked.load(prefix, number)
                        timed = asked.load(prefix, number)
                        if not timed.from_disk:
                            self._add(number, "memory", prefix + 1, prefix, timed, round_)
                self.save()

    def _learn_engine(self, asked: Asked) -> None:
        self._facts = {
            "engine": asked.digest(),
            "block_bytes": asked.block_bytes,
            "ranks": int(self._config.serve.engine.get("tensor_parallel_size", 1)),
            "longest": asked.longest,
        }
        earlier = self._earlier
        if earlier is None:
            return
        if earlier.engine != self._facts["engine"]:
            raise ConfigError(
                f"{self._path} is of engine {earlier.engine}, this one is {self._facts['engine']} (another "
                f"model, version or layout); {_ANOTHER}"
            )
        for known in earlier.sets:
            if known.concurrency in self._samples:
                self._samples[known.concurrency] += known.samples

    def _set(self, asked: Asked, number: int) -> None:
        """All visits with so many requests at once."""
        block = self._config.block_tokens
        wanted = self._config.longest or self._facts["longest"]
        longest = min(wanted, self._facts["longest"] - 2, asked.kv_tokens // number - block)
        if longest < wanted - block:
            self._skipped.append(
                f"{number} at once: prefixes above {longest} tokens do not fit into the engine"
            )
        grid = first_grid(block, longest)
        if not grid:
            self._skipped.append(f"{number} at once: not one block of {block} tokens fits")
            return
        while True:
            seen, left = self._seen(number), self._end - time.monotonic()
            prefix = next_prefix(seen, grid, block, left, self._predicted(number, grid))
            if prefix is None:
                break
            self._visit(asked, number, prefix, seen[prefix].rounds if prefix in seen else 0)
        missing = [prefix for prefix in grid if prefix not in self._seen(number)]
        if missing:
            self._skipped.append(f"{number} at once: no time was left for prefixes of {missing} tokens")
        for prefix, suffix in suffix_points(self._seen(number), block, longest):
            for round_ in range(_SUFFIX_ROUNDS):
                if self._end - time.monotonic() < self._costs[number].get(prefix, 0.0):
                    return
                self._tell(f"{suffix} tokens behind {prefix}")
                timed = asked.load(prefix, number, behind=suffix)
                self._add(number, "suffix", prefix + suffix, prefix, timed, round_)
        self.save()

    def _visit(self, asked: Asked, number: int, prefix: int, round_: int) -> None:
        self._tell(f"{prefix} tokens, round {round_ + 1}" + (f", {number} at once" if number > 1 else ""))
        began = time.monotonic()
        asked.store(prefix, number)
        # Whoever comes second finds a warmer machine.
        for kind in ("compute", "disk") if round_ % 2 == 0 else ("disk", "compute"):
            timed = asked.compute(prefix, number) if kind == "compute" else asked.load(prefix, number)
            self._add(number, kind, prefix + 1, prefix if kind == "disk" else 0, timed, round_)
        self._costs[number][prefix] = time.monotonic() - began
        self.save()

    def _add(self, number: int, kind: str, tokens: int, prefix: int, timed: Timed, round_: int) -> None:
        seconds = timed.ttft_s
        if kind == "suffix":
            # As if the prefix had lain in GPU memory: what its load took is told beside it.
            seconds = max(seconds - (timed.copy_s or 0.0), 1e-9)
        self._samples[number].append(
            Sample.model_validate(
                {
                    "kind": kind, "tokens": tokens, "prefix": prefix, "seconds": seconds,
                    "copy_s": timed.copy_s, "round": round_,
                }
            )
        )  # fmt: skip

    def _seen(self, number: int) -> dict[int, Seen]:
        compute: dict[int, list[float]] = defaultdict(list)
        load: dict[int, list[float]] = defaultdict(list)
        for sample in self._samples[number]:
            if sample.kind == "compute":
                compute[sample.tokens - 1].append(sample.seconds)
            elif sample.kind == "disk":
                load[sample.prefix].append(sample.seconds)
        return {
            prefix: Seen(tuple(compute[prefix]), tuple(load[prefix]))
            for prefix in compute.keys() & load.keys()
        }

    def _predicted(self, number: int, grid: tuple[int, ...]) -> dict[int, float]:
        """Seconds of a visit: as measured, or from the longest one that was, by the square of the length."""
        costs = dict(self._costs[number])
        last = max(costs, default=0)
        for prefix in grid:
            if prefix not in costs:
                costs[prefix] = (
                    costs[last] * (prefix / last) ** 2 if prefix > last > 0 else costs.get(last, 0.0)
                )
        return costs

    def _tell(self, text: str) -> None:
        used = 1 - (self._last - time.monotonic()) / self._config.budget_s
        self._on_progress(min(_STEPS - 1, max(0, int(used * _STEPS))), _STEPS, text)
