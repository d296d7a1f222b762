"""verify finds what is proved wrong, and deletes that and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from py_kvcache import footer, layout
from py_kvcache.errors import ConfigError, RootError
from py_kvcache.footer import ALGO_BLAKE3, ALGO_NONE, ALGO_SUMS
from py_kvcache.tools import blockcheck, verify
from py_kvcache.tools.blockcheck import Check, Verdict
from py_kvcache.tools.verify import verify_root
from py_kvcache.tools.verify_report import VerifyReport, as_json

Flip = Callable[[Path, int], None]


def run(root: Any, **options: Any) -> VerifyReport:
    return verify_root(str(root.path), threads=2, **options)


def test_a_root_of_valid_blocks_is_good_and_all_of_it_was_read(root: Any) -> None:
    space = root.namespace()
    files = [root.block(space, part, group=group) for part in (0, 1) for group in (0, 3) for _ in range(5)]
    report = run(root)
    assert report.is_good
    assert report.verdicts == {"good": 20}
    assert report.bytes_read == sum(f.stat().st_size for f in files)
    assert report.problems == []


def test_an_empty_root_is_good(root: Any) -> None:
    assert run(root).is_good


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda f, flip: flip(f, 5), "checksum"),
        (lambda f, flip: flip(f, 10_100), "checksum"),  # in the padding
        (lambda f, flip: flip(f, -4096), "checksum"),  # magic
        (lambda f, flip: flip(f, -4090 + 30), "checksum"),
        (lambda f, _: f.write_bytes(bytes(f.stat().st_size)), "checksum"),  # allocated, never written
        (lambda f, _: os.truncate(f, 100), "wrong_size"),
        (lambda f, _: os.truncate(f, 8192), "wrong_size"),
        (lambda f, _: os.truncate(f, 0), "wrong_size"),
        (lambda f, _: f.write_bytes(f.read_bytes() + bytes(4096)), "checksum"),
        (lambda f, _: f.write_bytes(f.read_bytes() + b"tail"), "wrong_size"),
    ],
)
def test_damage_is_found_and_deleted_and_its_neighbours_stay(
    root: Any, flip: Flip, spoil: Callable[[Path, Flip], None], fault: str
) -> None:
    space = root.namespace()
    good = [root.block(space) for _ in range(3)]
    bad = root.block(space)
    spoil(bad, flip)
    report = run(root)
    assert not report.is_good
    assert (dict(report.faults), report.verdicts["good"], report.deleted) == ({fault: 1}, 3, 0)
    assert bad.exists()
    report = run(root, delete=True)
    assert (report.deleted, report.kept) == (1, 0)
    assert not bad.exists()
    assert all(f.exists() for f in good)
    assert run(root).is_good


def test_a_valid_block_under_another_blocks_name_is_damage(root: Any) -> None:
    space = root.namespace()
    one, other = root.block(space), root.block(space)
    shutil.copy(one, other)
    report = run(root, delete=True)
    assert dict(report.faults) == {"wrong_key": 1}
    assert (one.exists(), other.exists()) == (True, False)


def test_a_cut_off_block_without_a_valid_neighbour_is_known_by_its_namespace(root: Any) -> None:
    ours, theirs = root.namespace(), root.namespace("their/model", "bbbbbbbbbbbb", ours=False)
    mine, not_mine = root.block(ours), root.block(theirs)
    for path in (mine, not_mine):
        os.truncate(path, 5_000)
    report = run(root, delete=True)
    assert (mine.exists(), not_mine.exists()) == (False, True)
    assert report.verdicts == {"damaged": 1, "foreign": 1}


def test_files_without_our_footer_are_left_alone_and_counted(root: Any) -> None:
    space = root.namespace()
    foreign = root.block(space)
    root.block(space)
    foreign.write_bytes(b"x" * foreign.stat().st_size)
    report = run(root, delete=True)
    assert foreign.exists()
    assert report.verdicts == {"good": 1, "foreign": 1}
    assert report.in_the_way == 1
    assert not report.is_good


def test_another_programs_cache_on_the_same_volume_is_no_problem(root: Any) -> None:
    theirs = root.block(root.namespace(ours=False))
    theirs.write_bytes(b"x" * 8192)
    report = run(root, delete=True)
    assert theirs.exists()
    assert report.verdicts == {"foreign": 1}
    assert report.is_good


def test_a_block_of_a_newer_version_is_left_alone(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = root.block(root.namespace())
    monkeypatch.setattr(footer, "VERSION", 2)
    newer.write_bytes(root.content(layout.parse_block_path(str(newer)).key))  # type: ignore[union-attr]
    monkeypatch.undo()
    report = run(root, delete=True)
    assert newer.exists()
    assert report.verdicts == {"newer": 1}


@pytest.mark.parametrize("algorithm", [ALGO_BLAKE3, ALGO_SUMS])
def test_the_digest_that_a_footer_names_is_the_one_checked(root: Any, algorithm: int) -> None:
    space = root.namespace()
    root.block(space, algorithm=algorithm)
    bad = root.block(space, algorithm=algorithm)
    with bad.open("r+b") as file:
        file.write(b"?")
    report = run(root)
    assert report.verdicts == {"good": 1, "damaged": 1}


def test_a_block_stored_without_checksum_is_said_to_be_unchecked(root: Any) -> None:
    root.block(root.namespace(), algorithm=ALGO_NONE)
    report = run(root)
    assert report.verdicts == {"unchecked": 1}
    assert report.is_good


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "link to a block"])
def test_what_lies_in_a_blocks_place_neither_hangs_nor_is_followed_nor_deleted(root: Any, kind: str) -> None:
    space = root.namespace()
    path, other = root.block(space), root.block(space)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(other if "block" in kind else "/etc/passwd")
    report = run(root, delete=True)
    assert os.path.lexists(path)
    assert (report.verdicts["good"], report.in_the_way, report.is_good) == (1, 1, False)


def test_folders_that_are_links_are_not_entered(root: Any, tmp_path: Path, flip: Flip) -> None:
    space = root.namespace()
    root.block(space)
    outside = root.block(space, 5)
    flip(outside, 3)
    moved = tmp_path / "outside"
    part = Path(layout.part_dir(str(root.path), space, 5))
    part.rename(moved)
    part.symlink_to(moved)
    (Path(layout.part_dir(str(root.path), space, 0)) / "fff").symlink_to(moved / outside.parts[-3])
    report = run(root, delete=True)
    assert report.verdicts == {"good": 1}
    assert len(list(moved.rglob("*.bin"))) == 1


def test_a_file_swapped_for_a_link_between_walk_and_read_is_not_followed(
    root: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = root.block(root.namespace())
    secret = tmp_path / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    fd = os.open(root.path, os.O_RDONLY)
    try:
        name = os.path.relpath(path, root.path)
        check = blockcheck.check_block(fd, name, b"", blockcheck.new_buffer())
    finally:
        os.close(fd)
    assert check.verdict is Verdict.FOREIGN


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_an_error_of_the_file_system_is_reported_and_is_never_a_reason_to_delete(
    root: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    space = root.namespace()
    files = [root.block(space) for _ in range(3)]

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    report = run(root, delete=True)
    assert report.verdicts == {"unreadable": 3}
    assert not report.is_good
    assert {p["errno"] for p in report.problems} == {errno.errorcode[code]}
    assert all(f.exists() for f in files)


def test_damage_that_a_second_read_does_not_confirm_is_kept(
    root: Any, flip: Flip, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root.block(root.namespace())
    flip(path, 1)
    real, calls = verify.check_block, []

    def heals(*args: Any, **options: Any) -> Check:
        calls.append(1)
        if len(calls) == 2:
            flip(path, 1)
        return real(*args, **options)

    monkeypatch.setattr(verify, "check_block", heals)
    report = run(root, delete=True)
    assert path.exists()
    assert (report.deleted, report.kept) == (0, 1)


def test_a_fresh_file_that_took_the_name_meanwhile_is_not_deleted(
    root: Any, flip: Flip, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root.block(root.namespace())
    good = path.read_bytes()
    flip(path, 1)
    real, calls = verify.check_block, []

    def replaced_after_second_read(*args: Any, **options: Any) -> Check:
        calls.append(1)
        check = real(*args, **options)
        if len(calls) == 2:
            fresh = path.with_suffix(".new")
            fresh.write_bytes(good)
            fresh.rename(path)
        return check

    monkeypatch.setattr(verify, "check_block", replaced_after_second_read)
    report = run(root, delete=True)
    assert path.read_bytes() == good
    assert (report.deleted, report.kept) == (0, 1)


def test_a_damaged_file_that_may_not_be_removed_is_reported(
    root: Any, flip: Flip, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root.block(root.namespace())
    flip(path, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "unlink", refuse)
    report = run(root, delete=True)
    assert (report.deleted, report.kept, dict(report.errors)) == (0, 1, {"EACCES": 1})


@pytest.mark.parametrize("stage", ["open", "read"])
def test_a_file_system_without_direct_io_is_read_buffered(
    root: Any, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    root.block(root.namespace())
    real_open, real_preadv, refused = os.open, os.preadv, []

    def open_(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if stage == "open" and flags & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_open(path, flags, *args, **options)

    def preadv(fd: int, *args: Any) -> int:
        import fcntl

        if stage == "read" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_preadv(fd, *args)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    assert run(root).verdicts == {"good": 1}
    assert refused


def test_short_reads_are_continued(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root.block(root.namespace(), payload_bytes=50_000)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:1000]], at))
    assert run(root).verdicts == {"good": 1}


def test_blocks_larger_than_one_chunk_are_digested_whole(root: Any, flip: Flip) -> None:
    space = root.namespace()
    size = blockcheck.CHUNK * 2 + 5000
    root.block(space, payload_bytes=size)
    bad = root.block(space, payload_bytes=size)
    flip(bad, blockcheck.CHUNK * 2 + 100)
    assert run(root).verdicts == {"good": 1, "damaged": 1}


def test_an_evicted_file_is_no_problem(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root.block(root.namespace())
    real = verify.check_block

    def evicted(*args: Any, **options: Any) -> Check:
        path.unlink()
        return real(*args, **options)

    monkeypatch.setattr(verify, "check_block", evicted)
    report = run(root)
    assert report.verdicts == {"vanished": 1}
    assert report.is_good


def test_limit_and_namespace_narrow_the_work(root: Any) -> None:
    one, two = root.namespace("a/one", "a" * 12), root.namespace("b/two", "b" * 12)
    for space in (one, two):
        for _ in range(4):
            root.block(space)
    assert run(root, limit=3).blocks == 3
    assert run(root, namespace="b" * 12).blocks == 4
    assert run(root, namespace="*one*", limit=100).blocks == 4
    assert run(root).blocks == 8
    with pytest.raises(ConfigError, match="a_one_aaaaaaaaaaaa"):
        run(root, namespace="three")


def test_temporaries_are_counted_and_left_to_gc(root: Any) -> None:
    block = root.block(root.namespace())
    young, dead = root.temporary(block), root.temporary(block, age_s=1000)
    report = run(root, delete=True)
    assert (report.temporaries, report.dead_temporaries) == (2, 1)
    assert young.exists()
    assert dead.exists()
    assert report.is_good


def test_an_interrupt_stops_the_run_and_what_was_seen_is_reported(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = root.namespace()
    for _ in range(5):
        root.block(space)

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify._Run, "_put", interrupt)
    report = run(root)
    assert report.interrupted
    assert not report.is_good


def test_a_bug_in_a_worker_is_raised_and_not_swallowed(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root.block(root.namespace())

    def broken(*_: Any, **__: Any) -> Check:
        raise ZeroDivisionError

    monkeypatch.setattr(verify, "check_block", broken)
    with pytest.raises(ZeroDivisionError):
        run(root)


def test_the_list_of_problems_is_bounded(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("py_kvcache.tools.verify_report.MAX_PROBLEMS", 2)
    space = root.namespace()
    for _ in range(5):
        root.block(space).write_bytes(b"")
    told = json.loads(as_json(run(root)))
    assert (len(told["problems"]), told["problems_left_out"], told["damage"]) == (2, 3, {"wrong_size": 5})


def test_no_descriptor_is_left_open(root: Any, flip: Flip) -> None:
    space = root.namespace()
    for i in range(6):
        path = root.block(space)
        if i % 2:
            flip(path, 1)
    before = len(os.listdir("/proc/self/fd"))
    run(root, delete=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_root_that_is_missing_or_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("missing", "file"):
        with pytest.raises(RootError, match=name):
            verify_root(str(tmp_path / name))
