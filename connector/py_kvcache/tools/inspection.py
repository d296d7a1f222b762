"""`py-kvcache inspect ROOT`: what lies under a root, by namespace, from names and inode data alone.

Memory is bounded by the number of namespaces and parts, not of files.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from py_kvcache import layout
from py_kvcache.tools.scan import (
    Clock,
    Entry,
    Kind,
    file_system_clock,
    opened_root,
    scan,
    want_namespaces,
    wrong_root,
)
from py_kvcache.tools.show import printable
from py_kvcache.tools.volume import volume_space

SCHEMA = "py-kvcache/inspect/1"
AGES = (
    ("10 min", 600.0), ("1 h", 3_600.0), ("6 h", 21_600.0), ("1 d", 86_400.0),
    ("7 d", 604_800.0), ("30 d", 2_592_000.0), ("older", float("inf")),
)  # fmt: skip
MAX_SIZES = 16  # distinct block sizes kept per part; one or two are normal
MAX_EXAMPLES = 20
PROGRESS_EVERY = 2_000


class ConfigState:
    """What a namespace's config.json says, or why it says nothing."""

    def __init__(self, root: str, namespace: str) -> None:
        self.fields: dict[str, Any] = {}
        self.state, self.detail = "good", ""
        try:
            self.fields = layout.read_config(root, namespace)
        except FileNotFoundError:
            self.state = "missing"
        except OSError as error:
            # the namespace or its file is a link, or may not be read
            self.state, self.detail = "unreadable", errno.errorcode.get(error.errno or 0, str(error.errno))
        except (ValueError, RecursionError) as error:
            self.state, self.detail = "damaged", printable(str(error))
        else:
            self.state = "good" if self.fields.get("layout") == layout.LAYOUT_NAME else "other"

    @property
    def is_ours(self) -> bool:
        """True if a py-kvcache wrote it: then what lies under block names here ought to be ours."""
        return self.state == "good"


@dataclass
class Tally:
    """Blocks of one part."""

    blocks: int = 0
    bytes: int = 0
    allocated: int = 0
    groups: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    folders: int = 0
    empty_folders: int = 0

    def add(self, entry: Entry) -> None:
        self.blocks += 1
        self.bytes += entry.size
        self.allocated += entry.allocated
        if entry.block is not None:
            self.groups[entry.block.group] += 1
        # beyond MAX_SIZES the others are summed under -1
        self.sizes[entry.size if len(self.sizes) < MAX_SIZES or entry.size in self.sizes else -1] += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "bytes": self.bytes,
            "allocated_bytes": self.allocated,
            "groups": {str(g): n for g, n in sorted(self.groups.items())},
            "sizes": {("other" if s < 0 else str(s)): n for s, n in self.sizes.most_common()},
            "folders": self.folders,
            "empty_folders": self.empty_folders,
        }


@dataclass
class NamespaceReport:
    """One namespace: all parts of one model in one configuration."""

    name: str
    model: str
    digest: str
    config: ConfigState
    parts: dict[int, Tally] = field(default_factory=dict)
    ages: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in AGES])  # [files, bytes]
    ahead: int = 0  # files whose time is more than a second ahead of the clock
    oldest: float | None = None
    newest: float | None = None
    temporaries: int = 0
    temporary_bytes: int = 0
    dead_temporaries: int = 0
    unknown: int = 0
    in_the_way: int = 0

    @property
    def blocks(self) -> int:
        return sum(t.blocks for t in self.parts.values())

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.parts.values())

    @property
    def odd_sizes(self) -> int:
        """Files of a size that no block has: not a multiple of 4,096, or without room for a footer."""
        return sum(
            n
            for t in self.parts.values()
            for size, n in t.sizes.items()
            if size >= 0 and (size % layout.ALIGN or size < layout.FOOTER_BYTES)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "namespace": self.name,
            "model": self.config.fields.get("model", self.model),
            "digest": self.digest,
            "config": {
                "state": self.config.state, "detail": self.config.detail, "fields": self.config.fields,
            },
            "blocks": self.blocks,
            "bytes": self.bytes,
            "parts": [{"part": p, **t.to_json()} for p, t in sorted(self.parts.items())],
            "ages": [
                {"up_to_s": None if limit == float("inf") else limit, "files": n, "bytes": size}
                for (_, limit), (n, size) in zip(AGES, self.ages, strict=True)
            ],
            "ahead_of_clock": self.ahead,
            "oldest_age_s": self.oldest,
            "newest_age_s": self.newest,
            "odd_sizes": self.odd_sizes,
            "temporaries": {
                "files": self.temporaries, "bytes": self.temporary_bytes, "dead": self.dead_temporaries,
            },
            "unknown": self.unknown,
            "in_the_way": self.in_the_way,
        }  # fmt: skip


@dataclass
class InspectReport:
    """All of a root."""

    root: str
    clock: Clock
    namespaces: dict[str, NamespaceReport] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)  # by what they are, in all of the root
    examples: list[dict[str, Any]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    volume: dict[str, int] = field(default_factory=dict)
    wrong_root: str = ""  # the sentence of scan.wrong_root()

    @property
    def problems(self) -> list[str]:
        """One sentence each; empty means exit code 0."""
        found = [self.wrong_root] if self.wrong_root else []
        for name, n in sorted(self.errors.items()):
            found.append(f"{n} entries could not be read: {name}")
        for space in self.namespaces.values():
            if space.odd_sizes:
                found.append(
                    f"{space.name}: {space.odd_sizes} files have a size that no block has: run verify"
                )
            if space.in_the_way:
                found.append(f"{space.name}: {space.in_the_way} blocks' names are taken by something else")
            if space.config.state in ("unreadable", "damaged"):
                found.append(f"{space.name}: config.json is {space.config.state}: {space.config.detail}")
        return found

    def to_json(self) -> dict[str, Any]:
        spaces = [n.to_json() for n in self.namespaces.values()]
        return {
            "schema": SCHEMA,
            "root": self.root,
            "good": not self.problems,
            "clock": {"now": self.clock.now, "source": self.clock.source},
            "total": {
                "namespaces": len(spaces),
                "blocks": sum(s["blocks"] for s in spaces),
                "bytes": sum(s["bytes"] for s in spaces),
                "temporaries": sum(s["temporaries"]["files"] for s in spaces),
                "unknown": sum(self.unknown.values()),
            },
            "volume": self.volume,
            "namespaces": spaces,
            "unknown": {"by_kind": dict(self.unknown), "examples": self.examples},
            "errors": dict(self.errors),
            "problems": self.problems,
        }


def inspect_root(
    root: str, *, namespace: str = "", on_progress: Callable[[int, int], None] | None = None
) -> InspectReport:
    """Walk the root once. Raises RootError, or ConfigError when no namespace matches."""
    with opened_root(root) as root_fd:
        strange = wrong_root(root_fd, root)
        want = want_namespaces(root_fd, namespace)
        report = InspectReport(root, file_system_clock(root_fd), volume=_volume(root_fd), wrong_root=strange)
        seen = 0
        for seen, entry in enumerate(scan(root_fd, want), 1):
            _take(report, entry)
            if on_progress is not None and seen % PROGRESS_EVERY == 0:
                on_progress(seen, sum(n.bytes for n in report.namespaces.values()))
    return report


def _volume(root_fd: int) -> dict[str, int]:
    space = volume_space(os.fstatvfs(root_fd))
    return {
        "usable_bytes": space.usable_bytes,
        "used_bytes": space.used_bytes,
        "inodes": space.usable_files,
        "used_inodes": space.used_files,
    }


def _take(report: InspectReport, entry: Entry) -> None:
    space = _space(report, entry.namespace) if entry.namespace is not None else None
    if entry.kind is Kind.ERROR:
        report.errors[errno.errorcode.get(entry.code, str(entry.code))] += 1
        _example(report, entry)
    elif space is None or entry.kind is Kind.UNKNOWN:
        report.unknown[entry.what] += 1
        _example(report, entry)
        if space is not None:
            space.unknown += 1
            space.in_the_way += entry.block is not None
    elif entry.kind is Kind.TEMPORARY:
        space.temporaries += 1
        space.temporary_bytes += entry.size
        space.dead_temporaries += report.clock.now - entry.mtime >= layout.TEMP_DEAD_AFTER_S
    elif entry.namespace is not None and entry.namespace.part is not None:
        tally = space.parts.setdefault(entry.namespace.part, Tally())
        if entry.kind is Kind.BLOCK:
            tally.add(entry)
            _take_age(space, report.clock.now - entry.mtime, entry.size)
        elif entry.kind is Kind.FOLDER:
            tally.folders += 1
            tally.empty_folders += entry.size == 0


def _space(report: InspectReport, found: layout.NamespaceDir) -> NamespaceReport:
    space = report.namespaces.get(found.namespace)
    if space is None:
        config = ConfigState(report.root, found.namespace)
        space = NamespaceReport(found.namespace, found.model, found.digest, config)
        report.namespaces[found.namespace] = space
    return space


def _take_age(space: NamespaceReport, age: float, size: int) -> None:
    space.ahead += age < -1
    space.oldest = age if space.oldest is None else max(age, space.oldest)
    space.newest = age if space.newest is None else min(age, space.newest)
    for bucket, (_, limit) in zip(space.ages, AGES, strict=True):
        if age < limit:
            bucket[0] += 1
            bucket[1] += size
            return


def _example(report: InspectReport, entry: Entry) -> None:
    if len(report.examples) < MAX_EXAMPLES:
        code = errno.errorcode.get(entry.code, "") if entry.code else ""
        report.examples.append({
            "path": printable(entry.path), "what": entry.what or "folder", "errno": code,
            "in_the_way": entry.block is not None,
        })  # fmt: skip


def as_json(report: InspectReport) -> str:
    """One object, for scripts."""
    return json.dumps(report.to_json(), indent=2)
