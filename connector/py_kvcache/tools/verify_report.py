"""What `verify` found, and whom it tells while it looks."""

from __future__ import annotations

import errno
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from py_kvcache.tools.blockcheck import Verdict
from py_kvcache.tools.show import printable

SCHEMA = "py-kvcache/verify/1"
MAX_PROBLEMS = 1_000


class Progress:
    """What verify tells a progress bar; the base class tells nobody. Called from several threads."""

    def counted(self, files: int, size: int) -> None:
        """During the first walk."""

    def begin(self, files: int, size: int) -> None:
        """The first walk is over: this is to be read."""

    def advance(self, files: int, size: int, damaged: int) -> None:
        """Some of it was read."""


@dataclass
class VerifyReport:
    """Counts by verdict and fault, and the first MAX_PROBLEMS files that are not good."""

    root: str
    delete: bool
    limit: int
    verdicts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    in_the_way: int = 0  # not ours, but where a block of ours belongs: never served, never replaced
    temporaries: int = 0
    dead_temporaries: int = 0
    deleted: int = 0
    kept: int = 0  # damaged, but not deleted although asked to
    bytes_read: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    wrong_root: str = ""  # the sentence of scan.wrong_root()
    problems: list[dict[str, Any]] = field(default_factory=list)
    problem_count: int = 0

    @property
    def blocks(self) -> int:
        return sum(self.verdicts.values())

    @property
    def is_good(self) -> bool:
        """True for exit code 0."""
        bad = self.verdicts["damaged"] + self.verdicts["unreadable"] + sum(self.errors.values())
        return not (bad or self.in_the_way or self.interrupted or self.wrong_root)

    def problem(
        self, path: str, verdict: str, detail: str, fault: str = "", code: int = 0, deleted: bool = False
    ) -> None:
        """Note a file that is not good; from MAX_PROBLEMS on they are only counted."""
        self.problem_count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append({
                "path": printable(path), "verdict": verdict, "fault": fault, "detail": detail,
                "errno": errno.errorcode.get(code, str(code)) if code else "", "deleted": deleted,
            })  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "root": self.root,
            "good": self.is_good,
            "blocks": self.blocks,
            "verdicts": {v.value: self.verdicts[v.value] for v in Verdict},
            "damage": dict(self.faults),
            "deleted": self.deleted,
            "kept": self.kept,
            "delete": self.delete,
            "limit": self.limit,
            "in_the_way": self.in_the_way,
            "unknown": dict(self.unknown),
            "errors": dict(self.errors),
            "temporaries": {"files": self.temporaries, "dead": self.dead_temporaries},
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "wrong_root": self.wrong_root,
            "problems": self.problems,
            "problems_left_out": self.problem_count - len(self.problems),
        }


def as_json(report: VerifyReport) -> str:
    """One object, for scripts."""
    return json.dumps(report.to_json(), indent=2)
