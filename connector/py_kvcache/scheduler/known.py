"""What the parts of the scheduler side share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from py_kvcache.config import Config
    from py_kvcache.metrics import Metric
    from py_kvcache.scheduler.adapters import Adapters
    from py_kvcache.scheduler.lookup import Index
    from py_kvcache.scheduler.names import Names
    from py_kvcache.scheduler.postponed import Postponed


class Count(Protocol):
    """Increase a counter."""

    def __call__(self, metric: Metric, amount: float, *labels: str) -> None:
        """See metrics.Samples.add."""


@dataclass(frozen=True, slots=True)
class Known:
    """One per engine: settings, what blocks are called, what is known of them, and where to count."""

    config: Config
    names: Names
    adapters: Adapters
    index: Index
    postponed: Postponed
    count: Count
