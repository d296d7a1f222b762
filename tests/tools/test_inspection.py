"""inspect tells what lies under a root and trusts nothing that a stranger put there."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from py_kvcache import layout
from py_kvcache.errors import ConfigError
from py_kvcache.tools import inspection, inspection_view, scan
from py_kvcache.tools.inspection import inspect_root
from py_kvcache.tools.show import human_age, human_bytes, printable


def text_of(report: inspection.InspectReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    inspection_view.show(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_namespaces_parts_groups_and_bytes_are_counted(root: Any) -> None:
    one, two = root.namespace("a/one", "a" * 12), root.namespace("b/two", "b" * 12)
    for part, group in ((0, 0), (0, 1), (0, 1), (3, 0)):
        root.block(one, part, group=group)
    root.block(two, payload_bytes=1)
    told = inspect_root(str(root.path)).to_json()
    assert told["schema"] == "py-kvcache/inspect/1"
    assert told["total"] == {
        "namespaces": 2, "blocks": 5, "bytes": 4 * 16_384 + 8_192, "temporaries": 0, "unknown": 0,
    }  # fmt: skip
    first = told["namespaces"][0]
    assert (first["namespace"], first["model"], first["digest"]) == (one, "a/one", "a" * 12)
    assert [(p["part"], p["blocks"], p["groups"]) for p in first["parts"]] == [
        (0, 3, {"0": 1, "1": 2}),
        (3, 1, {"0": 1}),
    ]
    assert first["parts"][1]["sizes"] == {"16384": 1}
    assert first["config"]["fields"]["block_tokens"] == 256
    assert told["good"]
    json.dumps(told)


def test_ages_are_taken_by_the_file_systems_clock(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    space = root.namespace()
    for age in (0, 1_000, 1_000, 100_000, 9_000_000):
        path = root.block(space)
        now = path.stat().st_mtime
        os.utime(path, (now - age, now - age))
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this host's clock is far off
    report = inspect_root(str(root.path))
    assert report.clock.source == "file system"
    told = report.to_json()["namespaces"][0]
    assert [a["files"] for a in told["ages"]] == [1, 2, 0, 0, 1, 0, 1]
    assert sum(a["bytes"] for a in told["ages"]) == told["bytes"]
    assert told["oldest_age_s"] == pytest.approx(9_000_000, abs=60)
    assert told["ahead_of_clock"] == 0


def test_where_no_probe_file_can_be_made_ages_are_by_this_hosts_clock_and_it_says_so(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.block(root.namespace())
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY):
            raise OSError(30, "read-only")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    report = inspect_root(str(root.path))
    assert report.clock.source == "this host"
    assert "this host's clock" in text_of(report)
    assert report.problems == []


@pytest.mark.parametrize("nameless", [True, False])
def test_the_clocks_probe_file_leaves_nothing(
    root: Any, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    real = os.open

    def no_tmpfile(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return real(path, flags, *args, **options)

    if not nameless:
        monkeypatch.setattr(os, "open", no_tmpfile)
    fd = real(root.path, os.O_RDONLY)
    try:
        assert scan.file_system_clock(fd).source == "file system"
    finally:
        os.close(fd)
    assert os.listdir(root.path) == []


def test_temporaries_are_alive_or_dead_by_age(root: Any) -> None:
    block = root.block(root.namespace())
    root.temporary(block)
    root.temporary(block, age_s=899 - 60)
    root.temporary(block, age_s=901)
    told = inspect_root(str(root.path)).to_json()["namespaces"][0]["temporaries"]
    assert told == {"files": 3, "bytes": 12, "dead": 1}


def test_what_is_not_ours_is_counted_by_kind_and_never_entered(root: Any, tmp_path: Path) -> None:
    block = root.block(root.namespace())
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (root.path / "README").write_text("x")
    (root.path / "lost+found").mkdir()
    (root.path / "lost+found" / "many").write_text("x")
    (block.parent / "link").symlink_to(outside)
    os.mkfifo(block.parent / "pipe")
    part = layout.part_dir(str(root.path), layout.namespace_name("m", "c" * 12), 0)
    os.symlink(outside, part)
    report = inspect_root(str(root.path))
    assert dict(report.unknown) == {"file": 1, "folder": 1, "symbolic link": 2, "fifo": 1}
    assert len(report.namespaces) == 1
    assert report.problems == []


def test_something_else_in_a_blocks_place_is_a_problem(root: Any) -> None:
    path = root.block(root.namespace())
    path.unlink()
    path.mkdir()
    report = inspect_root(str(root.path))
    assert report.problems[0].endswith("1 blocks' names are taken by something else")
    assert "in a block's place" in text_of(report)


def test_a_size_that_no_block_has_is_a_problem(root: Any) -> None:
    space = root.namespace()
    os.truncate(root.block(space), 5_000)
    root.block(space)
    assert "1 files have a size that no block has" in inspect_root(str(root.path)).problems[0]


def test_empty_folders_are_counted_for_gc(root: Any) -> None:
    space = root.namespace()
    root.block(space)
    root.block(space).unlink()
    part = inspect_root(str(root.path)).to_json()["namespaces"][0]["parts"][0]
    assert (part["folders"], part["empty_folders"]) == (2, 1)


@pytest.mark.parametrize(
    ("spoil", "state", "good"),
    [
        (lambda p: p.unlink(), "missing", True),
        (lambda p: p.write_text("{"), "damaged", False),
        (lambda p: p.write_text("[" * 100_000), "damaged", False),
        (lambda p: p.write_text('{"model": "x"}'), "other", True),
        (lambda p: (p.unlink(), os.mkfifo(p)), "damaged", False),
        (lambda p: (p.unlink(), p.symlink_to("/etc/passwd")), "unreadable", False),
    ],
)
def test_a_strange_config_is_named_and_harmless(root: Any, spoil: Any, state: str, good: bool) -> None:
    space = root.namespace()
    root.block(space)
    spoil(Path(layout.config_path(str(root.path), space)))
    report = inspect_root(str(root.path))
    assert report.namespaces[space].config.state == state
    assert (not report.problems) == good
    assert text_of(report)


def test_a_folder_that_cannot_be_read_is_a_problem_with_its_errno(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = root.namespace()
    part = os.path.basename(os.path.dirname(os.path.dirname(os.path.dirname(root.block(space)))))
    real = os.open

    def stale(path: Any, *args: Any, **options: Any) -> int:
        if path == part:
            raise OSError(5, "EIO")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", stale)
    report = inspect_root(str(root.path))
    assert dict(report.errors) == {"EIO": 1}
    assert report.problems == ["1 entries could not be read: EIO"]


def test_a_namespace_can_be_chosen_by_digest_name_or_pattern(root: Any) -> None:
    one, two = root.namespace("a/one", "a" * 12), root.namespace("b/two", "b" * 12)
    for space in (one, two):
        root.block(space)
    for pattern in ("a" * 12, one, "*one*", "a_one"):
        assert list(inspect_root(str(root.path), namespace=pattern).namespaces) == [one]
    with pytest.raises(ConfigError, match="there are"):
        inspect_root(str(root.path), namespace="none")


@given(st.text(max_size=50))
def test_a_strangers_file_name_cannot_steer_the_terminal(name: str) -> None:
    shown = printable(name + "\x1b[31m\n\udcff")
    assert shown.isprintable()
    shown.encode()


def test_numbers_are_written_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 29_360_128, 1 << 62)] == [
        "0 B", "1023 B", "1.0 KiB", "28.0 MiB", "4096.0 PiB",
    ]  # fmt: skip
    assert [human_age(n) for n in (0, 59, 90, 4_000, 200_000, -90)] == [
        "0 s", "59 s", "1.5 min", "1.1 h", "2.3 d", "-1.5 min",
    ]  # fmt: skip
