"""calibrate fit, show and compare: files, words, JSON, exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from py_kvcache.calibrate.outputs import error_text
from py_kvcache.cli import app
from py_kvcache.models import read_thresholds


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *words], env={"COLUMNS": "200"})


def told(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_fit_writes_thresholds_a_report_and_pictures(made: Any, tmp_path: Path):
    pytest.importorskip("matplotlib")
    done = run("fit", made.file(), "--out", str(tmp_path / "out" / "deep"))
    assert done.exit_code == 0, done.output
    assert "worth loading from disk here; below, recompute" in done.stdout
    names = {path.name for path in (tmp_path / "out" / "deep").iterdir()}
    assert names == {"thresholds.json", "report.html", "ttft.png", "frontier.png", "bandwidth.png"}
    assert (tmp_path / "out/deep/ttft.png").read_bytes().startswith(b"\x89PNG")
    assert read_thresholds(str(tmp_path / "out/deep/thresholds.json")).engine == "0123456789abcdef"


def test_fit_as_json_has_all_figures(made: Any, tmp_path: Path):
    found = told("fit", made.file(), "--out", str(tmp_path / "o"))
    assert (found["schema"], found["good"]) == ("py-kvcache/calibrate-fit/1", True)
    assert found["thresholds"]["exact"]["disk"] == found["sources"]["disk"]["exact"]
    assert len(found["files"]) >= 2 and found["prefill_error"] < 0.01


def test_the_termination_log_gets_the_thresholds_or_the_error(made: Any, tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("x" * 5000)
    common = ("--out", str(tmp_path / "o"), "--termination-log", str(log))
    assert run("fit", made.file(), *common).exit_code == 0
    assert read_thresholds(str(log)) == read_thresholds(str(tmp_path / "o" / "thresholds.json"))
    done = run("fit", str(tmp_path / "none.json"), *common)
    assert done.exit_code == 3
    assert "none.json" in json.loads(log.read_text())["error"]
    assert run("fit", made.file(engine="x"), *common).exit_code == 2
    assert "engine" in json.loads(log.read_text())["error"]


@pytest.mark.parametrize("text", ["x" * 5000, "\x00" * 5000, "\U0001f600" * 700, 'a"' * 2000, "short"])
def test_an_error_for_the_termination_log_has_at_most_1024_bytes(text: str):
    written = error_text(text)
    assert len(written.encode()) <= 1024
    error = json.loads(written)["error"]
    assert text.startswith(error.encode("utf-16", "ignore").decode("utf-16")) and error


def test_pictures_are_drawn_also_where_no_prefix_pays(made: Any, tmp_path: Path):
    pytest.importorskip("matplotlib")
    samples = [
        *made.samples("compute", made.computing),
        *made.samples("disk", made.loading(1e9), copy=made.loading(1e9, 0)),
    ]
    done = run("fit", made.file(sets=[{"concurrency": 1, "samples": samples}]), "--out", str(tmp_path / "o"))
    assert done.exit_code == 0
    assert "loading from disk never pays up to 32,000 tokens" in done.stdout
    assert (tmp_path / "o" / "frontier.png").exists()


def test_without_any_threshold_the_exit_code_is_1(made: Any, tmp_path: Path):
    path = made.file(sets=[{"concurrency": 1, "samples": made.samples("compute", made.computing)}])
    done = run("fit", path, "--out", str(tmp_path / "o"))
    assert done.exit_code == 1
    assert "disk: unknown: loading from disk was not measured" in done.stdout
    assert read_thresholds(str(tmp_path / "o" / "thresholds.json")).curve() is not None


def test_the_set_that_counts_is_chosen_and_the_others_go_beside_it(made: Any, tmp_path: Path):
    samples = made.content()["sets"][0]["samples"]
    path = made.file(sets=[{"concurrency": n, "samples": samples} for n in (1, 8)])
    found = told("fit", path, "--out", str(tmp_path / "o"), "--concurrency", "8")["thresholds"]
    assert (found["concurrency"], len(found["under_load"])) == (8, 1)
    assert "With 1 requests at a time" in (tmp_path / "o" / "report.html").read_text()
    shown = told("show", str(tmp_path / "o" / "thresholds.json"))
    assert any("(8 requests at a time)" in line for line in shown["summary"])
    done = run("fit", path, "--out", str(tmp_path / "o"), "--concurrency", "3")
    assert (done.exit_code, "there is: 1, 8" in done.stderr) == (2, True)


def test_what_others_wrote_is_escaped_in_the_report_and_on_the_terminal(made: Any, tmp_path: Path):
    nasty = "<script>alert(1)</script> [bold]&"
    path = made.file(machine={nasty: nasty}, arguments={"model": [nasty]}, skipped=[nasty])
    assert nasty in run("fit", path, "--out", str(tmp_path)).stdout
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert nasty in run("show", path).stdout


def test_the_report_needs_nothing_but_itself(made: Any, tmp_path: Path):
    run("fit", made.file(skipped=["65,536 tokens: no room"]), "--out", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|<link|<script|url\(", page)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', page))
    for text in ("skipped: 65,536 tokens: no room", "H200", "m/3b", "needed GB/s", "least prefix"):
        assert text in page


def test_without_matplotlib_there_is_a_page_without_pictures(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("fit", made.file(), "--out", str(tmp_path / "o"))
    assert done.exit_code == 0
    assert "matplotlib is not installed" in done.stdout
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"thresholds.json", "report.html"}
    assert "matplotlib is not installed" in (tmp_path / "o" / "report.html").read_text()


def test_show_tells_of_both_kinds_of_file(made: Any, tmp_path: Path):
    path = made.file()
    run("fit", path, "--out", str(tmp_path / "o"))
    written = str(tmp_path / "o" / "thresholds.json")
    for file, kind in ((path, "calibration"), (written, "thresholds")):
        assert "worth loading from disk here" in run("show", file).stdout
        assert f"{kind} of engine 0123456789abcdef" in run("show", file).stdout
        assert told("show", file)["kind"] == kind
    assert told("show", written)["summary"][0] == told("show", path)["summary"][0]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"schema": "other/1"}', '{"schema": "py-kvcache/thresholds/1"}']
)
@pytest.mark.parametrize("given", [[], ["--json"]])
def test_show_of_something_else_is_one_sentence(tmp_path: Path, text: str, given: list[str]):
    (tmp_path / "f").write_text(text)
    done = run("show", str(tmp_path / "f"), *given)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1 and "calib" in done.stderr
    if given:
        assert json.loads(done.stdout)["error"]["kind"] == "usage"


def test_compare_tells_ratios_thresholds_and_what_differs(made: Any):
    slow = [
        *made.samples("compute", lambda n: 2 * made.computing(n)),
        *made.samples("disk", made.loading(7e9)),
    ]
    a = made.file("a.json")
    b = made.file(
        "b.json", sets=[{"concurrency": 1, "samples": slow}], machine={"gpu": "L4"}, engine="f" * 16
    )
    found = told("compare", a, b)
    assert [row["ratio"] for row in found["compute"]] == pytest.approx([2.0] * 6)
    assert [row["ratio"] for row in found["disk"]] == pytest.approx([1.0] * 6)
    assert found["memory"] == []
    assert found["thresholds"][0]["second"] < found["thresholds"][0]["first"]
    assert "unknown" in found["thresholds"][1]["second"]
    assert {"name": "gpu", "first": "H200", "second": "L4"} in found["machine"]
    assert "the engines differ (0123456789abcdef, ffffffffffffffff)" in found["warnings"][0]
    text = run("compare", a, b).stdout
    assert "the engines differ" in text and "ratio" in text and "L4" in text


def test_compare_refuses_another_schema_and_sets_without_a_common_load(made: Any):
    a, other = made.file("a.json"), made.file("b.json", schema="py-kvcache/calibration/2")
    done = run("compare", a, other)
    assert (done.exit_code, "schema" in done.stderr) == (2, True)
    loaded = made.file("c.json", sets=[{"concurrency": 8, "samples": made.content()["sets"][0]["samples"]}])
    done = run("compare", a, loaded)
    assert (done.exit_code, "in common" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", ["fit", "show", "compare"])
def test_help_has_examples_and_a_wrong_option_is_json(command: str):
    assert "Examples" in run(command, "--help").stdout
    found = json.loads(run(command, "--bad", "--json").stdout)
    assert found["schema"] == f"py-kvcache/calibrate-{command}/1"
    assert found["error"]["kind"] == "usage"
