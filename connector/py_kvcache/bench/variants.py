"""Systems as the user names them, and whose turn it is in which round.

A variant is a system with options: ``py-kvcache:checksum=off+io_depth=32``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from py_kvcache.bench.systems import SYSTEMS, System
from py_kvcache.errors import ConfigError

_WORDS = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True)
class Variant:
    """A system as the user named it."""

    label: str
    system: System
    options: Mapping[str, Any]


def parse_systems(text: str, common: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Variant, ...]:
    """Variants from ``a,b:option=value+option=value``; ``common`` holds further options by system's name.

    Raises:
        ConfigError: a name, or an option's form, that is not known; the same twice; files of nobody.
    """
    known = f"known systems: {', '.join(SYSTEMS)}"
    for name in common or {}:
        if name not in SYSTEMS:
            raise ConfigError(f"options are given for {name!r}, which is no system; {known}")
    variants = []
    for label in [part.strip() for part in text.split(",")]:
        name, _, words = label.partition(":")
        if name not in SYSTEMS:
            raise ConfigError(f"{name!r} is no system; {known}")
        options = {**(common or {}).get(name, {}), **_options(label, words)}
        taken = SYSTEMS[name].options
        wrong = [] if taken is None else [option for option in options if option not in taken]
        if wrong:
            raise ConfigError(f"{name} takes no option {wrong[0]!r}")
        variants.append(Variant(label, SYSTEMS[name], options))
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError("the same system is named twice; give variants options that tell them apart")
    names = {variant.system.name for variant in variants}
    for variant in variants:
        owner = variant.system.files_of
        if owner and owner not in names:
            raise ConfigError(f"{variant.system.name} reads the files of {owner}; name that too")
    return tuple(variants)


def _options(label: str, words: str) -> dict[str, Any]:
    options = {}
    for word in words.split("+") if words else ():
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ConfigError(f"{label!r}: write options as name=value, joined by +")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def in_turn(variants: tuple[Variant, ...], number: int) -> list[Variant]:
    """Order of round ``number`` (from 0): each round begins one later.

    What reads another's files comes right after the first of that name, whatever the round.
    """
    owners = [variant for variant in variants if not variant.system.files_of]
    start = number % len(owners) if owners else 0
    order: list[Variant] = []
    for variant in owners[start:] + owners[:start]:
        order.append(variant)
        if variant is next(other for other in variants if other.system is variant.system):
            order += [other for other in variants if other.system.files_of == variant.system.name]
    return order
