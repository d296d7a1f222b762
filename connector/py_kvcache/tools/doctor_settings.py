"""The settings by which the doctor judges, checked as vLLM's start would check them."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from py_kvcache import layout
from py_kvcache.errors import ConfigError, KvCacheError
from py_kvcache.tools.checks import Check, Status
from py_kvcache.tools.show import human_bytes

_EXTRA = "kv_connector_extra_config"
# What stands around it in --kv-transfer-config.
_AROUND = {
    "kv_connector": "PyKvCacheConnector",
    "kv_connector_module_path": "py_kvcache.connector",
    "kv_role": "kv_both",
    _EXTRA: "",
}


class Settings(NamedTuple):
    """The connector's settings that decide what is used; from --config, the environment, else defaults."""

    ring: str = "auto"
    direct_io: str = "auto"
    dir_mode: int = layout.DIR_MODE
    store_stop_at: float = 0.90


class Given(NamedTuple):
    """The value of --config: the extra config, and what is wrong around it, with the remedy."""

    extra: dict[str, Any]
    wrong: tuple[str, str] | None = None


def parse_option(text: str) -> Given:
    """An extra config, or the --kv-transfer-config around it. Raises ConfigError for what is neither."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if os.path.exists(text):
            raise ConfigError(
                f'--config takes the JSON itself, not a file: --config "$(cat {text})"'
            ) from None
        raise ConfigError(
            f'--config is no JSON: {error}; quote it: --config \'{{"root": "/cache"}}\''
        ) from None
    if isinstance(value, dict) and value.keys() & _AROUND.keys():
        return _unwrap(value)
    if not isinstance(value, dict):
        raise ConfigError(f"--config is no JSON object; give the value of {_EXTRA}")
    return Given(value)


def _unwrap(value: Mapping[str, Any]) -> Given:
    """The extra config of ours within a whole --kv-transfer-config, also of a MultiConnector's."""
    extra = value.get(_EXTRA) or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"{_EXTRA} is no JSON object")
    connectors = extra.get("connectors")
    if value.get("kv_connector") == "MultiConnector" and isinstance(connectors, list):
        for one in connectors:
            if isinstance(one, dict) and one.get("kv_connector") == _AROUND["kv_connector"]:
                return _unwrap(one)
        return Given({}, ("none of the MultiConnector's connectors is PyKvCacheConnector", "add one"))
    if value.keys() == {_EXTRA}:
        return Given(extra)
    for key, wanted in _AROUND.items():
        if key != _EXTRA and value.get(key) != wanted:
            found = f"{key} is {value[key]!r}" if key in value else f"{key} is missing"
            return Given(extra, (found, f'"{key}": "{wanted}"'))
    for key in value:
        close = difflib.get_close_matches(str(key), [_EXTRA], n=1)
        if key not in _AROUND and close:
            return Given(extra, (f"unknown key {key!r}", f"did you mean {_EXTRA!r}?"))
    return Given(extra)


def root_of(config: Mapping[str, Any]) -> str:
    """Root of an extra config or of the environment. Raises KvCacheError where neither gives one."""
    root = config.get("root", os.environ.get("PY_KVCACHE_ROOT", ""))
    if isinstance(root, str) and root:
        return root
    _, problem = _parse(config)
    raise KvCacheError(problem or "the cache root is missing: give ROOT")


def read(root: str, config: Mapping[str, Any] | None) -> tuple[Settings, list[Check]]:
    """Settings from an extra config and this process's environment: a vLLM pod's is the connector's."""
    if config is None:
        found, problem = _parse({"root": root})
        # outside a vLLM environment pydantic may be missing; the defaults hold then
        checks = []
    else:
        found, problem = _parse(config if "root" in config else {**config, "root": root})
        checks = [_verdict(config, root, found is None and not problem)]
        checks += _pinned(found)
        checks += [Check("settings", Status.NOTE, text, "") for text in without_effect(found, config)]
    if problem:
        remedy = "correct the setting (the checks below use the defaults)"
        checks = [Check("settings", Status.PROBLEM, problem, remedy)]
    if found is None:
        return Settings(), checks
    return Settings(found.ring, found.direct_io, found.dir_mode, found.store_stop_at), checks


def _pinned(found: Any) -> Iterator[Check]:
    """What each worker pins, as far as the settings tell: a block's bytes are the model's."""
    if found is None:
        return
    slots = found.io_depth + found.copy_headroom
    tier = found.memory_bytes if found.memory_tier != "none" else 0
    staging = (
        f"{slots} blocks of staging" if found.staging_bytes is None else human_bytes(found.staging_bytes)
    )
    text = f"each worker pins {staging}" + (f" and {human_bytes(tier)} of memory tier" if tier else "")
    data = {"staging_blocks": slots, "staging_bytes": found.staging_bytes, "memory_bytes": tier}
    yield Check("pinned memory", Status.OK, text, data=data)


def _parse(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The parsed settings, or None and what is wrong with them; None and "" where pydantic is missing."""
    try:
        from py_kvcache.config import parse_config
    except ImportError:
        return None, ""
    try:
        return parse_config(config), ""
    except ConfigError as error:
        return None, str(error)


def without_effect(found: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are valid and do not do what they seem to; ``found`` are those of ``config``, parsed."""
    if found is None:
        return
    if found.memory_bytes and found.memory_tier == "none":
        yield "memory_bytes does nothing: memory_tier is none"
    if found.memory_bytes and (total := _memory_bytes()) and found.memory_bytes > total:
        yield (
            f"memory_bytes is more than this machine's memory ({total / 1e9:.0f} GB): vLLM would not "
            "start here; lower it, unless vLLM runs elsewhere"
        )
    if found.memory_bytes and (found.preload_bytes or 0) > found.memory_bytes:
        yield "preload_bytes is more than memory_bytes: preloads may take all of it"
    named = [name for name in ("preload", "preload_bytes", "memory_tier") if name in config]
    if named and not found.memory_bytes and found.preload != "off" and found.memory_tier != "none":
        yield f"{' and '.join(named)} {'do' if named[1:] else 'does'} nothing: memory_bytes is 0"
    if found.gate == "static" and not found.thresholds:
        yield "gate=static loads every hit: thresholds is not set"
    if found.gate != "off" and found.thresholds:
        yield from _about_thresholds(found.thresholds)
    if found.gate == "off" and found.store_policy == "break_even":
        yield "store_policy=break_even stores everything: with gate=off every hit is loaded"
    if found.io_workers > found.io_depth:
        yield f"of io_workers ({found.io_workers}) only io_depth ({found.io_depth}) ever have something to do"


def _about_thresholds(path: str) -> Iterator[str]:
    from py_kvcache.models import read_thresholds, thresholds_path

    try:
        read_thresholds(thresholds_path(path))
    except (ConfigError, OSError) as error:
        yield f"thresholds are of no use: {error}"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _verdict(config: Mapping[str, Any], root: str, unread: bool) -> Check:
    if unread:
        text = "--config could not be checked: pydantic is missing here"
        return Check(
            "settings", Status.PROBLEM, text, "run this in vLLM's environment, or install the extra cli"
        )
    own = config.get("root", root)
    if os.path.abspath(own) != root:
        text = f"valid, but vLLM would use root {own}, not the ROOT given here"
        return Check("settings", Status.NOTE, text, "leave ROOT out to examine that one")
    return Check(
        "settings", Status.OK,
        "valid (block_tokens and staging_bytes depend on the model, too: vLLM's start checks those)",
    )  # fmt: skip
