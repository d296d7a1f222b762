"""`bench pairs`: two systems side by side, the same request to one and then to the other, many times.

For small differences, which rounds apart in time would hide: each pair meets the same machine. Both engines
are alive, one of them idle. Documents are asked for once before, so that a cache has what it would have.
Without terminal packages: ``python -m py_kvcache.bench.pairs --config FILE --pairs N``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from py_kvcache.bench.asking import AskedEngine
from py_kvcache.bench.children import interrupt_on_sigterm
from py_kvcache.bench.hostfacts import gpu_facts, versions
from py_kvcache.bench.serve_config import ServeConfig, from_mapping
from py_kvcache.bench.systems import Host
from py_kvcache.bench.workspace import Progress, machine, no_progress, workspace
from py_kvcache.errors import ConfigError, KvCacheError

SCHEMA: Final = "py-kvcache.bench.pairs/1"
_RESAMPLES = 10_000
_WARM_UP = 2
_REST_S = 2.0
_CALM_FOR_S, _CALM_AT_LATEST_S = 0.05, 5.0


def run(config: ServeConfig, *, pairs: int, on_progress: Progress = no_progress) -> dict[str, Any]:
    """Measure; the report is also in ``config.out``/pairs.json.

    Raises:
        ConfigError: not two systems, or not one length. KvCacheError: an engine ended. OSError, RootError.
    """
    variants = config.variants
    if len(variants) != 2 or len(config.tokens) != 1:
        raise ConfigError(
            "pairs are of two systems and documents of one length, such as recompute,py-kvcache"
        )
    if pairs < 1:
        raise ConfigError("pairs must be 1 or more")
    host = Host.find()
    for variant in variants:
        if (why := variant.system.missing(host)) is not None or variant.system.files_of:
            raise ConfigError(f"{variant.label} cannot be one of a pair here: {why or 'it is no engine'}")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with workspace(config.root, 2 * config.kv_bytes()) as folder, contextlib.ExitStack() as stack:
        engines = []
        for number, variant in enumerate(variants):
            on_progress(0, pairs, f"starting {variant.label}")
            place = os.path.join(folder, str(number))
            os.mkdir(place)
            engine = AskedEngine(config, variant, place, out, config.engine_options())
            stack.callback(engine.close)
            engine.wait()
            engines.append(engine)
        for engine in engines:
            for document in range(config.documents):
                on_progress(0, pairs, f"first time, {engine.label}, document {document + 1}")
                engine.ask(_question(config, document))
            # What a store writes behind the answers would disturb the other's.
            time.sleep(_REST_S)
        answers = list(_alternate(engines, config, pairs, on_progress))
    report = {
        "schema": SCHEMA,
        "machine": {**machine(config.root), **gpu_facts(), "versions": versions()},
        "config": config.as_json(),
        "seconds": round(time.monotonic() - begin, 1),
        **compare([variant.label for variant in variants], answers, config.seed),
    }
    (out / "pairs.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    return report


def _alternate(
    engines: Sequence[AskedEngine], config: ServeConfig, pairs: int, on_progress: Progress
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Who is first changes with each pair."""
    for number in range(-_WARM_UP, pairs):
        on_progress(max(0, number), pairs, f"pair {max(0, number) + 1}")
        order = engines if number % 2 == 0 else engines[::-1]
        answers = {}
        for engine in order:
            calm = _wait_for_calm(engines)
            answer = engine.ask(_question(config, number % config.documents))
            answers[id(engine)] = {**answer, **answer["requests"][0], "calm": calm}
        if number >= 0:
            yield answers[id(engines[0])], answers[id(engines[1])]


def _question(config: ServeConfig, document: int) -> dict[str, Any]:
    return {"documents": [{"role": "document", "number": document, "tokens": config.tokens[0]}]}


def _wait_for_calm(engines: Sequence[AskedEngine]) -> bool:
    """Until neither computes: workers of vLLM's spin on a core for a second after each answer.

    False if that does not come.
    """
    end = time.monotonic() + _CALM_AT_LATEST_S
    before = sum(engine.ticks for engine in engines)
    while time.monotonic() < end:
        time.sleep(_CALM_FOR_S)
        now = sum(engine.ticks for engine in engines)
        if now - before <= 1:
            return True
        before = now
    return False


def compare(
    labels: Sequence[str], answers: Sequence[tuple[dict[str, Any], dict[str, Any]]], seed: int = 0
) -> dict[str, Any]:
    """Ratios of the second system to the first, with a 95 % interval from pairs drawn again."""
    times = np.array([[one["ttft_s"] for one in pair] for pair in answers])
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(times), (_RESAMPLES, len(times)))
    means = times[drawn].mean(axis=1)
    low, high = np.percentile(means[:, 1] / means[:, 0], [2.5, 97.5])
    last = answers[-1]
    quantiles = {
        f"p{share}_ratio": float(np.percentile(times[:, 1], share) / np.percentile(times[:, 0], share))
        for share in (50, 90, 99)
    }
    return {
        "pairs": len(times),
        "ratio": f"{labels[1]} to {labels[0]}",
        "ratio_of_means": float(times[:, 1].mean() / times[:, 0].mean()),
        "interval_95": [float(low), float(high)],
        **quantiles,
        "asked_before_calm": sum(not one["calm"] for pair in answers for one in pair),
        "same_text": all(a["output_tokens"] == b["output_tokens"] for a, b in answers),
        "systems": [
            {
                "system": label,
                "mean_ttft_s": float(times[:, number].mean()),
                "cached_tokens": sum(pair[number]["cached_tokens"] or 0 for pair in answers),
                "folder_bytes": last[number]["folder_bytes"],
                "counters": last[number]["counters"],
                "ttft_s": [round(float(value), 6) for value in times[:, number]],
            }
            for number, label in enumerate(labels)
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Settings from a JSON file (ServeConfig)."""
    parser = argparse.ArgumentParser(prog="python -m py_kvcache.bench.pairs")
    parser.add_argument("--config", required=True)
    parser.add_argument("--root", help="folder on the volume instead of the file's")
    parser.add_argument("--systems", help="two systems instead of the file's")
    parser.add_argument("--pairs", type=int, default=100)
    taken = parser.parse_args(arguments)

    def line(done: int, total: int, text: str) -> None:
        print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

    interrupt_on_sigterm()
    try:
        values = json.loads(Path(taken.config).read_text(encoding="utf-8"))
        values |= {name: value for name in ("root", "systems") if (value := getattr(taken, name)) is not None}
        report = run(from_mapping(values), pairs=taken.pairs, on_progress=line)
    except (KvCacheError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing is kept", file=sys.stderr)
        return 130
    print(json.dumps({name: value for name, value in report.items() if name not in ("config", "systems")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
