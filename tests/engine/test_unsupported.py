"""What we do not serve is one sentence at start, or an engine without a cache; odd roots serve too."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine, real_model, session
from session import EngineError, Session, engine_arguments, prompt, tiny_model

BLOCK = 64
PROMPT = prompt(600, seed=3)
CACHED = 9 * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return real_model(tmp_path_factory.mktemp("unsupported") / "model")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers attend to all tokens or to a window, in turn: two KV cache groups."""
    return tiny_model(
        tmp_path_factory.mktemp("hybrid"),
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=512,
        rope_local_base_freq=10000.0,
        query_pre_attn_scalar=64,
        hidden_activation="gelu_pytorch_tanh",
    )


def arguments(
    model: str, root: object, extra: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    role = changes.pop("kv_role", "kv_both")
    made: dict[str, Any] = engine_arguments(
        model,
        str(root),
        extra={"lookup_deadline_s": 30, **(extra or {})},
        **{"load_format": "auto", **changes},
    )
    made["kv_transfer_config"]["kv_role"] = role
    return made


def hybrid_arguments(hybrid: str, root: object, **extra: Any) -> dict[str, Any]:
    return arguments(hybrid, root, extra, load_format="dummy", disable_hybrid_kv_cache_manager=False)


# ---- refusals


@pytest.fixture(scope="module")
def process() -> Iterator[Session]:
    """One process tries to start one engine after the other."""
    with session({"PYTHONHASHSEED": "0"}) as started:
        yield started


def refusal(process: Session, engine_arguments: dict[str, Any]) -> str:
    """The one line with which the engine refuses to start."""
    with pytest.raises(EngineError) as caught:
        process.call("start", **engine_arguments)
    return str(caught.value).splitlines()[0]


def test_a_hybrid_model_is_refused_by_the_names_of_its_groups(
    process: Session, hybrid: str, tmp_path: Path
) -> None:
    sentence = refusal(process, hybrid_arguments(hybrid, tmp_path))
    assert "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec) are not supported yet" in sentence


def test_a_block_length_that_does_not_fit_the_engines_names_the_one_that_does(
    process: Session, model: str, tmp_path: Path
) -> None:
    sentence = refusal(process, arguments(model, tmp_path, {"block_tokens": 48}))
    assert "block_tokens=48" in sentence and "32 tokens" in sentence and "set block_tokens to 64" in sentence


def test_a_producer_is_refused_by_name(process: Session, model: str, tmp_path: Path) -> None:
    sentence = refusal(process, arguments(model, tmp_path, kv_role="kv_producer"))
    assert "kv_producer" in sentence and '"kv_role": "kv_both"' in sentence


def test_a_sync_load_budget_is_refused(process: Session, model: str, tmp_path: Path) -> None:
    sentence = refusal(process, arguments(model, tmp_path, {"sync_load_budget_bytes": 1}))
    assert "sync_load_budget_bytes" in sentence and "set it to 0" in sentence


def test_an_unknown_key_is_refused_with_the_one_that_was_meant(
    process: Session, model: str, tmp_path: Path
) -> None:
    sentence = refusal(process, arguments(model, tmp_path, {"blok_tokens": 64}))
    assert "unknown key 'blok_tokens'" in sentence and "did you mean 'block_tokens'?" in sentence


def test_a_root_without_a_parent_is_refused_with_path_and_remedy(
    process: Session, model: str, tmp_path: Path
) -> None:
    root = tmp_path / "not" / "mounted"
    sentence = refusal(process, arguments(model, root))
    assert str(root) in sentence and "mount the volume or make the folder" in sentence
    assert not root.parent.exists()


def test_a_bad_setting_is_refused_before_anything_is_loaded_where_vllm_uses_cuda_graphs() -> None:
    from py_kvcache.connector import PyKvCacheConnector
    from py_kvcache.errors import ConfigError

    asked = PyKvCacheConnector.requires_piecewise_for_cudagraph
    assert asked({"root": "/cache"}) is False
    with pytest.raises(ConfigError, match="did you mean 'block_tokens'"):
        asked({"root": "/cache", "blok_tokens": 64})


OWN_IDS = {"PYTHONHASHSEED": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}


def test_request_ids_that_may_come_again_are_refused_or_served_without_a_cache(
    model: str, tmp_path: Path
) -> None:
    with session(OWN_IDS) as own:
        assert "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION" in refusal(own, arguments(model, tmp_path))
        own.call("start", **arguments(model, tmp_path, {"on_unsupported": "disable"}))
        # With the cache on vLLM's offloading scheduler raises KeyError here, which ends the engine.
        assert len(own.call("same_id_again", prompts=[PROMPT, PROMPT[:-1], PROMPT])["tokens"]) == 3


# ---- disable


def ours(log: list[str]) -> list[str]:
    """Our warnings in an engine's log, without time and place."""
    return [line.split("] ", 1)[-1].strip() for line in log if re.search(r"\bWARNING .*py-kvcache", line)]


def test_disabled_an_engine_serves_a_hybrid_model_without_a_cache_and_says_so_once(
    process: Session, hybrid: str, tmp_path: Path
) -> None:
    before = len(process.log)
    process.call("start", **hybrid_arguments(hybrid, tmp_path, on_unsupported="disable"))
    answers = [process.generate([PROMPT]) for _ in range(2)]
    assert answers[0]["tokens"] == answers[1]["tokens"] and answers[1]["cached"] == [0]
    assert process.call("metrics")["values"]["vllm:py_kvcache_disabled"] == 1
    process.call("stop")
    warnings = ours(process.log[before:])
    assert len(warnings) == 1
    assert "disabled" in warnings[0] and "2 KV cache groups" in warnings[0]
    assert list(tmp_path.iterdir()) == [], "nothing is written"


# ---- roots of all kinds


@pytest.fixture(scope="module")
def tmpfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs of its own, which can be made read-only."""
    folder = tmp_path_factory.mktemp("tmpfs")
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this test mounts file systems: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def stored(model: str, tmpfs: Path) -> dict[str, Any]:
    """An engine on tmpfs that stored and loaded again."""
    with engine(arguments(model, tmpfs / "root")) as started:
        cold = started.generate([PROMPT])
        started.call("settle")
        warm = started.generate([PROMPT])
        end = started.call("settle")
    return {"cold": cold, "warm": warm, "end": end, "warnings": ours(started.log)}


def beside_buffered(warnings: list[str], at_least: int) -> list[str]:
    """What was warned of beside the slower way that the file system forces, which is said once."""
    slower = [line for line in warnings if "slower I/O (buffered)" in line]
    assert at_least <= len(slower) <= 1, warnings
    return [line for line in warnings if line not in slower and "slower I/O (threads)" not in line]


def test_a_root_on_tmpfs_hits_with_one_warning(stored: dict[str, Any]) -> None:
    assert stored["warm"]["cached"] == [CACHED]
    assert stored["warm"]["tokens"] == stored["cold"]["tokens"]
    assert stored["end"]["wrong"] == [] and stored["end"]["failures"] == {}
    assert beside_buffered(stored["warnings"], at_least=1) == []


def test_a_root_on_overlay_hits_what_lies_below_and_stores_above(
    model: str, tmpfs: Path, stored: dict[str, Any]
) -> None:
    for name in ("upper", "work", "merged"):
        (tmpfs / name).mkdir()
    below = set((tmpfs / "root").rglob("*.bin"))
    layers = f"lowerdir={tmpfs}/root,upperdir={tmpfs}/upper,workdir={tmpfs}/work"
    mount("-t", "overlay", "-o", layers, "overlay", str(tmpfs / "merged"))
    try:
        with engine(arguments(model, tmpfs / "merged")) as started:
            answer = started.generate([PROMPT])
            assert (answer["tokens"], answer["cached"]) == (stored["cold"]["tokens"], [CACHED])
            other = started.generate([prompt(600, seed=4)])
            started.call("settle")
            again = started.generate([prompt(600, seed=4)])
            assert (again["tokens"], again["cached"]) == (other["tokens"], [CACHED])
            assert started.call("settle")["wrong"] == []
        # Newer kernels pass O_DIRECT on to what lies below, and nothing need be said.
        assert beside_buffered(ours(started.log), at_least=0) == []
    finally:
        subprocess.run(["umount", str(tmpfs / "merged")], check=True)
    assert set((tmpfs / "root").rglob("*.bin")) == below
    assert len(list((tmpfs / "upper").rglob("*.bin"))) == CACHED // BLOCK


def test_a_read_only_root_serves_loads_with_one_warning(
    model: str, tmpfs: Path, stored: dict[str, Any]
) -> None:
    before = {path: os.stat(path).st_mtime_ns for path in (tmpfs / "root").rglob("*")}
    mount("-o", "remount,ro", str(tmpfs))
    try:
        with engine(arguments(model, tmpfs / "root")) as started:
            for seed in (5, 6):
                started.generate([prompt(600, seed=seed)])
                started.call("settle")
            answer = started.generate([PROMPT])
            assert (answer["tokens"], answer["cached"]) == (stored["cold"]["tokens"], [CACHED])
            end = started.call("settle")
            values = started.call("metrics")["values"]
    finally:
        mount("-o", "remount,rw", str(tmpfs))
    assert end["loaded_blocks"] == CACHED // BLOCK and end["stored_blocks"] == 0 and end["wrong"] == []
    assert values["vllm:py_kvcache_stores_paused"] == 1
    warnings = beside_buffered(ours(started.log), at_least=0)
    assert len(warnings) == 1 and "blocks are loaded but not stored [EROFS]" in warnings[0], warnings
    assert {path: os.stat(path).st_mtime_ns for path in (tmpfs / "root").rglob("*")} == before
