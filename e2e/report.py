"""What the demo saw: the judgement, the JSON for scripts and the table for people."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server import Answer
from versions import versions

SCHEMA = "py-kvcache-demo/1"


@dataclass
class Asked:
    """One answer and where its prompt tokens came from, by the server's own metrics."""

    answer: Answer
    from_files: int
    from_engine: int
    bytes_loaded: int

    def __str__(self) -> str:
        return f"first token after {self.answer.ttft_s:.2f} s"


@dataclass
class Outcome:
    """What was seen; becomes the JSON and the table."""

    no_cache: Asked
    cold: Asked
    warm: Asked
    second: Asked
    files: int
    bytes_stored: int
    notes: list[str] = field(default_factory=list)

    @property
    def same_text(self) -> bool:
        return self.no_cache.answer.text == self.cold.answer.text == self.warm.answer.text

    def problem(self) -> str | None:
        """The reason to fail, or None."""
        if self.warm.from_files == 0:
            return "no hit: the restarted server loaded nothing for a document that its predecessor stored"
        if self.warm.bytes_loaded == 0:
            return "the restarted server reports a hit but no bytes loaded"
        if not self.same_text:
            return "the answer from files differs from the computed one"
        return None

    def as_json(self) -> dict[str, Any]:
        """The object for scripts."""
        return {
            "schema": SCHEMA,
            "ok": self.problem() is None,
            "problem": self.problem(),
            "ttft_no_cache_s": round(self.no_cache.answer.ttft_s, 4),
            "ttft_cold_s": round(self.cold.answer.ttft_s, 4),
            "ttft_warm_s": round(self.warm.answer.ttft_s, 4),
            "ttft_second_s": round(self.second.answer.ttft_s, 4),
            "prompt_tokens": self.warm.answer.prompt_tokens,
            "hit_tokens": self.warm.from_files,
            "bytes_loaded": self.warm.bytes_loaded,
            "bytes_stored": self.bytes_stored,
            "files": self.files,
            "same_text": self.same_text,
            "answers": {
                "no_cache": self.no_cache.answer.text,
                "cold": self.cold.answer.text,
                "warm": self.warm.answer.text,
                "second": self.second.answer.text,
            },
            "second_hit_tokens": self.second.from_files,
            "second_engine_tokens": self.second.from_engine,
            "notes": self.notes,
            "versions": versions(),
            "machine": machine(),
        }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_bytes": memory, "kernel": platform.release()}


def show(console: Console, outcome: Outcome, questions: tuple[str, str]) -> None:
    """The table and the answers."""
    base = outcome.no_cache.answer.ttft_s
    table = Table(
        title=f"A prompt of {outcome.warm.answer.prompt_tokens:,} tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "first\ntoken", "\nspeed", "tokens\nfrom files", "tokens\nfrom memory", "bytes\nloaded"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    rows = (
        ("without the cache", outcome.no_cache),
        ("cold (stores)", outcome.cold),
        ("warm, after restart", outcome.warm),
        ("second question", outcome.second),
    )
    for name, asked in rows:
        not_ours = asked.from_engine > asked.from_files
        table.add_row(
            f"{name}\n(vLLM's own memory)" if not_ours else name,
            f"{asked.answer.ttft_s:.2f} s",
            "-" if not_ours else f"{base / asked.answer.ttft_s:.1f}x",
            f"{asked.from_files:,}",
            f"{asked.from_engine:,}",
            f"{asked.bytes_loaded / (1 << 20):,.1f} MiB",
        )
    console.print()
    console.print(table)
    console.print(
        f"Stored: {outcome.files} files, {outcome.bytes_stored / (1 << 20):,.1f} MiB. Prompt tokens come "
        "from files, from vLLM's own prefix cache in memory (empty after the restart), or are computed.",
        highlight=False,
    )
    console.print(
        "Each row is one request. The first two compute the same prompt: what lies between them is the cost "
        "of storing and this machine's noise, which one sample cannot tell apart.",
        highlight=False,
    )
    console.print(f"\n[bold]{escape(questions[0])}[/]", highlight=False)
    console.print(f"  without the cache:  {escape(outcome.no_cache.answer.text)}", highlight=False)
    console.print(f"  from files:         {escape(outcome.warm.answer.text)}", highlight=False)
    console.print(f"[bold]{escape(questions[1])}[/]", highlight=False)
    console.print(f"  {escape(outcome.second.answer.text)}\n", highlight=False)
    for note in outcome.notes:
        console.print(f"Note: {escape(note)}", highlight=False)
