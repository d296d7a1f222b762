"""One finding of the doctor."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# A trial that ends with these says nothing about the file system's abilities.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Status(Enum):
    """How much a finding matters; only PROBLEM makes the exit code 1."""

    OK = "ok"
    NOTE = "note"  # good to know
    SLOW = "slow"  # works, in a slower way
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """A sentence, what to do about it, and the figures behind it."""

    name: str
    status: Status
    text: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "status": self.status.value, "text": self.text,
            "remedy": self.remedy, "data": self.data,
        }  # fmt: skip
