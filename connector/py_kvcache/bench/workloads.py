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

    def token_ids(self, shape: Shape) -> list[int]:
        """The prompt, the same in every process."""
        ids = range(min(_FIRST_TOKEN, shape.vocabulary // 2), shape.vocabulary)
        source = random.Random(f"{shape.seed}/{self.role}/{self.tokens}/{self.number}")
        prompt = source.choices(ids, k=self.tokens)
        # Else two of many short prompts could share their first block by chance.
        prompt[0] = ids[self.number % len(ids)]
        return prompt


@dataclass(frozen=True)
class Step:
    """Documents to submit at once, or one after the other; ``phase`` names it in the report."""

    tokens: int
    phase: str
    documents: tuple[Document, ...]
    together: bool = True

    @property
    def text(self) -> str:
        """For the progress."""
        return f"{self.tokens} tokens, {self.phase}"


@dataclass(frozen=True)
class Workload:
    """``phases`` are those that count, in the order of the report; ``first`` is the one without any hit."""

    name: str
    about: str
    phases: tuple[str, ...]
    first: str
    steps: Callable[[Shape], Iterator[Step]]


def _documents(role: str, count: int, tokens: int) -> tuple[Document, ...]:
    return tuple(Document(role, number, tokens) for number in range(count))


def _long_doc(shape: Shape) -> Iterator[Step]:
    for tokens in shape.tokens:
        early = _documents("prewarm", shape.prewarm, tokens)
        if early:
            # Computed, then loaded: each has first-time costs of its own.
            yield Step(tokens, "prewarm", early)
            yield Step(tokens, "prewarm", early)
        documents = _documents("document", shape.documents, tokens)
        yield Step(tokens, "cold", documents)
        yield Step(tokens, "warm", documents)
        yield Step(tokens, "warm2", documents)
        yield Step(tokens, "alone", documents[:_ALONE], together=False)


_ENTRIES = (
    Workload(
        "long-doc",
        "documents submitted at once: unknown (cold), twice again (warm, warm2), then single ones (alone)",
        ("cold", "warm", "warm2", "alone"),
        "cold",
        _long_doc,
    ),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
