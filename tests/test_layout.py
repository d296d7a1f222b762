"""Names: round trips, and nothing that a stranger wrote is taken for ours."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache import layout

HASHES = st.binary(min_size=8, max_size=64)
GROUPS = st.integers(0, 2**32 - 1)
KEYS = st.builds(lambda h, g: h + g.to_bytes(4, "big"), HASHES, GROUPS)
DIGESTS = st.text("0123456789abcdef", min_size=12, max_size=64)
MODELS = st.one_of(st.text(max_size=200), st.sampled_from(["meta-llama/Llama-3.2-3B", "..", ".", "/", "-rf"]))
HOSTS = st.one_of(st.text(max_size=100), st.sampled_from(["vllm-7d9-x2x", "a.b.example", "..", ""]))
TOKENS = st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True)
KEY = bytes(range(32)) + (3).to_bytes(4, "big")
NAMESPACE = "m_0123456789ab"


@given(st.integers(0, 2**50))
def test_padding_reaches_the_next_multiple_of_4096_and_no_further(n: int) -> None:
    assert layout.padded(n) % 4096 == 0
    assert 0 <= layout.padded(n) - n < 4096
    assert layout.file_bytes(n) == layout.padded(n) + 4096


@given(MODELS, DIGESTS, st.integers(0, 10**6), KEYS)
def test_a_block_path_parses_back_to_its_key(model: str, digest: str, part: int, key: bytes) -> None:
    namespace = layout.namespace_name(model, digest)
    path = layout.block_path(layout.part_dir("/cache", namespace, part), key)
    parsed = layout.parse_block_path(path)
    assert parsed is not None
    assert (parsed.namespace, parsed.part, parsed.key) == (namespace, part, key)


@given(MODELS, DIGESTS, KEYS, HOSTS, TOKENS)
def test_no_path_leaves_the_root_or_holds_an_odd_character(
    model: str, digest: str, key: bytes, host: str, token: str
) -> None:
    namespace = layout.namespace_name(model, digest)
    final = layout.block_path(layout.part_dir("/cache", namespace, 0), key)
    temp = layout.temp_path(final, hostname=host, pid=1, token=token)
    for path in (final, temp, layout.config_path("/cache", namespace)):
        assert os.path.normpath(path) == path
        assert path.startswith("/cache/")
        assert path.isascii()
        assert path.isprintable()
        assert " " not in path
        assert all(len(name) <= 255 for name in path.split("/"))


@given(MODELS, DIGESTS, st.one_of(st.none(), st.integers(0, 10**6)))
def test_a_namespace_folder_parses_back_to_digest_and_part(model: str, digest: str, part: int | None) -> None:
    namespace = layout.namespace_name(model, digest)
    name = namespace if part is None else f"{namespace}_r{part}"
    parsed = layout.parse_namespace_dir(name)
    assert parsed is not None
    assert (parsed.namespace, parsed.digest, parsed.part) == (namespace, digest, part)
    assert not parsed.model.startswith((".", "-"))
    assert len(parsed.model) <= 80


@given(HASHES, HOSTS, st.integers(1, 2**31), TOKENS)
def test_a_temporary_says_who_made_it(hash_: bytes, host: str, pid: int, token: str) -> None:
    final = layout.block_path("/c/p", hash_ + bytes(4))
    temp = layout.temp_path(final, hostname=host, pid=pid, token=token)
    assert os.path.dirname(temp) == os.path.dirname(final)
    parsed = layout.parse_temp_name(os.path.basename(temp))
    assert parsed == (hash_.hex(), layout.safe_hostname(host), pid, token)
    assert layout.parse_block_path(temp) is None


@given(st.text(max_size=300))
def test_foreign_names_are_none_and_never_an_error(name: str) -> None:
    layout.parse_namespace_dir(name)
    assert layout.parse_block_path(name) is None or name.endswith(".bin")
    assert layout.parse_temp_name(name) is None or name.endswith(".tmp")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p + "\n",
        lambda p: p.replace("/000/", "/001/"),
        lambda p: p.replace("/10_g3/", "/11_g3/"),
        lambda p: p.replace("_g3/", "_g03/"),
        lambda p: p.replace("_g3/", "_g4294967296/"),
        lambda p: p.replace(".bin", ".BIN"),
        lambda p: p.replace("_r0/", "/"),
        lambda p: p.replace("_r0/", "_r00/"),
        lambda p: p.replace("1e1f.bin", "1E1F.bin"),
        lambda p: p.replace("1e1f.bin", "1e1.bin"),
        lambda p: p.replace("_r0/", "_r\u0660/"),
    ],
)
def test_only_the_one_spelling_of_a_block_path_is_accepted(change: object) -> None:
    path = layout.block_path(layout.part_dir("/cache", NAMESPACE, 0), KEY)
    assert layout.parse_block_path(path) is not None
    assert callable(change)
    assert change(path) != path
    assert layout.parse_block_path(change(path)) is None


@pytest.mark.parametrize("size", [0, 4, 11, 69, 100])
def test_a_key_without_a_sane_hash_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="8 to 64"):
        layout.block_path("/c", bytes(size))


@pytest.mark.parametrize(
    "digest", ["", "abc", "0123456789AB", "0123456789ab/..", "g" * 12, "0" * 65, "0123456789ab\n"]
)
def test_a_digest_that_is_not_plain_hex_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="hex"):
        layout.namespace_name("m", digest)


@pytest.mark.parametrize("namespace", ["..", "a/../b_0123456789ab", "m", "m_0123456789ab_r0", ""])
def test_a_namespace_that_was_not_made_here_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        layout.part_dir("/c", namespace, 0)
    with pytest.raises(ValueError, match="namespace"):
        layout.config_path("/c", namespace)


@pytest.mark.parametrize("token", ["", "a/b", "a.b", "x" * 33, "\n"])
def test_a_token_that_would_not_parse_back_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="temporary"):
        layout.temp_path(layout.block_path("/c", KEY), hostname="h", pid=1, token=token)


def test_a_hundred_thousand_keys_never_crowd_one_folder() -> None:
    import random

    rng = random.Random(1)
    per_folder: dict[str, int] = {}
    per_top: dict[str, set[str]] = {}
    for _ in range(100_000):
        leaf = os.path.dirname(layout.block_path("/c", rng.randbytes(32) + bytes(4)))
        per_folder[leaf] = per_folder.get(leaf, 0) + 1
        per_top.setdefault(os.path.dirname(leaf), set()).add(leaf)
    assert max(per_folder.values()) < 10
    assert len(per_top) <= 4096
    assert max(map(len, per_top.values())) <= 256


def test_config_is_readable_sorted_and_the_first_writer_wins(tmp_path: Path) -> None:
    root = str(tmp_path)
    first = layout.write_config(root, NAMESPACE, {"z": 1, "model": "a/b"})
    second = layout.write_config(root, NAMESPACE, {"model": "other"})
    assert first == second == layout.read_config(root, NAMESPACE)
    text = (tmp_path / NAMESPACE / "config.json").read_text()
    assert list(json.loads(text)) == ["layout", "model", "z"]
    assert text.count("\n") == 5
    assert os.listdir(tmp_path / NAMESPACE) == ["config.json"]


def test_a_writer_that_lost_the_race_returns_the_winners_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def race(src: str, dst: str) -> None:
        Path(dst).write_text('{"model": "winner"}')
        link(src, dst)

    monkeypatch.setattr(os, "link", race)
    assert layout.write_config(str(tmp_path), NAMESPACE, {"model": "loser"}) == {"model": "winner"}
    assert os.listdir(tmp_path / NAMESPACE) == ["config.json"]


def test_config_is_written_where_links_are_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(src: str, dst: str) -> None:
        raise PermissionError(1, "no links")

    monkeypatch.setattr(os, "link", refuse)
    assert layout.write_config(str(tmp_path), NAMESPACE, {"a": 1})["a"] == 1
    assert os.listdir(tmp_path / NAMESPACE) == ["config.json"]


def test_config_and_its_folder_can_be_written_by_the_group_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        layout.write_config(str(tmp_path), NAMESPACE, {})
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / NAMESPACE).st_mode) == 0o2775
    assert stat.S_IMODE(os.stat(tmp_path / NAMESPACE / "config.json").st_mode) == 0o664


@pytest.mark.parametrize("content", ["[]", "{", "", "x" * (layout.MAX_CONFIG_BYTES + 1)])
def test_a_config_that_is_no_object_is_an_error_and_not_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / NAMESPACE).mkdir()
    (tmp_path / NAMESPACE / "config.json").write_text(content)
    with pytest.raises(ValueError):
        layout.read_config(str(tmp_path), NAMESPACE)


def test_a_fifo_or_link_in_place_of_the_config_neither_hangs_nor_leads_away(tmp_path: Path) -> None:
    path = tmp_path / NAMESPACE / "config.json"
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="regular"):
        layout.read_config(str(tmp_path), NAMESPACE)
    path.unlink()
    (tmp_path / "secret").write_text("{}")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        layout.read_config(str(tmp_path), NAMESPACE)


@given(HASHES, st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_a_path_of_ours_tells_its_block_as_any_path_does(hash_: bytes, group: int, part: int) -> None:
    key = hash_ + group.to_bytes(4, "big")
    path = layout.block_path(layout.part_dir("/root/of_r3/us", "a_r1_0123456789ab", part), key)
    parsed = layout.parse_block_path(path)
    assert parsed is not None and layout.block_id_of(path) == (parsed.namespace, parsed.key)
