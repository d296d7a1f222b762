"""Equal tokens are not equal blocks: what changes the bytes changes the namespace, and nothing else does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine, real_model, session
from session import OPT_OUT, EngineError, Session, engine_arguments, prompt

BLOCK = 64
# 13 blocks of ours and 26 of the engine, so that both caches end at the same token.
LENGTH = 13 * BLOCK + 20
CACHED = 13 * BLOCK
PROMPT = prompt(LENGTH, seed=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return real_model(tmp_path_factory.mktemp("identity") / "model")


def real(model: str, root: Path, **changes: Any) -> dict[str, Any]:
    extra = {
        "lookup_deadline_s": 30,
        **changes.pop("extra", {}),
    }  # on a busy machine, too, an answer and no miss
    return engine_arguments(model, str(root), load_format="auto", extra=extra, **changes)


def namespaces(root: Path) -> set[str]:
    """Folders that hold blocks."""
    return {file.parents[2].name for file in root.rglob("*.bin")}


@pytest.fixture(scope="module")
def first(model: str, root: Path) -> dict[str, Any]:
    """What the engine that stored everything said, with the first weights in float32."""
    with engine(real(model, root)) as started:
        answer = started.generate([PROMPT])
        started.call("settle")
        return {**answer, "spaces": namespaces(root)}


def misses_then_hits(started: Session, root: Path, known: set[str]) -> set[str]:
    """A clean miss, and afterwards the engine's own blocks in a namespace of their own; returns all."""
    assert started.generate([PROMPT])["cached"] == [0]
    end = started.call("settle")
    assert end["loaded_blocks"] == 0 and end["failures"] == {}
    spaces = namespaces(root)
    assert len(spaces) == len(known) + 1 and spaces > known
    return spaces


def test_a_restart_with_another_block_length_is_a_clean_miss(
    model: str, root: Path, first: dict[str, Any]
) -> None:
    with engine(real(model, root, extra={"block_tokens": 2 * BLOCK})) as started:
        misses_then_hits(started, root, namespaces(root))
        assert started.generate([PROMPT])["tokens"] == first["tokens"]
        assert started.call("settle")["wrong"] == []


def tokens_from_both_caches(started: Session) -> tuple[Any, Any]:
    """The answer with a prefix from files, and that with the same prefix from vLLM's own cache."""
    own = started.generate([PROMPT])
    assert own["cached"] == [CACHED]
    before = started.call("stats")["loaded_blocks"]
    assert started.call("reset_prefix_cache")["ok"]
    ours = started.generate([PROMPT])
    end = started.call("settle")
    assert end["loaded_blocks"] == before + CACHED // BLOCK, "the prefix came from files"
    assert ours["cached"] == own["cached"]
    assert end["checked"] == CACHED // BLOCK and end["wrong"] == [], "every block equals its file"
    return ours["tokens"], own["tokens"]


def test_bfloat16_misses_float32_blocks_and_then_equals_vllms_own_prefix_caching(
    model: str, root: Path, first: dict[str, Any]
) -> None:
    with engine(real(model, root, dtype="bfloat16", enable_prefix_caching=True)) as started:
        misses_then_hits(started, root, namespaces(root))
        ours, own = tokens_from_both_caches(started)
        assert ours == own


def test_a_quantised_kv_cache_misses_others_and_then_equals_vllms_own_prefix_caching(
    model: str, root: Path, first: dict[str, Any]
) -> None:
    arguments = real(model, root, dtype="bfloat16", kv_cache_dtype="fp8", enable_prefix_caching=True)
    with session({"PYTHONHASHSEED": "0"}) as started:
        try:
            started.call("start", **arguments)
        except EngineError as error:
            if "py-kvcache" in str(error).splitlines()[0]:
                raise
            pytest.skip(f"this CPU engine takes no fp8 KV cache: {str(error).splitlines()[0]}")
        started.timeout = 60
        try:
            started.generate([prompt(LENGTH, seed=2)], extra_args=OPT_OUT)
        except EngineError as error:
            skip_if_fp8_fails_without_us(error, arguments)
            raise
        misses_then_hits(started, root, namespaces(root))
        ours, own = tokens_from_both_caches(started)
        assert ours == own


def skip_if_fp8_fails_without_us(error: EngineError, arguments: dict[str, Any]) -> None:
    """vLLM 0.26 corrupts its heap, and dies or hangs, as soon as it computes with an fp8 cache on a CPU."""
    del arguments["kv_transfer_config"]
    with session({"PYTHONHASHSEED": "0"}) as plain, contextlib.suppress(EngineError):
        plain.call("start", **arguments)
        plain.timeout = 60
        plain.generate([PROMPT])
        return
    pytest.skip(f"vLLM's own fp8 KV cache fails on this CPU, without us too: {str(error).splitlines()[0]}")


def test_the_same_engine_hits_after_all_of_these(model: str, root: Path, first: dict[str, Any]) -> None:
    with engine(real(model, root)) as started:
        answer = started.generate([PROMPT])
        assert (answer["tokens"], answer["cached"]) == (first["tokens"], [CACHED])
        assert started.call("settle")["wrong"] == []


# ---- what the longest request decides


def test_a_longrope_model_with_another_longest_request_is_a_clean_miss(tmp_path: Path) -> None:
    # Phi-3's way: short factors for engines of up to 1,024 tokens, long ones beyond.
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0 + n for n in range(32)],
        "original_max_position_embeddings": 1024, "rope_theta": 10000.0,
    }  # fmt: skip
    model = real_model(
        tmp_path / "model", architectures=["Phi3ForCausalLM"], model_type="phi3", pad_token_id=0,
        original_max_position_embeddings=1024, rope_scaling=rope, rope_parameters=rope,
    )  # fmt: skip
    root, texts = tmp_path / "cache", {}
    root.mkdir()
    for length in (1024, 4096):
        with engine(real(model, root, max_model_len=length)) as started:
            known = namespaces(root)
            misses_then_hits(started, root, known)
            texts[length] = started.generate([PROMPT])["tokens"]
            assert started.generate([PROMPT], extra_args=OPT_OUT)["tokens"] == texts[length]
    assert texts[1024] != texts[4096], "the factors change the text"


# ---- LoRA


def start_with_lora(started: Session, arguments: dict[str, Any]) -> None:
    """Skips the test where vLLM itself has no LoRA on this CPU."""
    try:
        started.call("start", **arguments)
    except EngineError as error:
        if "py-kvcache" in str(error).splitlines()[0]:
            raise
        pytest.skip(f"this CPU engine takes no LoRA: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module")
def with_lora(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two runs of one engine, between which an adapter's weights change under the same name and path."""
    folder = tmp_path_factory.mktemp("lora")
    root, adapter = folder / "cache", str(folder / "adapter")
    root.mkdir()
    arguments = real(model, root, enable_lora=True, max_lora_rank=8, max_loras=1)
    answers: dict[str, Any] = {"root": root}
    for run, seed in (("before", 1), ("after", 2)):
        with session({"PYTHONHASHSEED": "0"}) as started:
            started.call("save_adapter", folder=adapter, model=model, seed=seed)
            start_with_lora(started, arguments)
            lora = ["adapter", 1, adapter]
            answers[run] = {
                "plain": started.generate([PROMPT]),
                "lora": started.generate([PROMPT], lora=lora),
                "settled": started.call("settle"),
                "again": started.generate([PROMPT], lora=lora),
                "computed": started.generate([PROMPT], lora=lora, extra_args=OPT_OUT),
            }
    return answers


def test_an_adapter_does_not_find_the_plain_models_blocks(with_lora: dict[str, Any]) -> None:
    before = with_lora["before"]
    assert before["lora"]["cached"] == [0]
    assert before["lora"]["tokens"] != before["plain"]["tokens"], "the adapter changes the text"
    assert (before["again"]["tokens"], before["again"]["cached"]) == (before["lora"]["tokens"], [CACHED])


def test_the_same_adapter_name_and_path_with_other_weights_finds_nothing(with_lora: dict[str, Any]) -> None:
    before, after = with_lora["before"], with_lora["after"]
    assert after["plain"]["cached"] == [CACHED], "the plain model's blocks are still good"
    assert after["plain"]["tokens"] == before["plain"]["tokens"]
    assert after["lora"]["cached"] == [0]
    assert after["lora"]["tokens"] == after["computed"]["tokens"] != before["lora"]["tokens"]
    assert after["again"]["cached"] == [CACHED]
    assert after["settled"]["wrong"] == []


@pytest.fixture
def changing(model: str, tmp_path: Path) -> Iterator[tuple[Session, str]]:
    """An engine with room for one adapter, and the folder of one whose files will change."""
    (tmp_path / "cache").mkdir()
    with session({"PYTHONHASHSEED": "0"}) as started:
        started.call("save_adapter", folder=str(tmp_path / "adapter"), model=model, seed=1)
        started.call("save_adapter", folder=str(tmp_path / "other"), model=model, seed=9)
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
        start_with_lora(started, real(model, tmp_path / "cache", **lora))
        yield started, str(tmp_path / "adapter")


def cached_and_computed(started: Session, lora: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The answer, after its blocks were stored the answer again, and what is right."""
    started.generate([PROMPT], lora=lora)
    started.call("settle")
    again = started.generate([PROMPT], lora=lora)
    return again, started.generate([PROMPT], lora=lora, extra_args=OPT_OUT)["tokens"]


def test_an_adapter_overwritten_between_its_loading_and_its_first_request_poisons_nothing(
    changing: tuple[Session, str], model: str
) -> None:
    started, folder = changing
    started.call("add_lora", lora=["run", 1, folder])
    started.call("save_adapter", folder=folder, model=model, seed=2)
    old, computed_old = cached_and_computed(started, ["run", 1, folder])
    assert old["tokens"] == computed_old
    assert old["cached"] == [CACHED], "what is in memory counts, not what lies in the folder"
    new, computed_new = cached_and_computed(started, ["new name", 2, folder])
    assert new["tokens"] == computed_new != computed_old
    assert new["cached"] == [CACHED]


def test_an_evicted_adapter_whose_files_changed_meanwhile_poisons_nothing(
    changing: tuple[Session, str], model: str
) -> None:
    started, folder = changing
    first, computed_first = cached_and_computed(started, ["run", 1, folder])
    assert first["tokens"] == computed_first and first["cached"] == [CACHED]
    started.generate([PROMPT], lora=["other", 2, str(Path(folder).parent / "other")])
    started.call("save_adapter", folder=folder, model=model, seed=2)
    at_once = started.generate([PROMPT], lora=["run", 1, folder])
    second, computed_second = cached_and_computed(started, ["run", 1, folder])
    assert at_once["tokens"] == second["tokens"] == computed_second != computed_first
    assert at_once["cached"] == second["cached"] == [0], (
        "a name that had other weights is not cached any more"
    )
    started.call("save_adapter", folder=folder, model=model, seed=1)
    back, computed_back = cached_and_computed(started, ["new name", 3, folder])
    assert back["tokens"] == computed_back == computed_first
    assert back["cached"] == [CACHED], "equal files are the same adapter again"


def test_blocks_computed_before_an_adapter_was_loaded_anew_in_place_are_not_stored_as_the_new_ones(
    changing: tuple[Session, str], model: str
) -> None:
    started, folder = changing
    started.call("add_lora", lora=["run", 1, folder])
    started.call("save_adapter", folder=folder, model=model, seed=2)
    # The old weights prefill, and the store comes after the reload.
    started.call("reload_while_running", lora=["run", 1, folder], prompt=PROMPT)
    started.call("settle")
    after = started.generate([PROMPT], lora=["run", 1, folder])
    other = started.generate([PROMPT], lora=["fresh", 2, folder])
    computed = started.generate([PROMPT], lora=["fresh", 2, folder], extra_args=OPT_OUT)["tokens"]
    assert after["tokens"] == other["tokens"] == computed
    assert after["cached"] == other["cached"] == [0]


def test_an_adapter_whose_files_were_only_touched_is_cached_on(changing: tuple[Session, str]) -> None:
    started, folder = changing
    first, computed = cached_and_computed(started, ["run", 1, folder])
    assert first["cached"] == [CACHED]
    for name in os.listdir(folder):
        os.chmod(os.path.join(folder, name), 0o600)
    again = started.generate([PROMPT], lora=["run", 1, folder])
    assert (again["tokens"], again["cached"]) == (computed, [CACHED])


def test_a_file_in_the_folder_that_nobody_can_read_does_not_matter(
    changing: tuple[Session, str], model: str
) -> None:
    started, folder = changing
    os.mkfifo(os.path.join(folder, "optimizer.pt"))
    first, computed_first = cached_and_computed(started, ["run", 1, folder])
    assert (first["tokens"], first["cached"]) == (computed_first, [CACHED])
    started.call("save_adapter", folder=folder, model=model, seed=2)
    started.generate([PROMPT], lora=["other", 2, str(Path(folder).parent / "other")])
    # The name comes back under another number with other weights.
    second, computed_second = cached_and_computed(started, ["run", 3, folder])
    assert second["tokens"] == computed_second != computed_first
    assert second["cached"] == [0]


def test_a_name_that_comes_back_with_other_weights_stores_nothing_that_rests_on_vllms_own_cache(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    folder, longer = str(tmp_path / "adapter"), [*PROMPT, *prompt(200, seed=77)]
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
    arguments = real(model, tmp_path / "cache", enable_prefix_caching=True, **settings)
    with session({"PYTHONHASHSEED": "0"}) as started:
        started.call("save_adapter", folder=folder, model=model, seed=1)
        start_with_lora(started, arguments)
        started.generate([PROMPT], lora=["run", 1, folder])
        started.call("save_adapter", folder=folder, model=model, seed=2)
        # vLLM finds the prompt's blocks under the name, made with the first weights.
        assert started.generate([longer], lora=["run", 2, folder])["cached"] != [0]
        started.call("settle")
    with session({"PYTHONHASHSEED": "0"}) as started:
        start_with_lora(started, arguments)
        started.call("add_lora", lora=["run", 1, folder])
        answer = started.generate([longer], lora=["run", 1, folder])
        assert answer["cached"] == [0]
        started.call("settle")
        assert started.call("reset_prefix_cache")["ok"]
        computed = started.generate([longer], lora=["run", 1, folder], extra_args=OPT_OUT)["tokens"]
        assert started.call("reset_prefix_cache")["ok"]
        again = started.generate([longer], lora=["run", 1, folder])
        assert answer["tokens"] == again["tokens"] == computed
        assert again["cached"] != [0]


def overwrite(file: Path, with_file: Path) -> None:
    """Byte by byte in place, as rsync --inplace does: whoever has mapped the file sees it."""
    content = with_file.read_bytes()
    assert len(content) == file.stat().st_size
    with file.open("r+b") as raw:
        raw.write(content)


def test_weights_in_memory_do_not_change_with_a_file_that_is_overwritten_in_place(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    folders = {name: tmp_path / name for name in ("adapter", "same", "other")}
    lora = ["run", 1, str(folders["adapter"])]
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
    arguments = real(model, tmp_path / "cache", **settings)
    weights = "adapter_model.safetensors"
    with session({"PYTHONHASHSEED": "0"}) as started:
        for name, seed in (("adapter", 1), ("same", 1), ("other", 9)):
            started.call("save_adapter", folder=str(folders[name]), model=model, seed=seed)
        start_with_lora(started, arguments)
        computed = started.generate([PROMPT], lora=lora, extra_args=OPT_OUT)["tokens"]
        overwrite(folders["adapter"] / weights, folders["other"] / weights)
        # The other takes the only place for computing; the first comes back from memory.
        started.generate([PROMPT], lora=["other", 2, str(folders["other"])], extra_args=OPT_OUT)
        assert started.generate([PROMPT], lora=lora)["tokens"] == computed
        assert started.call("settle")["stored_blocks"] == CACHED // BLOCK
    overwrite(folders["adapter"] / weights, folders["same"] / weights)
    with session({"PYTHONHASHSEED": "0"}) as started:
        start_with_lora(started, arguments)
        started.call("add_lora", lora=lora)
        answer = started.generate([PROMPT], lora=lora)
        assert (answer["tokens"], answer["cached"]) == (computed, [CACHED])


def test_an_adapter_that_is_read_again_in_each_step_is_not_cached(
    changing: tuple[Session, str], model: str
) -> None:
    started, folder = changing
    lora = ["run", 1, folder, {"load_inplace": True}]
    first, computed_first = cached_and_computed(started, ["run", 1, folder])
    assert (first["tokens"], first["cached"]) == (computed_first, [CACHED])
    started.call("add_lora", lora=lora)
    started.call("save_adapter", folder=folder, model=model, seed=2)
    at_once = started.generate([PROMPT], lora=lora)
    again, computed = cached_and_computed(started, lora)
    assert at_once["tokens"] == again["tokens"] == computed != computed_first
    assert at_once["cached"] == again["cached"] == [0]


def test_after_a_restart_an_adapter_that_was_loaded_by_api_hits_with_its_first_request(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    lora, answers = ["run", 1, str(tmp_path / "adapter")], {}
    arguments = real(model, tmp_path / "cache", enable_lora=True, max_lora_rank=8, max_loras=1)
    for start in ("cold", "loaded", "not loaded"):
        with session({"PYTHONHASHSEED": "0"}) as started:
            started.call("save_adapter", folder=lora[2], model=model, seed=1)
            start_with_lora(started, arguments)
            if start == "loaded":
                started.call("add_lora", lora=lora)
            answers[start] = [started.generate([PROMPT], lora=lora) for _ in range(2)]
            answers[start].append(started.generate([PROMPT], lora=lora, extra_args=OPT_OUT))
            assert started.call("settle")["wrong"] == []
    assert len({str(answer["tokens"]) for each in answers.values() for answer in each}) == 1
    cached = {start: [answer["cached"] for answer in each[:2]] for start, each in answers.items()}
    assert cached["loaded"] == [[CACHED], [CACHED]]
    assert cached["not loaded"] == [[0], [CACHED]], "the first request is what loads it"
    assert cached["cold"] == [[0], [CACHED]]


def test_an_adapter_applied_to_other_modules_finds_nothing(model: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    lora, texts = ["run", 1, str(tmp_path / "adapter")], []
    for chosen in (None, ["o_proj"]):
        with session({"PYTHONHASHSEED": "0"}) as started:
            started.call("save_adapter", folder=lora[2], model=model, seed=1)
            settings = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": chosen}
            start_with_lora(started, real(model, tmp_path / "cache", **settings))
            answer = started.generate([PROMPT], lora=lora)
            assert answer["cached"] == [0]
            started.call("settle")
            assert started.generate([PROMPT], lora=lora, extra_args=OPT_OUT)["tokens"] == answer["tokens"]
            texts.append(answer["tokens"])
    assert texts[0] != texts[1]


# ---- the seed of the prefix hashes


def test_without_a_hash_seed_an_engine_hits_after_a_restart_or_says_what_to_set(
    model: str, tmp_path: Path
) -> None:
    arguments = real(model, tmp_path)
    with session() as started:
        release = tuple(int(part) for part in started.call("version")["text"].split(".")[:2])
        if release < (0, 29):
            with pytest.raises(EngineError, match="set PYTHONHASHSEED=0 in the environment of every engine"):
                started.call("start", **arguments)
            return
        started.call("start", **arguments)
        expected = started.generate([PROMPT])["tokens"]
        started.call("settle")
    with session() as other:
        other.call("start", **arguments)
        answer = other.generate([PROMPT])
        assert (answer["tokens"], answer["cached"]) == (expected, [CACHED])


# ---- last, since it changes the model


def test_overwritten_weights_are_a_miss_and_the_text_is_the_new_models(
    model: str, root: Path, first: dict[str, Any]
) -> None:
    real_model(Path(model), seed=2)
    with engine(real(model, root)) as started:
        new = started.generate([PROMPT])
        assert new["cached"] == [0]
        computed = started.generate([PROMPT], extra_args=OPT_OUT)
        assert computed["cached"] == [0]
        assert new["tokens"] == computed["tokens"] != first["tokens"]
