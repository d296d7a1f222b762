"""Policies on the traces by which the default is chosen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from py_kvcache.bench import policy
from py_kvcache.cli import app
from py_kvcache.config import Config
from py_kvcache.errors import KvCacheError


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return policy.run(capacity=100)


def test_the_default_is_the_policy_that_reads_least(report: dict[str, Any]) -> None:
    assert report["best"] == Config(root="/cache").memory_tier


def test_nobody_reads_less_than_the_optimum_and_lirs_reads_least_of_a_loop(report: dict[str, Any]) -> None:
    for row in report["traces"]:
        least = row["read_share_optimum"] - 1e-9
        assert all(least <= row[f"read_share_{kind}"] <= 1 for kind in policy.POLICIES)
    shares = {row["trace"]: row["read_share_lirs"] for row in report["traces"]}
    assert shares["loop"] <= 0.75 and shares["loop, queue in sight"] <= 0.75
    assert [row["read_share_lru"] for row in report["traces"] if row["trace"] == "loop"] == [1.0]


def test_the_optimum_is_what_trying_all_choices_finds() -> None:
    generator = random.Random(3)
    for _ in range(20):
        blocks = [str(generator.randrange(5)) for _ in range(9)]
        optimum = policy.Optimum(2, [policy.Request([block], {}) for block in blocks])
        assert sum(not policy._use(optimum, block) for block in blocks) == fewest_reads(blocks, 2, ())


def fewest_reads(blocks: list[str], capacity: int, resident: tuple[str, ...]) -> int:
    """By trying every victim, and keeping the coming block or not."""
    if not blocks:
        return 0
    first, rest = blocks[0], blocks[1:]
    if first in resident:
        return fewest_reads(rest, capacity, resident)
    if len(resident) < capacity:
        return 1 + fewest_reads(rest, capacity, (*resident, first))
    choices = [resident, *(tuple({*resident, first} - {victim}) for victim in resident)]
    return 1 + min(fewest_reads(rest, capacity, choice) for choice in choices)


def test_the_command_prints_shares_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    asked = ["bench", "policy", "--capacity", "20", "--json", "--picture", str(picture)]
    assert json.loads(CliRunner().invoke(app, asked).stdout)["schema"] == policy.SCHEMA
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = CliRunner().invoke(app, ["bench", "policy", "--capacity", "20"], env={"COLUMNS": "160"})
    assert "read share lirs" in told.stdout


def test_a_memory_too_small_to_tell_is_refused() -> None:
    with pytest.raises(KvCacheError, match="too small"):
        policy.run(capacity=5)
