"""The demo's judgement, without a server: what it calls success, what it writes for scripts."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

import demo
from report import Asked, Outcome, show
from server import Answer, Server, ServerError, transfer_config


def asked(text: str = "In 1874.", ttft: float = 1.0, from_files: int = 0, loaded: int = 0) -> Asked:
    return Asked(Answer(text, ttft, ttft, 2992), from_files, 0, loaded)


def outcome(warm: Asked, text: str = "In 1874.") -> Outcome:
    return Outcome(asked(text), asked(text), warm, asked("Petrel."), files=11, bytes_stored=1)


def test_a_warm_answer_that_was_loaded_and_is_the_same_text_is_a_success():
    assert outcome(asked(from_files=2816, loaded=1)).problem() is None


@pytest.mark.parametrize(
    ("warm", "sentence"),
    [
        (asked(), "no hit"),
        (asked(from_files=2816), "no bytes loaded"),
        (asked("In 1875.", from_files=2816, loaded=1), "differs"),
    ],
    ids=["nothing found", "nothing read", "other text"],
)
def test_a_missed_hit_and_another_text_fail_the_demo(warm, sentence):
    seen = outcome(warm)
    assert sentence in seen.problem()
    assert seen.as_json()["ok"] is False


def test_the_json_has_the_keys_that_scripts_rely_on():
    written = json.loads(json.dumps(outcome(asked(from_files=2816, loaded=5)).as_json()))
    promised = {
        "ttft_no_cache_s", "ttft_cold_s", "ttft_warm_s", "hit_tokens", "prompt_tokens", "bytes_loaded",
        "files", "same_text", "versions", "machine",
    }  # fmt: skip
    assert promised <= written.keys()
    assert written["hit_tokens"] == 2816
    assert written["bytes_loaded"] == 5
    assert written["same_text"] is True


def test_waiting_for_stores_ends_when_no_temporary_file_is_left(tmp_path):
    leaf = tmp_path / "m_0_r0" / "abc" / "de_g0"
    leaf.mkdir(parents=True)
    (leaf / "one.bin").touch()
    unfinished = leaf / ".two.host.1.0.tmp"
    unfinished.touch()

    def publish() -> None:
        time.sleep(1.2)  # longer than the count must stand still
        unfinished.rename(leaf / "two.bin")

    publisher = threading.Thread(target=publish)
    publisher.start()
    files = demo.wait_until_stored(tmp_path)
    publisher.join()
    assert sorted(path.name for path in files) == ["one.bin", "two.bin"]


def test_a_root_where_nothing_is_stored_fails_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STORED_WITHIN_S", 0.3)
    with pytest.raises(demo.DemoError, match="no file was stored"):
        demo.wait_until_stored(tmp_path)


def test_a_second_demo_in_the_same_folder_is_refused_and_leaves_the_first_ones_files(tmp_path):
    lock = demo.prepare_work(tmp_path / "work")
    log = tmp_path / "work" / "cold.log"
    log.touch()
    with pytest.raises(demo.DemoError, match="another demo"):
        demo.prepare_work(tmp_path / "work")
    assert log.exists()
    lock.close()
    demo.prepare_work(tmp_path / "work").close()
    assert not log.exists()


def test_a_document_that_is_too_long_is_cut_and_that_is_said(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tmp_path / "model"
    model.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    document = tmp_path / "long.txt"
    document.write_text("word " * 10_000)
    text, tokens, notes = demo.read_document(document, model)
    assert tokens == demo.MAX_DOCUMENT_TOKENS == len(text.split())
    assert "10,000" in notes[0]


def test_a_server_that_ends_while_starting_is_reported_and_its_log_kept(tmp_path):
    server = Server(tmp_path / "no-model", tmp_path / "server.log")
    server._command = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    with server, pytest.raises(ServerError, match="ended with code 3"):
        server.start()
    assert "out of luck" in server.log_excerpt()


def test_a_failed_demo_shows_our_own_trouble_however_much_the_server_logged_since(tmp_path):
    server = Server(tmp_path / "model", tmp_path / "server.log")
    trouble = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "NameError: name 'core' is not defined",
    ]
    server.log.write_text("\n".join(["start", *trouble, *["INFO: something else"] * 500, "the end"]))
    excerpt = server.log_excerpt()
    assert all(line in excerpt for line in (*trouble, "the end"))
    assert len(excerpt.splitlines()) < 60


def test_the_transfer_config_is_what_the_readme_shows():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert transfer_config(Path("/cache")).replace(" ", "") in readme.replace(" ", "").replace("\n", "")


def test_a_long_step_shows_signs_of_life_where_output_is_no_terminal(monkeypatch):
    monkeypatch.setattr(demo, "SIGN_OF_LIFE_EVERY_S", 0.01)
    out = io.StringIO()

    def work() -> bool:
        end = time.monotonic() + 30
        while out.getvalue().count("starting ... 0 s") < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return time.monotonic() < end

    assert demo.Progress(Console(file=out, width=200), 1).run("starting", work)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[ 1/1] starting ..."
    assert lines[-1].startswith("[ 1/1] starting: done")


def test_signs_of_life_end_with_a_step_that_fails(monkeypatch):
    monkeypatch.setattr(demo, "SIGN_OF_LIFE_EVERY_S", 0.01)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        demo.Progress(Console(file=io.StringIO()), 1).run("dividing", lambda: 1 // 0)
    assert threading.active_count() == before


def test_what_vllms_own_memory_answered_gets_no_factor_in_the_table():
    seen = outcome(asked(ttft=0.5, from_files=2816, loaded=1))
    seen.second = Asked(Answer("Petrel.", 0.05, 0.1, 2992), 0, 2900, 0)
    out = io.StringIO()
    show(Console(file=out, width=80), seen, ("?", "?"))
    assert "2.0x" in out.getvalue()
    assert "20.0x" not in out.getvalue()
    assert "(vLLM's own memory)" in out.getvalue()
    assert "…" not in out.getvalue(), "the table fits into 80 columns"


def test_the_server_that_stores_is_ended_in_order(tmp_path, monkeypatch):
    commands = {}

    def start(server: Server) -> None:
        commands[server.log.name] = server._command
        raise ServerError("enough")

    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(demo, "convert_model", lambda: tmp_path)
    monkeypatch.setattr(demo, "read_document", lambda *_: ("text", 1, []))
    with pytest.raises(ServerError, match="enough"):
        demo.Demo(Console(file=io.StringIO()), tmp_path).run(None, ("?", "?"))
    command = commands["cold.log"]
    assert int(command[command.index("--shutdown-timeout") + 1]) > 0
