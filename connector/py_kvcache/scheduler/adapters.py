"""Which weights a request's LoRA adapter has, put together from what all workers have in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py_kvcache.identity import digest
from py_kvcache.plan import Adapter, Held

logger = logging.getLogger("vllm.py_kvcache.adapters")

_MOST_NUMBERS = 65_536
_MOST_BANNED = 65_536


def combined(identities: Sequence[str]) -> str:
    """One identity for the parts of all ranks, in order.

    Ranks differ where each loads its own experts, and where a file changed between two of them. Either way
    the mix has a namespace of its own, in which nothing is found that was computed with another mix.
    """
    if len(set(identities)) == 1:
        return identities[0]
    return digest({"ranks": list(identities)})


@dataclass(slots=True)
class AdapterQuestion:
    """What one request's adapter is; the workers' next report tells if they have it.

    Args:
        number, name: as vLLM has them.
        step: the first step whose report comes after the question.
        readable: whether the workers keep what they have read; in place they read it again in each step.
        note: the answer.
    """

    number: int
    name: str
    step: int
    readable: bool = True
    note: Adapter | None = None


class Adapters:
    """What the ranks said. A step's worth of dictionary look-ups; no file is read here."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._steps: dict[int, int] = {}  # rank -> the step it spoke of last
        self._held: dict[int, dict[int, tuple[str, str]]] = {}  # rank -> number -> name and identity
        # vLLM's prefix cache knows names only. A number with two names means that requests of one were
        # computed with the other's weights, which no worker sees.
        self._numbers: dict[int, str] = {}
        self._banned: set[str] = set()
        self._is_full = False

    def ask(self, lora: Any, step: int) -> AdapterQuestion:
        """For a new request's LoRARequest, before the step ``step`` is put together."""
        number, name = int(lora.lora_int_id), str(lora.lora_name)
        self._pair(number, name)
        in_place = bool(getattr(lora, "load_inplace", False))
        elsewhere = bool(getattr(lora, "tensorizer_config_dict", None))
        return AdapterQuestion(number, name, step, readable=not in_place and not elsewhere)

    def heard(self, said: Mapping[int, Held]) -> None:
        """Reports of some ranks, of one step."""
        for rank, held in said.items():
            self._steps[rank] = held.step
            if held.known is None or held.known == self._held.get(rank):
                continue
            self._held[rank] = held.known
            for number, (name, identity) in held.known.items():
                self._pair(number, name)
                if not identity:
                    self._ban(name)

    def trusts(self, question: AdapterQuestion | None) -> bool:
        """Whether the adapter's requests may be cached. True while nothing is known against it."""
        if question is None:
            return True
        return question.readable and not self._is_full and question.name not in self._banned

    def identify(self, question: AdapterQuestion) -> str | None:
        """The identity, None while the workers do not have the adapter in memory."""
        if question.note is None:
            found = [self._held.get(rank, {}).get(question.number) for rank in range(self._ranks)]
            identities = tuple(one[1] for one in found if one is not None and one[0] == question.name)
            if len(identities) < self._ranks or "" in identities:
                return None
            question.note = Adapter(question.number, question.name, identities)
        return combined(question.note.identities)

    def may_load(self, question: AdapterQuestion | None) -> bool:
        """trusts(), and no rank has evicted what is known of it: that rank would refuse the load."""
        if question is None or question.note is None or not self.trusts(question):
            return self.trusts(question)
        note = question.note
        return all(
            self._held.get(rank, {}).get(note.number) == (note.name, identity)
            for rank, identity in enumerate(note.identities)
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank only."""
        return self._ranks == 1

    def have_spoken(self, step: int) -> bool:
        """Whether all ranks have said what they had in memory after this step, or a later one."""
        return all(self._steps.get(rank, 0) >= step for rank in range(self._ranks))

    def is_in_vain(self, question: AdapterQuestion) -> bool:
        """Whether all ranks have spoken since the question: what they do not have they will read first."""
        return self.have_spoken(question.step)

    def _pair(self, number: int, name: str) -> None:
        known = self._numbers.get(number)
        if known is None and len(self._numbers) < _MOST_NUMBERS:
            self._numbers[number] = name
        elif known != name:
            for one in (name, known or name):
                if self._ban(one):
                    text = "py-kvcache: LoRA adapter %s: number %d has other names too; not cached any more"
                    logger.warning(text, one, number)

    def _ban(self, name: str) -> bool:
        """Returns whether that is new. Of weights that changed the worker has said so in the log."""
        if name in self._banned or self._is_full:
            return False
        if len(self._banned) >= _MOST_BANNED:
            self._is_full = True
            logger.warning("py-kvcache: too many LoRA adapters had changed weights; none is cached any more")
            return False
        self._banned.add(name)
        return True
