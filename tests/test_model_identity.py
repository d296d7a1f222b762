"""Which weights and code a model has, told without trusting a name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from py_kvcache.errors import UnsupportedError
from py_kvcache.identity import (
    code_mark,
    foreign_code,
    model_identity,
)


def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, commit: str, file: str) -> None:
    """A hub cache in which ``main`` of the repository is this commit."""
    from huggingface_hub import constants, file_download

    cache = tmp_path / "hub"
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    (repo / "snapshots" / commit / file).write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(file_download, "HF_HUB_CACHE", str(cache), raising=False)


@pytest.mark.parametrize("file", ["config.json", "params.json"])
def test_a_hub_model_is_known_by_the_commit_that_is_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
):
    found = []
    for commit in ("a" * 40, "b" * 40):
        hub(tmp_path, monkeypatch, "org/name", commit, file)
        found.append(model_identity("org/name", None, "auto", 0)["commit"])
    assert found == ["a" * 40, "b" * 40]


def test_an_unknown_commit_is_refused_unless_the_revision_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub(tmp_path, monkeypatch, "org/other", "a" * 40, "config.json")
    with pytest.raises(UnsupportedError, match="--revision as a full commit hash"):
        model_identity("org/name", "main", "auto", 0)
    assert model_identity("org/name", "c" * 40, "auto", 0) == {"commit": "c" * 40}


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="holds no weight files"):
        model_identity(str(tmp_path), None, "auto", 0)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A folder of the hub cache as the hub's client makes it: links to blobs."""
    repository = tmp_path / "models--org--name"
    folder = repository / "snapshots" / ("d" * 40)
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (repository / "blobs" / name).write_bytes(b"x" * 100)
        (folder / name).symlink_to(repository / "blobs" / name)
    return folder


def test_the_hub_caches_own_folder_is_the_same_on_every_node(snapshot: Path):
    before = model_identity(str(snapshot), None, "auto", 0)
    for name in ("config.json", "model.safetensors"):
        os.utime(snapshot / name, ns=(7, 7))
    assert before["commit"] == "d" * 40
    assert model_identity(f"{snapshot}/", None, "auto", 0) == before


def test_it_is_the_same_by_name_and_by_path(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("d" * 40)
    for module in ("constants", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert model_identity("org/name", None, "auto", 0) == model_identity(str(snapshot), None, "auto", 0)


def test_a_file_of_the_cache_that_was_overwritten_through_its_link_is_seen(snapshot: Path):
    before = model_identity(str(snapshot), None, "auto", 0)
    (snapshot / "model.safetensors").write_bytes(b"y" * 100)
    assert (snapshot / "model.safetensors").is_symlink()
    assert model_identity(str(snapshot), None, "auto", 0) != before


def test_what_was_saved_below_a_snapshot_is_known_by_its_bytes(snapshot: Path):
    found = []
    for name in ("checkpoint-500", "checkpoint-1000"):
        (snapshot / name).mkdir()
        (snapshot / name / "model.safetensors").write_bytes(name.encode() * 9)
        found.append(model_identity(str(snapshot / name), None, "auto", 0))
    assert "commit" not in found[0]
    assert found[0] != found[1]


def test_a_file_of_a_snapshot_is_known_by_its_bytes(snapshot: Path):
    for name in ("a.gguf", "b.gguf"):
        (snapshot / name).write_bytes(name.encode() * 100)
    first, second = (model_identity(str(snapshot / name), None, "auto", 0) for name in ("a.gguf", "b.gguf"))
    assert first != second


def test_a_snapshot_that_somebody_edited_is_another(snapshot: Path):
    before = model_identity(str(snapshot), None, "auto", 0)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"y" * 100)
    assert model_identity(str(snapshot), None, "auto", 0) != before


def test_what_is_neither_a_folder_nor_a_hub_name_is_refused():
    with pytest.raises(UnsupportedError, match="neither a local folder nor a hub name"):
        model_identity("s3://bucket/model", None, "runai_streamer", 0)


def test_an_index_without_weights_is_no_weights(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="holds no weight files"):
        model_identity(str(tmp_path), None, "runai_streamer", 0)


def test_a_cache_below_a_folder_named_snapshots_tells_commits_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for commit in ("a" * 40, "b" * 40):
        hub(tmp_path / "snapshots", monkeypatch, "org/name", commit, "config.json")
        found.append(model_identity("org/name", None, "auto", 0)["commit"])
    assert found == ["a" * 40, "b" * 40]


def test_a_hub_model_that_moved_while_the_engine_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub(tmp_path, monkeypatch, "org/name", "b" * 40, "config.json")
    assert model_identity("org/name", None, "auto", 0, "b" * 40)["commit"] == "b" * 40
    with pytest.raises(UnsupportedError, match=r"is of commit aaaa.+its weights of bbbb.+start it again"):
        model_identity("org/name", None, "auto", 0, "a" * 40)


def test_weights_in_a_download_dir_are_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub(tmp_path, monkeypatch, "org/name", "a" * 40, "config.json")
    other = tmp_path / "other"
    hub(other, monkeypatch, "org/name", "b" * 40, "model.safetensors")
    monkeypatch.undo()
    downloads = str(other / "hub")
    found = model_identity("org/name", None, "auto", 0, None, downloads)
    assert found["commit"] == "b" * 40 and found["files"]
    with pytest.raises(UnsupportedError, match="--download-dir holds another version"):
        model_identity("org/name", None, "auto", 0, "a" * 40, downloads)
    assert model_identity("org/name", "b" * 40, "auto", 0, None, downloads) == found
    with pytest.raises(UnsupportedError, match=f"is not in {downloads}"):
        model_identity("org/none", None, "auto", 0, None, downloads)
    with pytest.raises(UnsupportedError, match="neither a local folder nor a hub name"):
        model_identity("s3://bucket/name", None, "auto", 0, None, downloads)


def test_weights_that_come_from_where_nobody_looks_are_refused(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UnsupportedError, match="tensorizer"):
        model_identity(str(snapshot), None, "tensorizer", 0)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(UnsupportedError, match="ModelScope.+use a local folder"):
        model_identity("org/name", "a" * 40, "auto", 0)
    assert model_identity(str(snapshot), None, "auto", 0)["commit"] == "d" * 40


# ---- code


def test_code_in_a_models_folder_counts(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    before = model_identity(str(tmp_path), None, "auto", 0)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "modeling_my.py").write_text("one")
    first = model_identity(str(tmp_path), None, "auto", 0)
    (tmp_path / "parts" / "modeling_my.py").write_text("two")
    assert before != first != model_identity(str(tmp_path), None, "auto", 0)
    assert code_mark(str(tmp_path / "model.safetensors")) == []


def test_code_of_another_repository_is_known_by_its_commit_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = {"auto_map": {"AutoConfig": "org/code--conf.C", "AutoTokenizer": ["own.T", None]}}
    hub(tmp_path, monkeypatch, "org/code", "e" * 40, "conf.py")
    assert foreign_code(config, None) == [["org/code--conf.C", "e" * 40]]
    assert foreign_code(config, "f" * 40) == [["org/code--conf.C", "f" * 40]]
    assert foreign_code({"auto_map": {"AutoConfig": "own.C"}}, None) == foreign_code({}, None) == []
    with pytest.raises(UnsupportedError, match="--code-revision"):
        foreign_code({"auto_map": {"AutoConfig": "org/unknown--conf.C"}}, None)


def test_a_revision_chooses_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for commit in ("a" * 40, "b" * 40):
        hub(tmp_path, monkeypatch, "org/name", commit, "config.json")
    assert model_identity("org/name", "a" * 40, "auto", 0)["commit"] == "a" * 40
