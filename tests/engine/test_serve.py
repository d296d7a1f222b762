"""A real `vllm serve`: metrics, timeline, environment, SIGTERM; and engines of several ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine, real_model, session
from session import CONNECTOR, EngineError, Session, engine_arguments, prompt

from py_kvcache import metrics
from server import Server

BLOCK = 256  # the default, as nothing but the root is configured here
LENGTH = 4 * BLOCK + 20
PROMPT = prompt(LENGTH, seed=1)
NO_LOAD = {"py_kvcache": {"load": False}}
NO_STORE = {"py_kvcache": {"store": False}}
TRANSFER = {
    "kv_connector": "PyKvCacheConnector",
    "kv_connector_module_path": "py_kvcache.connector",
    "kv_role": "kv_both",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("serve") / "model"
    # vLLM takes a model with experts for one whose data-parallel ranks must step together; ours has none,
    # since the CPU backend cannot exchange them.
    path = real_model(folder, num_experts=2)
    write_tokenizer(folder)
    return path


def write_tokenizer(folder: Path) -> None:
    """One word for each token id, so that the server has something to answer with."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1024)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"})
    )


class TokenServer(Server):
    """`vllm serve` of a tiny model, asked with token ids."""

    def __init__(self, model: str, folder: Path, root: Path, *arguments: str, **environment: str) -> None:
        super().__init__(
            Path(model),
            folder / "server.log",
            transfer=json.dumps(TRANSFER),
            arguments=(
                *("--block-size", "32", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
                # By default vLLM kills its engine in the moment in which it is told to end.
                *("--seed", "0", "--shutdown-timeout", "30", *arguments),
            ),
            environment={
                "PYTHONPATH": str(CONNECTOR),
                "PYTHONDONTWRITEBYTECODE": "",
                "PY_KVCACHE_ROOT": str(root),
                "PY_KVCACHE_LOOKUP_DEADLINE_S": "30",
                "PY_KVCACHE_GATE": "off",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                **environment,
            },
        )

    def complete(self, tokens: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Text and number of cached tokens of a greedy answer."""
        body = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            data=json.dumps({**body, "ignore_eos": True, **more}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {"text": answer["choices"][0]["text"], "cached": details.get("cached_tokens") or 0}

    def scrape(self) -> str:
        """The page behind /metrics."""
        return self._get("/metrics")

    def nudge(self, reached: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """Small requests, with whose steps stores begin and counts travel, until something is reached."""
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"{what} did not come; {self.log_excerpt()}"
            self.complete(prompt(20, seed=99), max_tokens=2)
            time.sleep(0.1)


def samples(page: str) -> dict[str, float]:
    """Values by series, such as name{label="x"}."""
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


def ours(page: str) -> dict[str, float]:
    """Our metrics with the names that metrics.py gives them, summed over labels."""
    totals: dict[str, float] = {}
    for series, value in samples(page).items():
        name = re.sub(r"_(total|created)$", "", series.partition("{")[0])
        if name.startswith(metrics.PREFIX) and not series.partition("{")[0].endswith("_created"):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def blocks(root: Path) -> list[Path]:
    return sorted(root.rglob("*.bin"))


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


# ---- one server, from the first request to SIGTERM


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a server said and left behind: stored, loaded again, met faults, was told to end."""
    folder = tmp_path_factory.mktemp("server")
    root = folder / "root"
    root.mkdir()
    seen: dict[str, Any] = {"root": root, "trace": folder / "trace.json"}
    seed = {} if hashes_need_no_seed() else {"PYTHONHASHSEED": "0"}
    with TokenServer(model, folder, root, PY_KVCACHE_TRACE=str(seen["trace"]), **seed) as server:
        server.start()
        seen["cold"] = server.complete(PROMPT)
        server.nudge(lambda: len(blocks(root)) == 4 and not temporaries(root), "the first four blocks")
        seen["warm"] = server.complete(PROMPT)
        damage(server, root, seen)
        server.complete(prompt(LENGTH, seed=2), kv_transfer_params=NO_STORE)
        probe_error(server, root)
        wanted = {m.name for m in metrics.ALL} - {metrics.DISABLED.name}
        end = time.monotonic() + 30
        while not wanted <= ours(server.scrape()).keys() and time.monotonic() < end:
            # Four requests that want the same files at once: one read serves some of them.
            server.complete(PROMPT, max_tokens=2, n=4, temperature=1.0)
        seen["page"] = server.scrape()
        # Told to end while it stores.
        server.complete(prompt(6000, seed=3), max_tokens=1)
        seen["seconds"] = server.stop()
        seen["log"] = server.log.read_text()
    return seen


def hashes_need_no_seed() -> bool:
    """From vLLM 0.29 on."""
    import importlib.metadata

    release = importlib.metadata.version("vllm-cpu").split(".")
    return (int(release[0]), int(release[1])) >= (0, 29)


def damage(server: TokenServer, root: Path, seen: dict[str, Any]) -> None:
    """A known block loses its second half; it is computed again, removed, and stored again."""
    victim = blocks(root)[0]
    whole = victim.stat().st_size
    os.truncate(victim, whole // 2)
    seen["damaged"] = server.complete(PROMPT)
    server.nudge(lambda: ours(server.scrape()).get(metrics.QUARANTINED.name, 0) >= 1, "the quarantine")


def probe_error(server: TokenServer, root: Path) -> None:
    """For one request the blocks' folder is a link to itself: look-up and store fail with ELOOP."""
    (folder,) = root.glob("*_r0")
    aside = folder.rename(folder.with_name("aside"))
    folder.symlink_to(folder.name)
    server.complete(prompt(LENGTH, seed=4))
    server.nudge(lambda: metrics.STORE_FAILURES.name in ours(server.scrape()), "the failed store")
    folder.unlink()
    aside.rename(folder)


def test_a_server_configured_by_one_variable_stores_and_loads(served: dict[str, Any]) -> None:
    assert served["cold"]["cached"] == 0
    assert served["warm"] == {"text": served["cold"]["text"], "cached": 4 * BLOCK}
    assert (served["root"] / "aside").exists() is False


def test_a_damaged_file_changes_nothing_in_the_answer(served: dict[str, Any]) -> None:
    assert served["damaged"]["text"] == served["cold"]["text"]


def test_every_metric_of_ours_is_scraped_and_no_other(served: dict[str, Any]) -> None:
    found = ours(served["page"])
    # One is only an engine's without a cache, one only of one with memory for preloads; see
    # test_unsupported.py, test_preload.py.
    elsewhere = {metrics.DISABLED.name, metrics.PRELOADS.name}
    assert found.keys() == {m.name for m in metrics.ALL} - elsewhere


def test_the_metrics_say_what_happened(served: dict[str, Any]) -> None:
    found = ours(served["page"])
    assert found[metrics.HIT_TOKENS.name] >= 4 * BLOCK
    assert found[metrics.STORE_BLOCKS.name] >= 4 and found[metrics.LOAD_BLOCKS.name] >= 4
    size = blocks(served["root"])[0].stat().st_size
    assert found[metrics.LOAD_BYTES.name] % 4096 == 0
    assert 4 * (size - 4096) <= found[metrics.LOAD_BYTES.name] <= found[metrics.LOAD_BLOCKS.name] * size
    for name in (metrics.LOAD_FAILURES, metrics.RECOMPUTED_BLOCKS, metrics.QUARANTINED, metrics.PROBE_ERRORS):
        assert found[name.name] >= 1, name.name
    assert found[metrics.SLOT_LEAKS.name] == 0
    series = [name for name in samples(served["page"]) if name.startswith(metrics.PREFIX)]
    assert all('model_name="SmolLM2-135M-Instruct"' in name and 'engine="0"' in name for name in series)
    assert any('errno="ELOOP"' in name for name in series)
    assert any(metrics.LOOKUPS.name in name and 'result="hit"' in name for name in series)


def test_sigterm_ends_it_without_a_temporary_file_or_a_torn_block(served: dict[str, Any]) -> None:
    assert served["seconds"] < 60
    assert temporaries(served["root"]) == []
    assert len(blocks(served["root"])) == 4 + 6000 // BLOCK, "what it was storing was stored"
    verified = subprocess.run(
        [sys.executable, "-m", "py_kvcache", "verify", str(served["root"]), "--json"],
        env={**os.environ, "PYTHONPATH": str(CONNECTOR)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_timeline_is_json_with_reads_writes_copies_slots_and_steps(served: dict[str, Any]) -> None:
    events = json.loads(served["trace"].read_text())
    bars = {event["name"] for event in events if event["ph"] == "X"}
    assert {"read", "write", "copy to device", "copy from device", "publish", "forward"} <= bars
    uses = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "slots"]
    assert any(use["load"] for use in uses) and any(use["store"] for use in uses)
    assert len({sum(use.values()) for use in uses}) == 1, "slots in use and free ones add up"
    assert uses[-1]["load"] == uses[-1]["store"] == 0
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_another_kind_of_process_finds_the_servers_blocks(model: str, served: dict[str, Any]) -> None:
    # Another Python, with another seed of hash(): neither prefix hashes nor namespaces may depend on it.
    env = {} if hashes_need_no_seed() else {"PYTHONHASHSEED": "0"}
    extra = {"block_tokens": BLOCK, "lookup_deadline_s": 30}
    with session(env) as started:
        started.call("start", **engine_arguments(model, str(served["root"]), load_format="auto", extra=extra))
        answer = started.generate([PROMPT])
        assert answer["cached"] == [4 * BLOCK]
        assert " ".join(f"w{token}" for token in answer["tokens"][0][0]) == served["cold"]["text"].strip()
        assert started.call("settle")["wrong"] == []


# ---- data parallel


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def both(work: Callable[[int], Any]) -> list[Any]:
    """Do something on both ranks at once, since they wait for each other."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except EngineError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, EngineError):
            raise result
    return [results[0], results[1]]


def test_data_parallel_engines_of_one_group_store_what_any_engine_finds(model: str, tmp_path: Path) -> None:
    common = {
        "PYTHONHASHSEED": "0", "VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(free_port()), "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }  # fmt: skip
    arguments = engine_arguments(model, str(tmp_path), load_format="auto", extra={"lookup_deadline_s": 30})
    ranks: list[Session] = [
        session({**common, "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}) for rank in (0, 1)
    ]
    prompts = [prompt(LENGTH, seed=10 + rank) for rank in (0, 1)]
    # Ranks of an offline group must all have something to compute in each step: vLLM does not serve a look-up
    # or a load there that takes longer. The server, below, does.
    params = {"extra_args": {"kv_transfer_params": NO_LOAD}}
    try:
        both(lambda rank: ranks[rank].call("start", **arguments, distributed_executor_backend="uni"))
        cold = both(lambda rank: ranks[rank].generate([prompts[rank]], **params)["tokens"])
        end = time.monotonic() + 60
        while len(blocks(tmp_path)) < 2 * (LENGTH // 64) and time.monotonic() < end:
            both(lambda rank: ranks[rank].generate([prompt(20, seed=99)], **params))
    finally:
        for started in ranks:
            started.close()
    assert len(blocks(tmp_path)) == 2 * (LENGTH // 64) and temporaries(tmp_path) == []
    assert len({file.parents[2] for file in blocks(tmp_path)}) == 1, (
        "a rank of the group is no part of the model"
    )
    with engine(arguments) as alone:
        answer = alone.generate(prompts)
        assert [[tokens] for tokens in answer["tokens"]] == cold
        assert answer["cached"] == [LENGTH // 64 * 64] * 2
        assert alone.call("settle")["wrong"] == []


@pytest.mark.slow
def test_two_data_parallel_engines_of_one_server_store_and_hit(model: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    prompts = [prompt(LENGTH, seed=20 + i) for i in range(8)]
    arguments = ("--data-parallel-size", "2")
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONHASHSEED": "0"}
    with TokenServer(model, tmp_path, root, *arguments, **env) as server:
        server.start()

        def ask_all() -> list[dict[str, Any]]:
            answers: dict[int, dict[str, Any]] = {}
            threads = [
                threading.Thread(target=lambda i=i: answers.update({i: server.complete(prompts[i])}))
                for i in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [answers[i] for i in range(8)]

        def by_engine(metric: metrics.Metric) -> set[str]:
            page = samples(server.scrape()).items()
            return {
                re.search(r'engine="(\d+)"', name)[1]  # type: ignore[index]
                for name, value in page
                if name.startswith(metric.name) and "_created" not in name and value > 0
            }

        cold = ask_all()
        server.nudge(lambda: len(blocks(root)) == 32 and not temporaries(root), "all blocks")
        warm = ask_all()
        server.nudge(lambda: by_engine(metrics.LOAD_BLOCKS) == {"0", "1"}, "loads in both engines", 60)
        assert by_engine(metrics.STORE_BLOCKS) == {"0", "1"}
        server.stop()
    assert [answer["text"] for answer in warm] == [answer["text"] for answer in cold]
    assert {answer["cached"] for answer in warm} == {4 * BLOCK}
    assert temporaries(root) == [] and len({file.parents[2] for file in blocks(root)}) == 1


# ---- tensor parallel


@pytest.fixture(scope="module")
def two_ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Session, Path]]:
    """One engine of two ranks for both tests: a minute to start. Its root is `cache` in the folder."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "cache").mkdir()
    arguments = engine_arguments(
        model, str(folder / "cache"), load_format="auto", tensor_parallel_size=2,
        enable_lora=True, max_lora_rank=8, max_loras=1, extra={"lookup_deadline_s": 30},
    )  # fmt: skip
    # Its workers are processes of their own, which vLLM starts anew.
    two = Session(
        {"PYTHONHASHSEED": "0", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONDONTWRITEBYTECODE": ""},
        timeout=400,
    )
    try:
        two.call("save_adapter", folder=str(folder / "adapter"), model=model, seed=1)
        two.call("start", **arguments)
        yield two, folder
    finally:
        two.close()


def wait_for_blocks(two: Session, root: Path, count: int) -> None:
    """Ends of stores are seen in steps."""
    end = time.monotonic() + 60
    while len(blocks(root)) < count and time.monotonic() < end:
        two.generate([prompt(20, seed=99)])
    assert len(blocks(root)) == count


@pytest.mark.slow
def test_tensor_parallel_ranks_write_each_shard_once_and_load_it_again(
    model: str, tmp_path: Path, two_ranks: tuple[Session, Path]
) -> None:
    count, (two, folder) = LENGTH // 64, two_ranks
    with engine(engine_arguments(model, str(folder / "cache"), load_format="auto")) as alone:
        expected = alone.generate([PROMPT])["tokens"]
        alone.call("settle")
    single = {file.parents[2].name for file in blocks(folder)}
    cold = two.generate([PROMPT])
    assert cold["cached"] == [0], "blocks of one rank are none of two"
    assert cold["tokens"] == expected
    wait_for_blocks(two, folder, 3 * count)
    warm = two.generate([PROMPT])
    assert (warm["tokens"], warm["cached"]) == (cold["tokens"], [count * 64])
    shards = [file for file in blocks(folder) if file.parents[2].name not in single]
    assert len(shards) == 2 * count and temporaries(folder) == []
    assert {file.parents[2].name[-3:] for file in shards} == {"_r0", "_r1"}
    (whole,) = single
    assert {file.stat().st_size for file in shards} != {blocks(folder / "cache" / whole)[0].stat().st_size}


@pytest.mark.slow
def test_tensor_parallel_ranks_agree_on_an_adapter_and_find_its_blocks_again(
    model: str, two_ranks: tuple[Session, Path]
) -> None:
    count, (two, folder) = LENGTH // 64, two_ranks
    lora, before = ["run", 1, str(folder / "adapter")], len(blocks(folder))
    first = two.generate([PROMPT], lora=lora)
    wait_for_blocks(two, folder, before + 2 * count)
    second = two.generate([PROMPT], lora=lora)
    # The workers read other weights under the name: nothing of it is cached any more.
    two.call("save_adapter", folder=lora[2], model=model, seed=2)
    two.call("add_lora", lora=[*lora, {"load_inplace": True}])
    other = two.generate([PROMPT], lora=lora)
    again = two.generate([PROMPT], lora=lora)
    assert (first["cached"], second["cached"]) == ([0], [count * 64])
    assert first["tokens"] == second["tokens"] != other["tokens"]
    assert other["tokens"] == again["tokens"]
    assert other["cached"] == again["cached"] == [0]
