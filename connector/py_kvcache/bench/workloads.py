"""What systems are asked to do: named sequences of prompts, the same for every system and every round.

A workload is one entry of WORKLOADS. Prompts are token ids made from a seed, so that no tokenizer is needed
and every process makes the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Ids below are special tokens in most vocabularies.
_FIRST_TOKEN = 100
_ALONE = 3
_TURNS, _GROWTH, _RUNNING = ("turn1", "turn2", "turn3"), 256, 4
_MIXED_RUNNING = 8


@dataclass(frozen=True)
class Shape:
    """How large a workload is.

    Args:
        tokens: lengths of documents, one after the other in the same engine.
        documents: measured ones of each length.
        prewarm: further ones of each length that nobody measures.
        vocabulary: token ids are below it.
    """

    tokens: tuple[int, ...]
    documents: int
    prewarm: int
    vocabulary: int
    seed: int = 0


@dataclass(frozen=True)
class Document:
    """A prompt before it is made: others of the same length differ from the first token on."""

    role: str
    number: int
    tokens: int
    grown: int = 0  # further tokens behind those

    def token_ids(self, shape: Shape) -> list[int]:
        """The prompt, the same in every process; one that has grown begins with what it was."""
        ids = range(min(_FIRST_TOKEN, shape.vocabulary // 2), shape.vocabulary)
        source = random.Random(f"{shape.seed}/{self.role}/{self.tokens}/{self.number}")
        prompt = source.choices(ids, k=self.tokens + self.grown)
        # Else two of many short prompts could share their first block by chance.
        prompt[0] = ids[self.number % len(ids)]
        return prompt


@dataclass(frozen=True)
class Step:
    """Documents in the order of their submission; ``phase`` names it in the report.

    ``running``: so many are unanswered at most; 0 submits all at once.
    """

    tokens: int
    phase: str
    documents: tuple[Document, ...]
    running: int = 0

    @property
    def text(self) -> str:
        """For the progress."""
        return f"{self.tokens} tokens, {self.phase}"


@dataclass(frozen=True)
class Workload:
    """``phases`` are those that count, in the order of the report; ``first`` is the one without any hit.

    ``growth``: tokens by which its longest prompt exceeds the documents' length.
    """

    name: str
    about: str
    phases: tuple[str, ...]
    first: str
    steps: Callable[[Shape], Iterator[Step]]
    growth: int = 0


def _documents(role: str, count: int, tokens: int) -> tuple[Document, ...]:
    return tuple(Document(role, number, tokens) for number in range(count))


def _long_doc(shape: Shape) -> Iterator[Step]:
    for tokens in shape.tokens:
        yield from _prewarm(shape, tokens)
        documents = _documents("document", shape.documents, tokens)
        yield Step(tokens, "cold", documents)
        yield Step(tokens, "warm", documents)
        yield Step(tokens, "warm2", documents)
        yield Step(tokens, "alone", documents[:_ALONE], running=1)


def _round_robin(shape: Shape) -> Iterator[Step]:
    for tokens in shape.tokens:
        yield from _prewarm(shape, tokens)
        for turn, phase in enumerate(_TURNS):
            grown = tuple(
                Document("document", number, tokens, turn * _GROWTH) for number in range(shape.documents)
            )
            yield Step(tokens, phase, grown, running=_RUNNING)


def _mixed(shape: Shape) -> Iterator[Step]:
    for tokens in shape.tokens:
        yield from _prewarm(shape, tokens)
        known = _documents("document", shape.documents, tokens)
        yield Step(tokens, "store", known, running=_MIXED_RUNNING)
        count = shape.documents
        for turn, phase in enumerate(("mixed", "mixed2"), 1):
            # One that is known, one that is not.
            both = tuple(
                document
                for number in range(count)
                for document in (known[number], Document("document", turn * count + number, tokens))
            )
            yield Step(tokens, phase, both, running=_MIXED_RUNNING)


def _prewarm(shape: Shape, tokens: int) -> Iterator[Step]:
    early = _documents("prewarm", shape.prewarm, tokens)
    if early:
        # Computed, then loaded: each has first-time costs of its own.
        yield Step(tokens, "prewarm", early)
        yield Step(tokens, "prewarm", early)


_ENTRIES = (
    Workload(
        "long-doc",
        "documents submitted at once: unknown (cold), twice again (warm, warm2), then single ones (alone)",
        ("cold", "warm", "warm2", "alone"),
        "cold",
        _long_doc,
    ),
    Workload(
        "round-robin",
        "contexts in turns, each 256 tokens longer than in the turn before, four running at once",
        _TURNS,
        "turn1",
        _round_robin,
        growth=(len(_TURNS) - 1) * _GROWTH,
    ),
    Workload(
        "mixed",
        "documents (store), then these and as many new ones in turn (mixed, mixed2), eight running at once",
        ("store", "mixed", "mixed2"),
        "store",
        _mixed,
    ),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
