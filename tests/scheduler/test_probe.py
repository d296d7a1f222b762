"""Presence along a chain, found off-thread with few questions."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.layout import block_path, part_dir
from py_kvcache.scheduler.probe import ChainAnswer, ChainQuestion, Prober, answer, longest_prefix

SPACE = "model_0123456789abcdef"
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(8)]


class Asked:
    """A presence list that notes which positions were asked for."""

    def __init__(self, present: list[bool]) -> None:
        self.present, self.positions = present, []

    def __call__(self, position: int) -> bool:
        self.positions.append(position)
        return self.present[position]


@given(st.integers(0, 5_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_a_monotone_chain_gets_the_exact_answer_with_about_two_log_n_questions(chain: tuple[int, int]):
    length, present = chain
    asked = Asked([True] * present + [False] * (length - present))
    assert longest_prefix(length, asked) == present
    assert len(asked.positions) <= 2 * math.ceil(math.log2(length + 1)) + 2
    assert len(set(asked.positions)) == len(asked.positions)


@given(st.lists(st.booleans(), max_size=60))
def test_whatever_holes_there_are_the_last_block_of_the_answer_exists_and_the_next_does_not(
    present: list[bool],
):
    count = longest_prefix(len(present), present.__getitem__)
    assert 0 <= count <= len(present)
    if count:
        assert present[0]
        assert present[count - 1]
    if count < len(present):
        assert not present[count]


def test_the_two_usual_answers_cost_one_and_two_questions():
    nothing, everything = Asked([False] * 4_096), Asked([True] * 4_096)
    assert longest_prefix(4_096, nothing) == 0
    assert nothing.positions == [0]
    assert longest_prefix(4_096, everything) == 4_096
    assert everything.positions == [0, 4_095]


def test_an_empty_chain_asks_nothing():
    assert longest_prefix(0, lambda position: pytest.fail("asked")) == 0


def question(root: Path | str, parts: tuple[int, ...] = (0,), keys: list[bytes] = KEYS) -> ChainQuestion:
    return ChainQuestion(7, str(root), SPACE, parts, keys)


def put(root: Path, number: int, part: int = 0) -> Path:
    path = Path(block_path(part_dir(str(root), SPACE, part), KEYS[number]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_blocks_on_disk_are_found(tmp_path: Path):
    for number in range(3):
        put(tmp_path, number)
    assert answer(question(tmp_path)) == ChainAnswer(7, 3, 0)


def test_a_root_without_our_folders_is_an_ordinary_miss(tmp_path: Path):
    assert answer(question(tmp_path)) == ChainAnswer(7, 0, 0)
    (tmp_path / f"{SPACE}_r0").write_bytes(b"a file where a folder should be")
    assert answer(question(tmp_path)) == ChainAnswer(7, 0, 0)


def test_a_block_counts_only_when_every_shard_has_it(tmp_path: Path):
    for number in range(4):
        put(tmp_path, number, part=0)
    for number in range(2):
        put(tmp_path, number, part=1)
    assert answer(question(tmp_path, (0, 1))).present == 2
    assert answer(question(tmp_path, (0,))).present == 4


def _folder(path: Path) -> None:
    path.mkdir()


def _symlink(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"x")
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_folder, _symlink, _fifo])
def test_what_is_no_regular_file_is_absent(tmp_path: Path, make):
    for number in range(3):
        put(tmp_path, number)
    path = put(tmp_path, 1)
    path.unlink()
    make(path)
    assert answer(question(tmp_path, keys=KEYS[:2])).present == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ELOOP])
def test_an_error_of_the_file_system_is_a_miss_that_says_its_errno(code: int):
    def lstat(path: str) -> os.stat_result:
        raise OSError(code, os.strerror(code), path)

    assert answer(question("/r"), lstat) == ChainAnswer(7, 0, code)


def test_an_error_far_down_the_chain_keeps_the_head(tmp_path: Path):
    for number in range(8):
        put(tmp_path, number)
    bad = {str(block_path(part_dir(str(tmp_path), SPACE, 0), KEYS[n])) for n in range(4, 8)}

    def lstat(path: str) -> os.stat_result:
        if path in bad:
            raise OSError(errno.EIO, "no", path)
        return os.lstat(path)

    assert answer(question(tmp_path), lstat) == ChainAnswer(7, 4, errno.EIO)


def take(prober: Prober, count: int, sign: threading.Event) -> list[ChainAnswer]:
    answers: list[ChainAnswer] = []
    while len(answers) < count:
        assert sign.wait(10), "the prober never answered"
        answers += prober.answers()
    return answers


def test_the_prober_looks_in_threads_of_its_own_and_stays_alive_when_a_job_of_it_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    threads: set[int] = set()
    done = threading.Event()

    def lstat(path: str) -> os.stat_result:
        threads.add(threading.get_ident())
        return os.lstat(path)

    prober = Prober(threads=1, lstat=lstat)
    prober.run(lambda: 1 / 0)
    prober.ask(question(tmp_path, keys=[b"too short"]))
    prober.ask(question(tmp_path))
    prober.run(done.set)
    assert take(prober, 2, done) == [ChainAnswer(7, 0, errno.EIO), ChainAnswer(7, 0, 0)]
    assert threading.get_ident() not in threads
    assert len(threads) == 1
    assert sum("a probe failed" in record.message for record in caplog.records) == 2
    prober.shutdown()


def test_a_hung_file_system_keeps_one_thread_and_the_others_answer(tmp_path: Path):
    release, done = threading.Event(), threading.Event()
    first = threading.Event()

    def lstat(path: str) -> os.stat_result:
        if not first.is_set():
            first.set()
            release.wait(10)
        return os.lstat(path)

    prober = Prober(threads=2, lstat=lstat)
    prober.ask(question(tmp_path))
    assert first.wait(10)
    prober.ask(question(tmp_path))
    prober.run(done.set)
    assert len(take(prober, 1, done)) == 1
    release.set()
    prober.shutdown()


def test_threads_end_after_shutdown_and_asking_never_blocks(tmp_path: Path):
    prober = Prober(threads=3)
    prober.shutdown()
    for thread in prober._threads:
        thread.join(10)
        assert not thread.is_alive()
    prober.ask(question(tmp_path))
    assert prober.answers() == []


def test_a_wait_ends_with_the_answer_and_not_before_or_after_its_time(tmp_path: Path):
    let_go = threading.Event()

    def lstat(path: str) -> os.stat_result:
        assert let_go.wait(10)
        return os.lstat(path)

    prober = Prober(threads=1, lstat=lstat)
    prober.ask(question(tmp_path))
    prober.wait(0.01)
    assert prober.answers() == []
    threading.Timer(0.05, let_go.set).start()
    prober.wait(30)
    assert prober.answers() == [ChainAnswer(7, 0, 0)]
    prober.ask(question(tmp_path))
    while prober._answers.empty():
        time.sleep(0.001)
    prober.wait(30)  # what is there already is not waited for
    assert prober.answers() == [ChainAnswer(7, 0, 0)]
    prober.shutdown()
