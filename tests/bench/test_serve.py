"""Systems take turns on the same documents, ratios stay within a round, and a failure costs only itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_args

import pytest

from py_kvcache.bench import plots, serve, serve_report, systems
from py_kvcache.bench.children import PARENT, child_environment, group_members, run_child
from py_kvcache.bench.serve_config import ServeConfig, from_mapping
from py_kvcache.bench.systems import SYSTEMS, Host, Place
from py_kvcache.bench.variants import in_turn, parse_systems
from py_kvcache.bench.workloads import WORKLOADS, Document, Shape
from py_kvcache.errors import ConfigError, KvCacheError, RootError

SHAPE = Shape(tokens=(300, 700), documents=4, prewarm=2, vocabulary=5000, seed=3)
CPU = Host(gpu=False, importable=lambda name: False)
GPU = Host(gpu=True, importable=lambda name: True)

# Plays a system: two phases with times that the task's options give, and files like a cache's.
FAKE = """
import json, os, sys
task = json.load(open(sys.argv[1]))
options = task["options"]
def emit(**event):
    with open(task["events"], "a") as file:
        file.write(json.dumps(event) + "\\n")
print("(Core pid=7) ERROR [core.py:5] ValueError: no such option")
for n in range(11):
    print("line", n)
emit(event="started", startup_s=1.5, vllm="0.0")
open(os.path.join(task["folder"], task["system"].split(":")[0]), "w").write("block")
for phase in ("cold", "warm"):
    emit(event="begin", text=phase)
    if options.get("fails_in") == phase:
        print("RuntimeError: the engine is dead")
        sys.exit(3)
    emit(event="phase", tokens=300, phase=phase, seconds=1, settled=True, io=None, counters={},
         requests=[{"document": n, "submitted_s": 0, "ttft_s": options.get(phase, 1.0) * (n + 1),
                    "prompt_tokens": 300, "cached_tokens": 0 if phase == "cold" else 150,
                    "output_tokens": [n]} for n in range(2)], files=os.listdir(task["folder"]))
emit(event="done")
"""
FAKE_LOG = [f"line {n}" for n in range(11)]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5000, **shape, "torch_dtype": "float16"}))
    return str(folder)


@pytest.fixture
def settings(tmp_path, model):
    root = tmp_path / "root"
    root.mkdir()

    def make(**more):
        base = {"model": model, "root": str(root), "out": str(tmp_path / "out"), "tokens": [300], "rounds": 2}
        return from_mapping({**base, **more})

    return make


def measure(config, **more):
    return serve.run(config, host=CPU, command=lambda variant: [sys.executable, "-c", FAKE], **more)


def run_of(label, number, **phases):
    """A run as the report has it, from mean times by phase."""
    return {
        "system": label,
        "round": number,
        "error": None,
        "phases": [
            {
                "tokens": 300,
                "phase": phase,
                "requests": [
                    {
                        "document": 0,
                        "submitted_s": 0.0,
                        "ttft_s": mean,
                        "prompt_tokens": 10,
                        "cached_tokens": 5,
                    }
                ],
            }
            for phase, mean in phases.items()
        ],
    }


def test_documents_are_the_same_in_every_process_and_differ_from_the_first_token_on():
    steps = list(WORKLOADS["long-doc"].steps(SHAPE))
    documents = {document for step in steps for document in step.documents}
    prompts = {document: document.token_ids(SHAPE) for document in documents}
    assert prompts == {document: document.token_ids(SHAPE) for document in documents}
    assert len(documents) == 2 * (4 + 2)
    for tokens in SHAPE.tokens:
        measured = [prompts[Document("document", n, tokens)] for n in range(4)]
        assert {len(prompt) for prompt in measured} == {tokens}
        assert len({prompt[0] for prompt in measured}) == 4
    assert len({tuple(prompt[:16]) for prompt in prompts.values()}) == len(documents)
    assert all(0 < token < 5000 for prompt in prompts.values() for token in prompt)


def test_long_doc_warms_up_with_other_documents_and_asks_the_same_ones_again():
    steps = [step for step in WORKLOADS["long-doc"].steps(SHAPE) if step.tokens == 300]
    assert [step.phase for step in steps] == ["prewarm", "prewarm", "cold", "warm", "warm2", "alone"]
    cold = steps[2]
    assert not set(steps[0].documents) & set(cold.documents)
    assert steps[3].documents == steps[4].documents == cold.documents
    assert [step.running for step in steps] == [0, 0, 0, 0, 0, 1]
    assert set(steps[5].documents) <= set(cold.documents)


def test_round_robin_asks_contexts_that_grow_four_at_a_time():
    steps = [step for step in WORKLOADS["round-robin"].steps(SHAPE) if step.tokens == 300][2:]
    assert [(step.phase, step.running) for step in steps] == [("turn1", 4), ("turn2", 4), ("turn3", 4)]
    for number in range(SHAPE.documents):
        first, second, third = (step.documents[number].token_ids(SHAPE) for step in steps)
        assert (len(first), len(second), len(third)) == (300, 556, 812)
        assert second[:300] == first and third[:556] == second


def test_mixed_asks_for_known_documents_and_new_ones_in_turn():
    steps = [step for step in WORKLOADS["mixed"].steps(SHAPE) if step.tokens == 300][2:]
    assert [(step.phase, step.running) for step in steps] == [("store", 8), ("mixed", 8), ("mixed2", 8)]
    known = steps[0].documents
    for step in steps[1:]:
        assert step.documents[::2] == known and not set(step.documents[1::2]) & set(known)
    assert len({document.number for step in steps for document in step.documents}) == 3 * len(known)


def test_the_order_of_systems_moves_on_by_one_each_round_and_the_floor_follows_its_files():
    variants = parse_systems("recompute,floor,py-kvcache,py-kvcache:io_depth=4,prefix-cache")
    orders = [[variant.label for variant in in_turn(variants, number)] for number in range(5)]
    assert orders[0] == ["recompute", "py-kvcache", "floor", "py-kvcache:io_depth=4", "prefix-cache"]
    assert orders[1] == ["py-kvcache", "floor", "py-kvcache:io_depth=4", "prefix-cache", "recompute"]
    assert orders[2] == ["py-kvcache:io_depth=4", "prefix-cache", "recompute", "py-kvcache", "floor"]
    assert orders[4] == orders[0]


def test_options_of_a_variant_go_above_those_of_its_system_and_reach_the_engine():
    common = {"py-kvcache": {"block_tokens": 64, "io_depth": 8}}
    plain, variant = parse_systems("py-kvcache,py-kvcache:checksum=off+io_depth=32+ring=threads", common)
    assert plain.options == {"block_tokens": 64, "io_depth": 8}
    assert variant.options == {"block_tokens": 64, "io_depth": 32, "checksum": False, "ring": "threads"}
    transfer = variant.system.engine(Place("/cache", "bench-1", variant.options))["kv_transfer_config"]
    assert transfer["kv_connector_extra_config"] == {"root": "/cache", "gate": "off", **variant.options}
    assert transfer["engine_id"] == "bench-1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("recompute,unknown", "no system"),
        ("recompute,recompute", "named twice"),
        ("py-kvcache:checksum", "name=value"),
        ("recompute:io_depth=4", "takes no option"),
        ("recompute,floor", "name that too"),
        ("", "no system"),
    ],
)
def test_systems_that_make_no_sense_are_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        parse_systems(text)


def test_peers_get_public_options_only_and_their_memory_as_asked():
    place = Place("/cache", "bench-7", {"cpu_gb": 2, "n_read_threads": 4})
    tier = SYSTEMS["vllm-fs-tier"]
    extra = tier.engine(place)["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": "/cache", "n_read_threads": 4}]
    assert extra["cpu_bytes_to_use"] == 2_000_000_000
    assert set(extra) == {"spec_name", "block_size", "cpu_bytes_to_use", "secondary_tiers"}
    assert tier.leftovers(place) == ["/dev/shm/vllm_offload_bench-7*.mmap"]
    variables = SYSTEMS["lmcache"].environment(Place("/cache", "bench-7", {"cpu_gb": 2}))
    assert variables["LMCACHE_LOCAL_DISK"] == "file:///cache/"
    assert variables["LMCACHE_LOCAL_CPU"] == "false"
    assert variables["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "2"


def test_each_system_says_why_it_cannot_run_here():
    why = {name: system.missing(CPU) for name, system in SYSTEMS.items()}
    assert {name for name, reason in why.items() if reason} == {"vllm-cpu-offload", "vllm-fs-tier", "lmcache"}
    assert "not installed" in why["lmcache"]
    assert not any(system.missing(GPU) for system in SYSTEMS.values())


def test_ratios_are_taken_within_a_round_before_the_median():
    # Round 1 found a machine twice as slow: the ratio is the same, that of the medians would not be.
    runs = [
        run_of("recompute", 0, warm=4.0), run_of("py-kvcache", 0, warm=1.0), run_of("floor", 0, warm=0.8),
        run_of("recompute", 1, warm=8.0), run_of("py-kvcache", 1, warm=2.0), run_of("floor", 1, warm=1.6),
        run_of("py-kvcache", 2, warm=9.0),  # recompute failed here
    ]  # fmt: skip
    labels = ["recompute", "py-kvcache", "floor"]
    found = {r["system"]: r for r in serve_report.results(runs, WORKLOADS["long-doc"], labels)}
    assert found["py-kvcache"]["mean_ttft_s"] == {"median": 2.0, "least": 1.0, "most": 9.0}
    assert found["py-kvcache"]["of_recompute"] == {"median": 0.25, "least": 0.25, "most": 0.25}
    assert found["py-kvcache"]["of_floor"]["median"] == 1.25
    assert found["py-kvcache"]["mean_by_round"] == {"0": 1.0, "1": 2.0, "2": 9.0}
    assert found["recompute"]["of_recompute"]["median"] == 1.0
    assert found["py-kvcache"]["hit_share"]["median"] == 0.5


def test_answers_are_compared_prompt_by_prompt_with_the_first():
    cold = [{"document": n, "prompt_tokens": 9, "output_tokens": [n, 7]} for n in range(3)]
    cold += [{**one, "output_tokens": [0]} for one in cold]
    same = [{"document": 2, "prompt_tokens": 9, "output_tokens": [2, 7]}]
    other = [{"document": 2, "prompt_tokens": 9, "output_tokens": [2, 8]}]
    grown = [{"document": 2, "prompt_tokens": 12, "output_tokens": [2, 7]}]
    assert serve_report.same_answers(same, cold) is True
    assert serve_report.same_answers(other, cold) is False
    assert serve_report.same_answers(grown, cold) is None
    assert serve_report.same_answers([{"document": 2, "prompt_tokens": 9}], cold) is None
    assert serve_report.same_answers(same, None) is None
    assert serve_report.all_same([None, True, False]) is False
    assert serve_report.all_same([None]) is None


def test_every_system_runs_in_every_round_in_a_folder_of_its_own(settings):
    seen = []
    config = settings(systems="recompute,prefix-cache,py-kvcache:warm=0.5,floor,lmcache")
    report = measure(config, on_progress=lambda done, total, text: seen.append((done, total, text)))
    assert report["good"]
    assert [(run["round"], run["system"]) for run in report["runs"]] == [
        (0, "recompute"), (0, "prefix-cache"), (0, "py-kvcache:warm=0.5"), (0, "floor"),
        (1, "prefix-cache"), (1, "py-kvcache:warm=0.5"), (1, "floor"), (1, "recompute"),
    ]  # fmt: skip
    files = {run["system"]: run["phases"][0]["files"] for run in report["runs"]}
    assert files["recompute"] == ["recompute"]
    assert sorted(files["floor"]) == ["floor", "py-kvcache"]
    assert report["skipped"] == [{"system": "lmcache", "why": "the Python package lmcache is not installed"}]
    assert os.listdir(config.root) == []
    warm = {r["system"]: r for r in report["results"] if r["phase"] == "warm"}
    assert warm["py-kvcache:warm=0.5"]["of_recompute"]["median"] == 0.5
    assert warm["py-kvcache:warm=0.5"]["same_tokens_as_recompute"] is True
    assert json.loads(Path(config.out, "serve.json").read_text()) == report
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(done < total for done, total, _ in seen)
    assert "py-kvcache" in serve_report.table(report)


def test_a_system_that_fails_is_told_with_its_last_log_lines_and_the_others_go_on(settings):
    report = measure(settings(systems="py-kvcache:fails_in=warm,recompute", rounds=1))
    failed, other = report["runs"]
    assert failed["error"] == "it ended with exit code 3"
    # The cause first, wherever in the log it stands, then the end of the log.
    dead = "RuntimeError: the engine is dead"
    # The causes first, wherever in the log they stand, then the log's end.
    assert failed["log_tail"] == ["ValueError: no such option", dead, *FAKE_LOG, dead]
    assert [phase["phase"] for phase in failed["phases"]] == ["cold"]
    assert other["error"] is None
    assert not report["good"]
    assert (
        "failed: round 1, py-kvcache:fails_in=warm: it ended with exit code 3; ValueError"
        in serve_report.table(report)
    )


def test_an_interrupted_run_keeps_what_it_has_and_leaves_no_files(settings):
    config = settings(systems="recompute,prefix-cache", rounds=1)

    def interrupt(done, total, text):
        if "prefix-cache" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(config, on_progress=interrupt)
    report = json.loads(Path(config.out, "serve.json").read_text())
    assert [run["system"] for run in report["runs"]] == ["recompute"]
    assert os.listdir(config.root) == []


def test_a_resumed_run_does_what_is_missing_and_refuses_other_work(settings):
    first = measure(settings(systems="recompute,py-kvcache:fails_in=cold,floor", rounds=1))
    kept = next(run for run in first["runs"] if run["system"] == "recompute")
    report = measure(settings(systems="recompute,py-kvcache,floor", resume=True))
    assert sorted((run["round"], run["system"]) for run in report["runs"]) == [
        (0, "floor"), (0, "py-kvcache"), (0, "recompute"), (1, "floor"), (1, "py-kvcache"), (1, "recompute"),
    ]  # fmt: skip
    assert next(run for run in report["runs"] if run["round"] == 0) == kept
    with pytest.raises(ConfigError, match="measured something else"):
        measure(settings(documents=3, resume=True))


def test_a_budget_ends_a_run_before_a_process_that_would_not_fit(settings, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(serve.time, "monotonic", lambda: now[0])

    def one(variant, number, position, folder):
        now[0] += 40.0
        bench._longest = 40.0
        return run_of(variant.label, number, warm=1.0) | {"boot": "", "notes": [], "log_tail": []}

    bench = serve._Bench(settings(systems="recompute,prefix-cache", budget_s=100), CPU, lambda *_: None, None)
    monkeypatch.setattr(bench, "_one", one)
    report = bench.run(bench._config.root)
    assert [run["system"] for run in report["runs"]] == ["recompute", "prefix-cache"]
    assert [note for note in report["notes"] if "100 s" in note]


def test_only_a_fitting_volume_is_used(settings):
    with pytest.raises(RootError, match="free"):
        measure(settings(systems="recompute,py-kvcache", tokens=[2_000_000_000], documents=1000))
    measure(settings(systems="recompute", tokens=[2_000_000_000], documents=1000, rounds=1))


def test_without_any_system_that_can_run_the_error_says_why(settings):
    with pytest.raises(KvCacheError, match="does not support CPU engines"):
        measure(settings(systems="vllm-cpu-offload"))


def test_a_model_without_weights_and_tokenizer_gets_random_ones_and_token_ids(settings, model):
    options = settings(tokens=[300, 1000], engine={"dtype": "float32"}).engine_options()
    assert options["load_format"] == "dummy"
    assert options["skip_tokenizer_init"] is True
    assert options["max_model_len"] > 1000
    assert options["dtype"] == "float32"
    Path(model, "model.safetensors").touch()
    Path(model, "tokenizer.json").touch()
    assert not {"load_format", "skip_tokenizer_init"} & set(settings().engine_options())


def test_space_is_counted_from_the_models_shape(settings):
    # 2 (keys and values) x 2 layers x 2 heads x 8 x 2 bytes, for 6 + 2 documents of 300 tokens
    assert settings().kv_bytes() == 2 * 2 * 2 * 8 * 2 * 300 * 8
    assert settings(engine={"dtype": "float32"}).kv_bytes() == 2 * settings().kv_bytes()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"rounds": 0}, "rounds"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [5, 5]}, "different lengths"),
        ({"tokens": ["5"]}, "tokens cannot be"),
        ({"documents": True}, "documents cannot be"),
        ({"workload": "none"}, "no workload"),
        ({"surprise": 1}, "unknown setting"),
        ({"root": ""}, "root is missing"),
        ({"model": "/nowhere"}, "no config.json"),
        ({"child_timeout_s": 0}, "child_timeout_s"),
        ({"options": {"nobody": {}}}, "no system"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(settings, wrong, why):
    with pytest.raises(ConfigError, match=why):
        settings(**wrong)


def test_a_process_that_hangs_is_ended_with_all_it_started(tmp_path):
    code = (
        "import subprocess as s, time; s.Popen(['sleep', '99']); print('started', flush=True); time.sleep(99)"
    )
    log = tmp_path / "log"
    pids = []

    def watch():
        while not log.exists() or "started" not in log.read_text():
            time.sleep(0.01)
        pids.extend(
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == os.getpid()
        )

    watcher = threading.Thread(target=watch)
    watcher.start()
    ended = run_child(
        [sys.executable, "-c", code], child_environment({}), tmp_path / "events", log, 2.0, print
    )
    watcher.join()
    assert ended.error == "not done after 2 s"
    assert ended.log_tail == ["started"]
    assert pids
    assert not any(group_members(pid) for pid in pids)


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_on_and_off_of_a_variant_reach_our_settings_as_they_want_them():
    config = pytest.importorskip("py_kvcache.config")
    for text in (
        "gate=off",
        "gate=adaptive",
        "preload=on",
        "preload=off",
        "direct_io=off",
        "checksum=off",
        "fsync=on",
    ):
        (variant,) = parse_systems(f"py-kvcache:{text}")
        engine = variant.system.engine(Place("/cache", "id", variant.options))
        parsed = config.parse_config(engine["kv_transfer_config"]["kv_connector_extra_config"], {})
        name, _, value = text.partition("=")
        wanted = value == "on" if name in ("checksum", "fsync") else value
        assert getattr(parsed, name) == wanted
    names = {n for n, f in config.Config.model_fields.items() if {"on", "off"} & set(get_args(f.annotation))}
    assert names == set(systems._WORDS_OF_OURS)


def test_every_system_gets_the_same_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    cores = {int(core) for core in child_environment({})["VLLM_CPU_OMP_THREADS_BIND"].split(",")}
    assert cores == os.sched_getaffinity(0)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert child_environment({})["VLLM_CPU_OMP_THREADS_BIND"] == "0"


_CHILD = """
import subprocess, sys, time
from py_kvcache.bench.serve_worker import die_with_parent
die_with_parent()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(left.pid, flush=True)
time.sleep(600)
"""
_STARTER = """
import os, subprocess, sys, time
os.environ["PY_KVCACHE_BENCH_PARENT"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_an_engines_processes_go_with_a_benchmark_that_was_killed():
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, _CHILD], stdout=subprocess.PIPE, text=True, env=child_environment({})
    )
    assert starter.stdout is not None
    group, _grandchild = int(starter.stdout.readline()), int(starter.stdout.readline())
    assert len(group_members(group)) == 2
    starter.kill()
    starter.wait()
    end = time.monotonic() + 20
    while group_members(group) and time.monotonic() < end:
        time.sleep(0.05)
    assert not group_members(group)


def test_a_child_whose_starter_is_gone_before_it_could_listen_ends_at_once():
    environment = {**child_environment({}), PARENT: "1"}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD], env=environment, start_new_session=True, timeout=60
    )
    assert child.returncode == 1


def test_a_process_killed_by_a_signal_and_one_that_says_nothing_are_failures(tmp_path):
    def run(code):
        return run_child(
            [sys.executable, "-c", code],
            child_environment({}),
            tmp_path / "events",
            tmp_path / "log",
            30.0,
            print,
        ).error

    assert run("import os; os.kill(os.getpid(), 11)") == "it was ended by SIGSEGV"
    assert run("") == "it ended before it was done"


def test_pictures_are_drawn_or_it_is_said_why_not(settings, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    config = settings(systems="recompute,py-kvcache", rounds=1)
    report = measure(config)
    names = {"cdf.png", "timeline.png", "ttft.png"}
    assert names <= set(os.listdir(config.out))
    assert all(Path(config.out, name).read_bytes().startswith(b"\x89PNG") for name in names)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is not installed" in plots.draw(report, str(tmp_path))[0]
    assert not list(tmp_path.glob("*.png"))


def test_it_runs_from_a_settings_file_without_typer_and_rich(settings, run_python, tmp_path, model):
    values = {"model": model, "root": settings().root, "out": str(tmp_path / "out"), "systems": "lmcache"}
    (tmp_path / "settings.json").write_text(json.dumps(values))
    code = (
        "from py_kvcache.bench import serve\n"
        f"print(serve.main(['--config', {str(tmp_path / 'settings.json')!r}, '--rounds', '1']))\n"
    )
    assert run_python(code, vllm=False, blocked=("typer", "rich", "click", "vllm", "torch")).endswith("2\n")


def test_settings_are_frozen(settings):
    with pytest.raises(AttributeError):
        settings().rounds = 5
    assert isinstance(settings(), ServeConfig)
