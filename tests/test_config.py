"""Settings: every key has one name, one default and one meaning, and a typo never passes for a setting."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from py_kvcache.config import ENV_PREFIX, VLLM_KEYS, Config, parse_config
from py_kvcache.errors import ConfigError

DEFAULTS = {
    "block_tokens": 256,
    "io_depth": 32,
    "io_workers": 12,
    "open_lookahead": 32,
    "copy_headroom": 4,
    "staging_bytes": None,
    "memory_bytes": 0,
    "memory_tier": "lirs",
    "preload": "on",
    "preload_requests": 8,
    "preload_bytes": None,
    "store_policy": "all",
    "gate": "adaptive",
    "thresholds": "",
    "direct_io": "auto",
    "ring": "auto",
    "checksum": True,
    "checksum_threads": 4,
    "fsync": False,
    "read_bytes_per_s": 0,
    "store_bytes_per_s": 0,
    "store_bytes_per_day": 0,
    "store_stop_at": 0.90,
    "store_resume_at": 0.85,
    "on_unsupported": "fail",
    "file_mode": 0o664,
    "dir_mode": 0o2775,
    "load_deadline_s": 30.0,
    "store_deadline_s": 60.0,
    "lookup_deadline_s": 1.0,
    "max_queued_stores": 512,
    "load_failure_policy": "recompute",
}


def parse(extra: dict[str, Any] | None = None, **environ: str) -> Config:
    return parse_config({"root": "/cache", **(extra or {})}, environ)


def test_only_the_root_must_be_given_and_every_other_key_has_its_documented_default():
    values = parse().model_dump()
    assert values.pop("root") == "/cache"
    assert values == DEFAULTS


def test_every_key_says_what_it_means():
    assert all(field.description for field in Config.model_fields.values())


OTHER = {
    "root": ("/other", "/other"),
    "block_tokens": ("64", 64),
    "io_depth": ("3", 3),
    "io_workers": ("3", 3),
    "open_lookahead": ("3", 3),
    "copy_headroom": ("3", 3),
    "staging_bytes": ("1000000", 1_000_000),
    "memory_bytes": ("1000000", 1_000_000),
    "memory_tier": ("arc", "arc"),
    "preload": ("alone", "alone"),
    "preload_requests": ("3", 3),
    "preload_bytes": ("1000000", 1_000_000),
    "store_policy": ("second_touch", "second_touch"),
    "gate": ("static", "static"),
    "thresholds": ("/etc/thresholds", "/etc/thresholds"),
    "direct_io": ("off", "off"),
    "ring": ("threads", "threads"),
    "checksum": ("off", False),
    "checksum_threads": ("1", 1),
    "fsync": ("on", True),
    "read_bytes_per_s": ("5", 5),
    "store_bytes_per_s": ("5", 5),
    "store_bytes_per_day": ("5", 5),
    "store_stop_at": ("0.95", 0.95),
    "store_resume_at": ("0.5", 0.5),
    "on_unsupported": ("disable", "disable"),
    "file_mode": ("0600", 0o600),
    "dir_mode": ("0700", 0o700),
    "load_deadline_s": ("2.5", 2.5),
    "store_deadline_s": ("2.5", 2.5),
    "lookup_deadline_s": ("2.5", 2.5),
    "max_queued_stores": ("5", 5),
    "load_failure_policy": ("fail", "fail"),
}


@pytest.mark.parametrize("key", list(OTHER))
def test_a_key_can_be_set_by_its_environment_name_and_by_no_other_spelling(key: str):
    text, value = OTHER[key]
    name = ENV_PREFIX + key.upper()
    assert getattr(parse_config({}, {"PY_KVCACHE_ROOT": "/cache", name: text}), key) == value
    wrong = {name.lower(): text, name + "_": text, "VLLM_" + name: text, key.upper(): text, key: text}
    assert parse_config({"root": "/cache"}, wrong) == parse()


def test_the_list_above_has_every_key():
    assert set(OTHER) == set(Config.model_fields)


def test_unknown_environment_names_are_none_of_our_business():
    assert parse(PY_KVCACHE_TRACE="/tmp/t", PY_KVCACHE_IODEPTH="x", HOME="/root") == parse()


def test_an_empty_environment_value_counts_as_unset():
    assert parse(PY_KVCACHE_IO_DEPTH="").io_depth == 32


def test_the_extra_config_wins_over_the_environment():
    config = parse({"io_depth": 8}, PY_KVCACHE_IO_DEPTH="4", PY_KVCACHE_OPEN_LOOKAHEAD="5")
    assert (config.io_depth, config.open_lookahead) == (8, 5)
    assert parse_config({"root": "/a"}, {"PY_KVCACHE_ROOT": "/b"}).root == "/a"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PY_KVCACHE_MAX_QUEUED_STORES", "7")
    assert parse_config({"root": "/cache"}).max_queued_stores == 7


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("io_dept", "did you mean 'io_depth'?"),
        ("checksums", "did you mean 'checksum'?"),
        ("zzz", "known keys: "),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(key: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        parse({key: 1})
    assert repr(key) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("key", ["block_size", "blocks_per_chunk"])
def test_vllms_own_chunk_keys_are_refused_in_favour_of_block_tokens(key: str):
    with pytest.raises(ConfigError, match="use block_tokens"):
        parse({key: 256})


def test_vllms_other_keys_are_allowed_and_ignored():
    assert parse(dict.fromkeys(VLLM_KEYS, 0)) == parse()


def test_a_missing_root_is_named_with_both_ways_to_give_it():
    with pytest.raises(ConfigError, match="kv_connector_extra_config or PY_KVCACHE_ROOT"):
        parse_config({}, {})


@pytest.mark.parametrize("root", ["cache", "./cache", "~/cache", "", "/c\0d", "/caché"])
def test_a_root_that_is_relative_empty_or_no_ascii_is_refused(root: str):
    with pytest.raises(ConfigError, match="root"):
        parse_config({"root": root}, {})


@pytest.mark.parametrize(("given", "path"), [("/cache//", "/cache"), ("/", "/"), ("/a/b/", "/a/b")])
def test_trailing_slashes_of_the_root_do_not_reach_paths(given: str, path: str):
    assert parse_config({"root": given}, {}).root_path == path


@pytest.mark.parametrize(
    ("text", "mode"), [("0774", 0o774), ("774", 0o774), ("2775", 0o2775), ("0700", 0o700)]
)
def test_modes_are_octal_text(text: str, mode: int):
    assert parse({"file_mode": text, "dir_mode": text}).file_mode == mode
    assert parse(PY_KVCACHE_DIR_MODE=text).dir_mode == mode


@pytest.mark.parametrize("number", [664, 0o664, True])
def test_a_mode_that_is_a_number_is_refused_since_json_has_no_octal(number: int):
    with pytest.raises(ConfigError, match="file_mode"):
        parse({"file_mode": number})


@pytest.mark.parametrize(("key", "mode"), [("file_mode", "0064"), ("file_mode", "0"), ("dir_mode", "0644")])
def test_a_mode_that_locks_the_owner_out_is_refused(key: str, mode: str):
    with pytest.raises(ConfigError, match="the owner cannot use its cache"):
        parse({key: mode})


@pytest.mark.parametrize("key", ["io_depth", "block_tokens", "load_deadline_s", "ring"])
def test_true_is_no_number_and_no_word(key: str):
    with pytest.raises(ConfigError, match=f"{key} takes no true"):
        parse({key: True})


@pytest.mark.parametrize("text", ["0888", "rw-r--r--", "-1", "17777"])
def test_a_mode_that_is_no_octal_number_of_twelve_bits_is_refused(text: str):
    with pytest.raises(ConfigError, match="file_mode"):
        parse({"file_mode": text})


@pytest.mark.parametrize(("text", "value"), [("on", True), ("off", False), ("true", True), ("0", False)])
def test_switches_take_on_and_off(text: str, value: bool):
    assert parse({"checksum": text}).checksum is value
    assert parse(PY_KVCACHE_FSYNC=text).fsync is value


OUT_OF_BOUNDS = [
    ("block_tokens", 0),
    ("block_tokens", 65_537),
    ("io_depth", 0),
    ("io_depth", 1_025),
    ("io_workers", 0),
    ("io_workers", 1_025),
    ("open_lookahead", 0),
    ("open_lookahead", 4_097),
    ("copy_headroom", 0),
    ("copy_headroom", 1_025),
    ("staging_bytes", 0),
    ("memory_bytes", -1),
    ("memory_tier", "fifo"),
    ("preload", "yes"),
    ("preload_requests", 0),
    ("preload_bytes", -1),
    ("store_policy", "none"),
    ("gate", "on"),
    ("thresholds", "thresholds.json"),
    ("direct_io", "yes"),
    ("ring", "uring"),
    ("checksum", "maybe"),
    ("checksum_threads", 0),
    ("checksum_threads", 65),
    ("fsync", "always"),
    ("read_bytes_per_s", -1),
    ("store_bytes_per_s", -1),
    ("store_bytes_per_day", -1),
    ("store_stop_at", 0),
    ("store_stop_at", 1.01),
    ("store_stop_at", float("nan")),
    ("store_resume_at", 0),
    ("on_unsupported", "ignore"),
    ("file_mode", 0o10000),
    ("dir_mode", -1),
    ("load_deadline_s", 0),
    ("load_deadline_s", float("inf")),
    ("store_deadline_s", -1),
    ("lookup_deadline_s", 0),
    ("lookup_deadline_s", 86_401),
    ("max_queued_stores", 0),
    ("max_queued_stores", 1_000_001),
    ("load_failure_policy", "retry"),
]


@pytest.mark.parametrize(("key", "value"), OUT_OF_BOUNDS)
def test_a_value_out_of_bounds_is_refused_in_a_sentence_that_names_the_key(key: str, value: object):
    with pytest.raises(ConfigError, match=key):
        parse({key: value})


def test_every_key_has_a_value_that_is_refused():
    assert {key for key, _ in OUT_OF_BOUNDS} == set(DEFAULTS) - {"root"}


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ConfigError, match="(?s)io_depth.*ring"):
        parse({"io_depth": 0, "ring": "x"})


def test_stores_cannot_resume_above_the_mark_at_which_they_stop():
    with pytest.raises(ConfigError, match="must not be above store_stop_at"):
        parse({"store_stop_at": 0.5})
    assert parse({"store_stop_at": 0.5, "store_resume_at": 0.5}).store_resume_at == 0.5


@pytest.mark.parametrize("key", ["io_depth", "new_key"])
def test_settings_are_frozen(key: str):
    with pytest.raises((ValidationError, AttributeError, ValueError)):
        setattr(parse(), key, 3)


@given(st.text(max_size=30), st.one_of(st.integers(), st.text(max_size=10), st.none(), st.booleans()))
def test_whatever_is_given_ends_in_settings_or_a_config_error(key: str, value: object):
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_config({"root": "/cache", key: value}, {}), Config)
