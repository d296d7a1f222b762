"""Little GPU memory, few staging slots, a full volume, two engines at once, MultiConnector."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from nursery import engine as forked
from session import OPT_OUT, engine_arguments, prompt

BLOCK = 64


@pytest.fixture(scope="module")
def cold(tiny: str) -> Any:
    prompts = [prompt(1500 + 64 * i, seed=i) for i in range(6)]
    with engine(engine_arguments(tiny, None)) as session:
        return prompts, [session.generate([p], max_tokens=40)["tokens"][0] for p in prompts]


def test_preempted_requests_give_the_cold_text(tiny: str, tmp_path: Path, cold: Any) -> None:
    prompts, expected = cold
    # 130 blocks of 32 tokens: three requests fit, and grow until one must give way.
    arguments = engine_arguments(
        tiny, str(tmp_path), num_gpu_blocks_override=160, max_model_len=2048, max_num_batched_tokens=512
    )
    with engine(arguments) as session:
        for _ in range(2):
            assert session.generate(prompts, max_tokens=40)["tokens"] == expected
        end = session.call("settle")
    assert end["loaded_blocks"] > 0 and end["wrong"] == [] and end["jobs_left"] == 0 and end["leaks"] == 0
    assert end["slots"]["free"] == sum(end["slots"].values())


def test_loads_larger_than_a_quarter_of_the_pool_make_progress(tiny: str, tmp_path: Path, cold: Any) -> None:
    prompts, expected = cold
    # 120 blocks of 32 tokens; each of the eight requests needs at least 47 of them for what it loads.
    arguments = engine_arguments(
        tiny, str(tmp_path), extra={"lookup_deadline_s": 30, "load_deadline_s": 300},
        num_gpu_blocks_override=120, max_model_len=2048,
    )  # fmt: skip
    eight = prompts + prompts[:2]
    with forked(arguments) as session:
        session.generate(prompts, max_tokens=40)
        session.call("settle")
        answer = session.generate(eight, max_tokens=40)
        assert answer["tokens"] == expected + expected[:2]
        assert answer["cached"] == [len(p) // BLOCK * BLOCK for p in eight], "all of them were loads"
        end = session.call("settle")
    assert end["wrong"] == [] and end["jobs_left"] == 0 and end["leaks"] == 0


def test_blocks_reused_right_after_their_request_finished_are_stored_as_they_were_or_not_at_all(
    tiny: str, tmp_path: Path
) -> None:
    prompts = [prompt(1500, seed=100 + i) for i in range(6)]
    # After a burst of 45 blocks the copies of each request's 23 take half a second, and vLLM takes the
    # blocks of a finished request for the next one at once.
    slow = {"store_bytes_per_s": 12_000_000, "staging_bytes": 3 * 266_240}
    stored: dict[str, dict[str, bytes]] = {}
    # With its own prefix caching vLLM keeps the blocks of a finished request while there is room: there every
    # block is copied, however busy the machine.
    roomy = {"enable_prefix_caching": True}
    # Without it nobody else has a use for them here: storage that is slow costs no block.
    kept: dict[str, int] = {"num_gpu_blocks_override": 2000}
    for kind, extra, changes in (
        ("roomy", {}, roomy), ("kept", slow, kept), ("tight", slow, {"num_gpu_blocks_override": 60})
    ):  # fmt: skip
        root = tmp_path / kind
        arguments = engine_arguments(
            tiny, str(root), extra=extra, max_model_len=1536, max_num_seqs=1, **changes
        )
        with forked(arguments) as session:
            for some in [[p] for p in prompts] if kind == "roomy" else [prompts]:
                session.generate(some, max_tokens=1)
                end = session.call("settle")
            assert end["jobs_left"] == 0 and end["leaks"] == 0 and end["failures"] == {}
        stored[kind] = {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*.bin")}
    whole, tight = stored["roomy"], stored["tight"]
    assert len(whole) == 6 * (1500 // BLOCK) and tight and stored["kept"] == whole
    assert [name for name, content in tight.items() if content != whole.get(name)] == []
    # Blocks that would have had to be waited for were dropped, which is counted.
    assert end["dropped"].keys() <= {"store/cancelled"}
    assert len(tight) + sum(end["dropped"].values()) == len(whole)


def test_three_slots_serve_64_requests_of_6000_tokens(tiny: str, tmp_path: Path) -> None:
    # 64 tokens x 4 layers x 2 (keys, values) x 2 heads x 64 x 4 bytes = 262,144 bytes a block, and a footer.
    slot = 262_144 + 4096
    # Deadlines count from submission: 64 loads that queue for three slots take what they take here.
    extra = {"staging_bytes": 3 * slot + 100, "open_lookahead": 8, "load_deadline_s": 600}
    arguments = engine_arguments(tiny, str(tmp_path), extra=extra)
    documents = [prompt(6000, seed=i) for i in range(2)]
    with engine(arguments) as session:
        first = []
        for document in documents:
            first += session.generate([document], max_tokens=1)["tokens"]
            # Else the next document takes the blocks before so few slots copied them all.
            session.call("settle")
        session.call("watch_peaks")
        answer = session.generate(documents * 32, max_tokens=1)
        end = session.call("settle")
    assert answer["tokens"] == first * 32
    assert end["loaded_blocks"] >= 64 * 93 and end["wrong"] == []
    assert end["peak_slots"] <= 3 and sum(end["slots"].values()) == 3
    # open_lookahead files ahead, and one descriptor for each slot.
    assert end["peak_fds"] <= 8 + 3


VOLUME = 12 << 20  # 45 blocks, of 148 that the prompts have


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={VOLUME}", "none", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_volume_costs_stores_and_nothing_else(tiny: str, small_volume: Path, cold: Any) -> None:
    prompts, expected = cold
    with engine(
        engine_arguments(tiny, str(small_volume), extra={"store_stop_at": 1, "store_resume_at": 1})
    ) as session:
        for _ in range(2):
            assert [session.generate([p], max_tokens=40)["tokens"][0] for p in prompts] == expected
        end = session.call("settle")
    assert end["loaded_blocks"] > 0, "what did fit is used"
    assert end["wrong"] == [] and end["leaks"] == 0 and not list(small_volume.rglob("*.tmp"))


def test_stores_stop_at_the_watermark(tiny: str, small_volume: Path, cold: Any) -> None:
    prompts, expected = cold
    with engine(
        engine_arguments(tiny, str(small_volume), extra={"store_stop_at": 0.6, "store_resume_at": 0.5})
    ) as s:
        assert [s.generate([p], max_tokens=40)["tokens"][0] for p in prompts] == expected
        end = s.call("settle")
    used = sum(f.stat().st_size for f in small_volume.rglob("*.bin"))
    assert 0 < used <= 0.6 * VOLUME + 2 * 266_240
    assert (
        end["dropped"].get("store/paused", 0) + sum(v for k, v in end["failures"].items() if "paused" in k)
        > 0
    )


def test_two_engines_on_one_root_at_the_same_time(tiny: str, tmp_path: Path, cold: Any) -> None:
    prompts, expected = cold
    results: dict[int, Any] = {}
    arguments = engine_arguments(tiny, str(tmp_path))
    with engine(arguments) as one, engine(arguments) as two:

        def run(number: int, session: Any, order: int) -> None:
            answers = [session.generate([p], max_tokens=40)["tokens"][0] for p in prompts[::order]]
            results[number] = answers[::order]
            session.call("settle")

        threads = [
            threading.Thread(target=run, args=(1, one, 1)),
            threading.Thread(target=run, args=(2, two, -1)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {1: expected, 2: expected}
        ends = [session.call("settle") for session in (one, two)]
    files = list(tmp_path.rglob("*.bin"))
    assert len(files) == sum(len(p) // BLOCK for p in prompts)
    assert not list(tmp_path.rglob("*.tmp"))
    assert sum(end["stored_blocks"] for end in ends) == len(files), "first writer wins, each block once"
    assert all(end["wrong"] == [] for end in ends)


def test_inside_multi_connector_a_failed_load_is_a_recompute(tiny: str, tmp_path: Path, cold: Any) -> None:
    prompts, expected = cold
    arguments = engine_arguments(tiny, str(tmp_path))
    ours = arguments["kv_transfer_config"]
    arguments["kv_transfer_config"] = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours]},
    }  # fmt: skip
    # In one process vLLM 0.26's MultiConnector takes each connector's statistics for what they are after a
    # journey between two (multi_connector.py, observe), whatever the connector.
    arguments["disable_log_stats"] = True
    with engine(arguments) as session:
        assert session.generate([prompts[0]], max_tokens=40)["tokens"][0] == expected[0]
        session.call("settle")
        again = session.generate([prompts[0]], max_tokens=40)
        assert again["tokens"][0] == expected[0] and again["cached"] == [1500 // BLOCK * BLOCK]
        session.call("break_next", how="delete", blocks=[2])
        assert session.generate([prompts[0]], max_tokens=40)["tokens"][0] == expected[0]


def test_the_thread_ring_serves_the_same_text(tiny: str, tmp_path: Path, cold: Any) -> None:
    prompts, expected = cold
    with engine(
        engine_arguments(tiny, str(tmp_path), extra={"ring": "threads", "checksum": False})
    ) as session:
        for _ in range(2):
            assert session.generate(prompts, max_tokens=40)["tokens"] == expected
        end = session.call("settle")
    assert end["loaded_blocks"] > 0 and end["wrong"] == []


def test_a_streaming_session_is_not_cached_and_poisons_nothing(tiny: str, tmp_path: Path) -> None:
    turns = [prompt(200, seed=70 + n) for n in range(3)]
    whole = [token for turn in turns for token in turn]
    with engine(engine_arguments(tiny, str(tmp_path))) as session:
        assert session.call("session", turns=turns)["left"] is False
        assert session.call("settle")["wrong"] == []
        for length in (300, 400, 500, 600):
            loaded = session.generate([whole[:length]])
            computed = session.generate([whole[:length]], extra_args=OPT_OUT)
            assert loaded["tokens"] == computed["tokens"], length
        assert session.generate([whole])["cached"] == [600 // BLOCK * BLOCK]


def test_requests_that_a_reset_preempts_go_on_from_storage(tiny: str, tmp_path: Path) -> None:
    prompts = [prompt(700, seed=80 + n) for n in range(3)]
    with engine(engine_arguments(tiny, str(tmp_path))) as session:
        first = session.generate(prompts, max_tokens=24)
        session.call("settle")
        again = session.call("reset_while_running", prompts=prompts, max_tokens=24)
        assert again["resets"] == 1
        assert again["tokens"] == [tokens for (tokens,) in first["tokens"]]
        end = session.call("settle")
    assert end["jobs_left"] == 0 and end["leaks"] == 0 and end["wrong"] == []
    assert end["loaded_blocks"] >= 3 * (700 // BLOCK)
