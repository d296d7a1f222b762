"""The command line: streams, exit codes, JSON, and a start that imports little."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from py_kvcache import __version__
from py_kvcache.cli import app
from py_kvcache.tools.terminal import EXIT_CODES

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "connector"


def cli(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PY_KVCACHE_")}
    env.update({"PYTHONPATH": str(SOURCE), **environment})
    return subprocess.run(
        [sys.executable, "-m", "py_kvcache", *args], capture_output=True, text=True, env=env, timeout=120
    )


@pytest.mark.parametrize("command", ["doctor", "inspect", "verify"])
def test_json_is_one_object_with_its_schema_and_nothing_else_on_stdout(root: Any, command: str) -> None:
    root.block(root.namespace())
    done = cli(command, str(root.path), "--json")
    told = json.loads(done.stdout)
    assert told["schema"] == f"py-kvcache/{command}/1"
    assert told["good"] is True
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["doctor", "inspect", "verify"])
@pytest.mark.parametrize("name", ["none/none", "file", "\x00"])
def test_an_unusable_root_is_exit_code_3_and_one_sentence(tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / "file").write_text("x")
    done = CliRunner().invoke(app, [command, str(tmp_path / name), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["good"], told["error"]["kind"]) == (3, False, "root")
    assert done.stderr.startswith("error:")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_root_without_blocks_is_said_to_be_one_since_it_may_be_the_wrong_folder(
    root: Any, command: str
) -> None:
    hint = "this is not the cache's root"
    assert hint in " ".join(cli(command, str(root.path)).stdout.split())
    root.block(root.namespace())
    assert hint not in " ".join(cli(command, str(root.path)).stdout.split())


def test_problems_are_exit_code_1_and_usage_is_2(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PY_KVCACHE_ROOT", raising=False)
    path = root.block(root.namespace())
    os.truncate(path, 5_000)

    def code(*args: str) -> int:
        return CliRunner().invoke(app, args).exit_code

    assert code("inspect", str(root.path)) == 1
    assert code("verify", str(root.path)) == 1
    assert code("verify", str(root.path), "--delete") == 1
    assert not path.exists()
    assert code("verify", str(root.path)) == 0
    assert code("verify", str(root.path), "--namespace", "none") == 2
    assert code("verify", str(root.path), "--limit", "-1") == 2
    assert code("verify") == 2
    assert code("nonsense") == 2


def test_the_root_may_come_from_the_environment(root: Any) -> None:
    root.block(root.namespace())
    done = cli("inspect", "--json", PY_KVCACHE_ROOT=str(root.path))
    assert json.loads(done.stdout)["total"]["blocks"] == 1


def test_a_config_gives_the_doctor_its_root_and_is_stronger_than_the_environment(root: Any) -> None:
    extra = {"root": str(root.path), "ring": "threads"}
    whole = {
        "kv_connector": "PyKvCacheConnector", "kv_connector_module_path": "py_kvcache.connector",
        "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip
    for config in (extra, {"kv_connector_extra_config": extra}, whole):
        done = cli("doctor", "--json", "--config", json.dumps(config), PY_KVCACHE_ROOT="/none/none")
        told = json.loads(done.stdout)
        assert (done.returncode, told["root"], told["will_use"]["ring"]) == (0, str(root.path), "threads")


@pytest.mark.parametrize(
    ("config", "code", "part"),
    [
        ('{"root": "ROOT", "rign": "auto"}', 1, "did you mean 'ring'?"),
        ('{"rooot": "/cache"}', 1, "did you mean 'root'?"),
        ("{}", 1, "root is missing"),
        ('{"root": "/none/none"}', 3, "mount the volume"),
        ('{"root": "/cache"', 2, "--config is no JSON"),
        ("", 2, "--config is no JSON"),
        ("[1]", 2, "no JSON object"),
        ('{"kv_connector_extra_config": 1}', 2, "no JSON object"),
    ],
)
def test_a_config_that_vllm_would_refuse_is_told_before_its_start(
    root: Any, config: str, code: int, part: str
) -> None:
    done = cli("doctor", "--json", "--config", config.replace("ROOT", str(root.path)))
    assert done.returncode == code
    assert part in done.stdout
    assert json.loads(done.stdout)["good"] is False


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_holds_something_else_is_a_problem_and_a_fresh_volume_is_none(
    root: Any, command: str
) -> None:
    (root.path / "lost+found").mkdir()
    (root.path / ".snapshot").mkdir()
    assert cli(command, str(root.path)).returncode == 0
    (root.path / "letters").mkdir()
    (root.path / "notes.txt").write_text("x")
    sentence = "no namespace of py-kvcache here, but 2 other entries: is this the cache's root?"
    done = cli(command, str(root.path))
    assert done.returncode == 1
    assert done.stdout.count(sentence) == 1
    assert "nothing has been stored here" not in done.stdout
    told = json.loads(cli(command, str(root.path), "--json").stdout)
    assert told["good"] is False
    assert sentence in json.dumps(told)
    root.block(root.namespace())
    assert cli(command, str(root.path)).returncode == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("part", ["", "_r0"])
def test_a_namespace_in_place_of_the_root_is_told_the_root(root: Any, command: str, part: str) -> None:
    space = root.namespace()
    root.block(space)
    done = cli(command, f"{root.path}/{space}{part}/")
    assert done.returncode == 3
    assert f"this is a namespace of the cache; give its parent {root.path}" in done.stderr


def test_a_root_that_is_named_like_a_namespace_is_one_all_the_same(root: Any) -> None:
    named = root.path / root.namespace(digest="ab" * 8, ours=False)
    named.mkdir()
    assert cli("inspect", str(named)).returncode == 0
    (named / root.namespace()).mkdir()
    assert cli("inspect", str(named)).returncode == 0


def test_help_of_bench_serve_says_which_systems_run_by_themselves() -> None:
    done = cli("bench", "serve", "--help", COLUMNS="80")
    assert "[default: (all)]" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["doctor"],
        ["inspect"],
        ["verify"],
        *(["bench", name] for name in ("io", "metadata", "serve", "timeline", "policy")),
        *(["calibrate", name] for name in ("fit", "show", "compare")),
    ],
)  # fmt: skip
def test_help_has_examples_and_exit_codes(command: list[str]) -> None:
    done = cli(*command, "--help", COLUMNS="120")
    assert done.returncode == 0
    assert ("Examples" if command else "Exit codes") in done.stdout


def test_help_readme_and_operations_list_the_same_exit_codes() -> None:
    def words(text: str) -> str:
        return " ".join(text.replace("│", " ").split())

    assert EXIT_CODES in words(cli("--help", COLUMNS="120").stdout)
    for name in ("README.md", "docs/operations.md"):
        assert EXIT_CODES in words((REPOSITORY / name).read_text()), name


@pytest.mark.parametrize(
    "command", [["doctor"], ["inspect"], ["verify"], ["bench", "io"], ["bench", "metadata"],
                ["bench", "serve", "--model", "m", "--out", "o"]],
)  # fmt: skip
def test_a_missing_root_names_the_variable_that_may_give_it(command: list[str]) -> None:
    done = cli(*command, COLUMNS="200")
    assert done.returncode == 2
    assert "PY_KVCACHE_ROOT" in done.stderr


def test_without_the_packages_of_the_command_line_it_says_which_extra_has_them() -> None:
    code = "import sys; sys.modules['typer'] = None; import py_kvcache.__main__ as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "connector")},
    )  # fmt: skip
    assert done.returncode == 1
    assert "typer is missing" in done.stderr and "pip install 'py-kvcache[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_verification_cut_short_by_its_limit_says_so(root: Any) -> None:
    space = root.namespace("a/one", "a" * 12)
    for _ in range(4):
        root.block(space)
    assert "Only 3 blocks were checked (--limit)" in cli("verify", str(root.path), "--limit", "3").stdout
    assert "--limit" not in cli("verify", str(root.path), "--limit", "9").stdout


def test_the_version_is_that_of_the_package() -> None:
    assert cli("--version").stdout.strip() == f"py-kvcache {__version__}"


@pytest.mark.parametrize("args", [["--help"], ["doctor", "ROOT", "--json"], ["verify", "ROOT", "--json"]])
def test_neither_torch_nor_vllm_nor_liburing_is_imported(root: Any, args: list[str]) -> None:
    code = (
        "import sys, py_kvcache.cli as c\n"
        f"sys.argv[1:] = {[str(root.path) if a == 'ROOT' else a for a in args]}\n"
        "try: c.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm', 'liburing') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_a_reader_that_closes_the_pipe_early_is_no_error(root: Any) -> None:
    space = root.namespace()
    for _ in range(50):
        root.block(space).write_bytes(b"")
    done = subprocess.run(
        f"{sys.executable} -m py_kvcache verify {root.path} --json | head -c 10", shell=True,
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.stderr == ""


def test_an_interrupt_ends_with_130_and_without_a_traceback(root: Any) -> None:
    root.block(root.namespace())
    code = (
        "import os, signal, py_kvcache.tools.inspection as i, py_kvcache.cli as c, sys\n"
        # In the background of a script the signal is inherited as ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "i._volume = lambda fd: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.argv[1:] = ['inspect', {str(root.path)!r}]\n"
        "c.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", [[], ["--json"]])
@pytest.mark.parametrize("stream", [">&-", ">/dev/full", "</dev/null >&0"])
@pytest.mark.parametrize("args", [["inspect", "ROOT"], ["verify", "ROOT"]])
def test_an_answer_that_cannot_be_written_is_exit_code_1_and_one_sentence(
    root: Any, stream: str, args: list[str], given: list[str]
) -> None:
    done = shell(root, args + given, stream)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [["--help"], ["verify", "--help"], ["--version"]])
def test_help_that_cannot_be_written_is_exit_code_1_and_one_sentence(root: Any, args: list[str]) -> None:
    done = shell(root, args, ">/dev/full")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def shell(root: Any, args: list[str], rest: str) -> subprocess.CompletedProcess[str]:
    """With bash, for its redirections; ROOT stands for the root's path."""
    words = " ".join(str(root.path) if word == "ROOT" else word for word in args)
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m py_kvcache {words} {rest}"], capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip


@pytest.mark.parametrize("given", [[], ["--json"]])
def test_a_closed_pipe_is_told_by_the_exit_code_alone(root: Any, given: list[str]) -> None:
    # the reader has gone before the answer comes
    done = shell(root, ["inspect", "ROOT", *given], "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_reaches_whoever_still_listens(root: Any) -> None:
    done = shell(root, ["inspect", "/none/none", "--json"], ">/dev/full")
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    done = shell(root, ["inspect", "ROOT", "--json"], "2>&-")
    assert (done.returncode, json.loads(done.stdout)["good"]) == (0, True)
    done = shell(root, ["inspect", "ROOT", "--json"], ">/dev/full 2>/dev/full")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("args", "schema", "part"),
    [
        (["inspect", "ROOT", "--bad"], "py-kvcache/inspect/1", "--bad"),
        (["verify", "ROOT", "--threads", "0"], "py-kvcache/verify/1", "--threads"),
        (["doctor", ""], "py-kvcache/doctor/1", "empty"),
        (["inspect", ""], "py-kvcache/inspect/1", "empty"),
        (["verify", ""], "py-kvcache/verify/1", "empty"),
        (["doctor"], "py-kvcache/doctor/1", "ROOT"),
        (["nonsense"], "py-kvcache/error/1", "nonsense"),
        (["bench", "io", "--root", ""], "py-kvcache.bench.io/1", "empty"),
        (["bench", "io", "--root", "ROOT", "--depth", "5000"], "py-kvcache.bench.io/1", "depth"),
        (["bench", "io", "--root", "ROOT", "--seconds", "nan"], "py-kvcache.bench.io/1", "seconds"),
        (["bench", "metadata", "--root", "ROOT", "--processes", "257"], "py-kvcache.bench.metadata/1", "256"),
        (
            ["bench", "metadata", "--root", "ROOT", "--files", "9" * 5000],
            "py-kvcache.bench.metadata/1",
            "999",
        ),
        (["bench", "metadata", "--root", "ROOT", "--rounds", "1e9"], "py-kvcache.bench.metadata/1", "rounds"),
    ],
)
def test_a_wrong_option_is_a_json_object_when_one_was_asked_for(
    root: Any, monkeypatch: pytest.MonkeyPatch, args: list[str], schema: str, part: str
) -> None:
    monkeypatch.delenv("PY_KVCACHE_ROOT", raising=False)
    args = [str(root.path) if word == "ROOT" else word for word in args]
    done = CliRunner().invoke(app, [*args, "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["schema"], told["good"]) == (2, schema, False)
    assert told["error"]["kind"] == "usage"
    assert part in told["error"]["text"]
    assert len(done.stderr.splitlines()) == 1
    assert CliRunner().invoke(app, args).exit_code == 2
    assert os.listdir(root.path) == []


def test_lines_stay_whole_in_a_pipe(root: Any) -> None:
    path = root.block(root.namespace())
    path.write_bytes(b"")
    done = cli("verify", str(root.path), COLUMNS="40")
    assert any(str(path.relative_to(root.path)) in line for line in done.stdout.splitlines())


REPORT = {
    "schema": "x/1",
    "machine": {"cores": 2, "list": [1]},
    "results": [
        {"file_bytes": 4096, "read_gb_s": 1.23456, "direct": True},
        {"file_bytes": 8192, "note": None, "per": [{"processes": 4, "lookups_per_s": 98_765}]},
    ],
    "below_target": [],
    "good": True,
}


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        ("io", ["--sizes", "1,28", "--depth", "8"], {"sizes": [1 << 20, 28 << 20], "depth": 8}),
        ("metadata", ["--files", "10,20", "--rounds", "2"], {"files": [10, 20], "rounds": 2}),
    ],
)
def test_a_benchmark_gets_its_options_and_its_figures_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, args: list[str], expected: dict[str, Any]
) -> None:
    tool = importlib.import_module(f"py_kvcache.bench.{command}")
    given: dict[str, Any] = {}

    def run(root: str, **options: Any) -> dict[str, Any]:
        given.update(options, root=root)
        options["on_progress"](0, 1, "reading [1]")
        return REPORT

    monkeypatch.setattr(tool, "run", run)
    start = ["bench", command, "--root", str(tmp_path)]
    done = CliRunner().invoke(app, [*start, *args])
    assert done.exit_code == 0
    assert expected.items() <= given.items()
    assert given["root"] == str(tmp_path)
    for text in ("1.235", "8,192", "lookups per s by 4 processes", "98,765"):
        assert text in done.stdout
    assert "reading [1]" in done.stderr
    done = CliRunner().invoke(app, [*start, "--json"])
    assert json.loads(done.stdout) == REPORT
    monkeypatch.setattr(tool, "run", lambda *_, **__: {**REPORT, "good": False, "below_target": ["slow"]})
    done = CliRunner().invoke(app, start)
    assert (done.exit_code, "below target: slow" in done.stdout) == (1, True)


@pytest.mark.parametrize("sizes", ["", "x", "1,,2", "0", "-1"])
def test_a_list_of_numbers_that_is_none_is_a_usage_error(tmp_path: Path, sizes: str) -> None:
    done = CliRunner().invoke(app, ["bench", "io", "--root", str(tmp_path), "--sizes", sizes])
    assert done.exit_code == 2
