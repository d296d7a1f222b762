"""explain tells what the gate would decide, and from where on it would decide otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from py_kvcache.cli import app
from py_kvcache.models import THRESHOLDS_SCHEMA

PREFILL = "0=0,10000=0.13,40000=0.81"


def explain(*more: str) -> Any:
    return CliRunner().invoke(app, ["explain", *more], env={"COLUMNS": "160"})


def told(*more: str) -> dict[str, Any]:
    done = explain(*more, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


BASE = ("--prompt", "40000", "--hit", "40000", "--token-bytes", "114688", "--prefill", PREFILL)


def test_at_the_least_rate_that_it_names_the_decision_turns():
    least = told(*BASE, "--rate", "1e9")["least_bytes_per_s"]
    assert least == pytest.approx(40_000 * 114_688 / 0.81)
    assert not told(*BASE, "--rate", str(least * 0.99))["load"]
    assert told(*BASE, "--rate", str(least * 1.01))["load"]


def test_from_the_shortest_hit_that_it_names_on_hits_are_loaded():
    least = told(*BASE, "--rate", "7e9")["least_hit_tokens"]
    assert 10_000 < least < 40_000
    assert least % 256 == 0
    for hit, loads in ((least - 256, False), (least, True)):
        more = [part if part != "40000" else str(hit) for part in BASE[2:4]]
        assert told(*BASE[:2], *more, *BASE[4:], "--rate", "7e9")["load"] is loads


def test_only_whole_blocks_are_a_prefix_that_can_be_loaded():
    for block in (64, 1000):
        least = told(*BASE, "--rate", "7e9", "--gpu", "300", "--block-tokens", str(block))["least_hit_tokens"]
        assert least % block == 0 and least > 300


def test_a_hit_that_the_gpu_has_whole_leaves_nothing_to_load():
    done = explain("--prompt", "900", "--hit", "512", "--gpu", "512", "--token-bytes", "9", "--rate", "1e9",
                   "--prefill", PREFILL)  # fmt: skip
    assert "compute: there is nothing to load" in done.stdout


def test_what_is_not_known_is_said_so():
    found = told("--prompt", "10", "--hit", "5")
    assert (found["load"], found["reason"], found["least_hit_tokens"]) == (False, "unknown", None)
    assert "--rate, --prefill or --thresholds" in explain("--prompt", "10", "--hit", "5").stdout


def test_thresholds_come_from_a_file_or_this_nodes_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = {
        "schema": THRESHOLDS_SCHEMA, "engine": "0" * 16, "thresholds": {"disk": [[8000, 6400]]},
        "prefill": [[0, 0], [10_000, 0.13]],
    }  # fmt: skip
    (tmp_path / "n1").write_text(json.dumps(content))
    monkeypatch.setenv("NODE_NAME", "n1")
    for path in (tmp_path, tmp_path / "n1"):
        asked = ("--gate", "static", "--thresholds", str(path), "--prompt", "8000")
        assert told(*asked, "--hit", "6400")["reason"] == "above_threshold"
        assert told(*asked, "--hit", "6399")["threshold_tokens"] == 6400
    rate = ("--rate", "1e9", "--token-bytes", "1000", "--thresholds", str(tmp_path / "n1"))
    found = told("--prompt", "20000", "--hit", "20000", *rate)
    assert found["beyond_the_curve"] and found["saved_s"] > 0.13


@pytest.mark.parametrize(
    ("exact", "least", "part"),
    [
        (6_000, 6_000, "prefixes from 6,000 tokens on pay"),
        (10_001, None, "no prefix of up to 10,000 tokens pays"),
    ],
)
def test_what_a_calibration_found_for_every_prompt_is_told(
    tmp_path: Path, exact: int, least: int | None, part: str
):
    content = {
        "schema": THRESHOLDS_SCHEMA, "engine": "0" * 16, "exact": {"disk": exact},
        "prefill": [[0, 0], [10_000, 0.13]],
    }  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    asked = ("--prompt", "8000", "--hit", "6400", "--thresholds", str(path))
    assert told(*asked)["calibrated"] == {"least_prefix": least, "longest": 10_000}
    assert part in " ".join(explain(*asked).stdout.split())
    assert told(*asked, "--source", "memory")["calibrated"] is None


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--prompt", "10", "--hit", "11"), "--gpu <= --hit <= --prompt"),
        (("--prompt", "10", "--hit", "5", "--gpu", "6"), "--gpu <= --hit <= --prompt"),
        (("--prompt", "10", "--hit", "5", "--prefill", "1024"), "no points such as"),
        (("--prompt", "10", "--hit", "5", "--prefill", "1=1"), "two points"),
        (
            ("--prompt", "10", "--hit", "5", "--thresholds", "/none/t.json"),
            "/none/t.json: No such file or directory [ENOENT]; give",
        ),
        (
            ("--prompt", "10", "--hit", "5", "--thresholds", "/tmp"),
            "/tmp is a folder: give a file in it, or set NODE_NAME",
        ),
        (
            ("--prompt", "10", "--hit", "5", "--prefill", "5=0.5,9=0.1"),
            "9 tokens cannot take less (0.1 s) than 5",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(more: tuple[str, ...], part: str):
    done = explain(*more)
    assert done.exit_code == 2
    assert part in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_rate_without_the_bytes_of_a_token_is_refused_with_how_to_find_them():
    done = explain("--prompt", "1000", "--hit", "900", "--rate", "1e9", "--prefill", PREFILL)
    assert done.exit_code == 2 and "--token-bytes is missing" in done.stderr and "x layers x" in done.stderr
