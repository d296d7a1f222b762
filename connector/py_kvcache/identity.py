"""Which weights and code a model has: a hub commit, or what the local files say.

Names say nothing: the same name or path holds other weights tomorrow.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from py_kvcache.errors import UnsupportedError
from py_kvcache.weights import SHARD_ENDINGS, content_mark, weights_mark

_COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile("models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?P<rest>(?:/.*)?)$")
# vLLM loads these into every process; what they change in a model, nobody says.
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")


def digest(fields: Mapping[str, Any]) -> str:
    """First 16 hex digits of sha256 over the fields as sorted JSON."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _snapshot_of(name: str, revision: str | None, *files: str) -> tuple[str, str] | None:
    """Commit and folder behind a hub name, from the local hub cache, where vLLM itself found the model.

    Raises:
        ValueError: not a hub name.
    """
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        found = try_to_load_from_cache(name, file, revision=revision)
        snapshot = _SNAPSHOT.search(found) if isinstance(found, str) else None
        if snapshot is not None and snapshot["repo"] == name.replace("/", "--"):
            return snapshot["commit"], str(found).removesuffix(file)
    return None


def _snapshot_below(cache: str, name: str, revision: str | None) -> tuple[str, str] | None:
    """The same in another folder, where the weights alone are (--download-dir). Raises OSError, too."""
    from huggingface_hub import try_to_load_from_cache

    try_to_load_from_cache(name, "config.json", cache_dir=cache)  # raises ValueError for what is no name
    repository = os.path.join(cache, f"models--{name.replace('/', '--')}")
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            with open(os.path.join(repository, "refs", commit), encoding="utf-8") as file:
                commit = file.read().strip()
        except FileNotFoundError:
            return None
    folder = os.path.join(repository, "snapshots", commit, "")
    return (commit, folder) if _COMMIT.fullmatch(commit) and os.path.isdir(folder) else None


def _commit_of(name: str, revision: str | None, *files: str) -> str | None:
    found = _snapshot_of(name, revision, *files)
    return None if found is None else found[0]


def _at_commit(commit: str, folder: str) -> dict[str, Any]:
    """A commit, and what lies there: a file of the cache that is overwritten stays the link that it was.

    Without times, which differ from node to node.
    """
    if not folder:
        return {"commit": commit}
    return {"commit": commit, "files": weights_mark(folder, times=False), "code": code_mark(folder)}


def model_identity(
    model: str,
    revision: str | None,
    load_format: str,
    seed: int,
    config_commit: str | None = None,
    download_dir: str | None = None,
) -> dict[str, Any]:
    """Which weights these are: a commit, or the marks of local files; dummy weights come from a seed.

    Args:
        model, revision, load_format, seed, download_dir: as vLLM has them.
        config_commit: the commit that transformers read the model's configuration from, if it knows.

    Raises:
        UnsupportedError: nothing here tells one version of the weights from another.
        OSError: a local file cannot be read.
    """
    if load_format == "dummy":
        return {"dummy_seed": seed}
    if load_format == "tensorizer":
        raise UnsupportedError(
            "load_format tensorizer takes the weights from elsewhere than the model's folder, so a change of "
            "them would go unseen; use another load format"
        )
    if os.path.exists(model):
        return _local_identity(model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnsupportedError(
            f"VLLM_USE_MODELSCOPE takes {model} from ModelScope, whose versions are not known here; use a "
            "local folder"
        )
    try:
        if download_dir:
            found = _snapshot_below(download_dir, model, revision)
        else:
            found = _snapshot_of(model, revision, "config.json", "params.json")
        commit, folder = found or (None, "")
    except ValueError:
        raise UnsupportedError(
            f"{model} is neither a local folder nor a hub name, so a change of the weights would go unseen; "
            "use one of these"
        ) from None
    if commit is None and _COMMIT.fullmatch(revision or ""):
        commit = revision
    if commit is None:
        where = download_dir or "the local hub cache"
        raise UnsupportedError(
            f"the commit of {model} is not in {where}, so a change of the weights would go "
            "unseen; give --revision as a full commit hash, or use a local folder"
        )
    if config_commit not in (None, commit):
        raise UnsupportedError(
            f"the configuration of {model} is of commit {config_commit}, its weights of {commit}: it moved "
            "while the engine started, or --download-dir holds another version, so nobody knows what it "
            "computes; start it again, or give --revision as a full commit hash"
        )
    return _at_commit(commit, folder)


def _local_identity(model: str) -> dict[str, Any]:
    # Offline, vLLM is given the hub cache's own folder; its commit is the same on every node, the
    # times of its files are not. What somebody saved below it has no commit.
    snapshot = _SNAPSHOT.search(os.path.abspath(model))
    if snapshot is not None and not snapshot["rest"]:
        identity = _at_commit(snapshot["commit"], model)
        if identity["files"]:
            return identity
    if marks := weights_mark(model):
        return {"files": marks, "code": code_mark(model)}
    raise UnsupportedError(
        f"{model} holds no weight files ({', '.join(SHARD_ENDINGS)}), so a change of the weights would "
        "go unseen; use a local copy or a hub name"
    )


def refuse_parts_from_elsewhere(hf_config: Any) -> None:
    """Raise UnsupportedError for a model (Ultravox) that takes some of its weights from other models."""
    for name in ("text_model_id", "audio_model_id"):
        other = getattr(hf_config, name, None)
        if other:
            raise UnsupportedError(
                f"the model takes weights from {other} ({name}), so a change of them would go unseen; it is "
                "not supported yet"
            )


def code_mark(folder: str) -> list[list[str]]:
    """Content of the Python files in a model's folder: with --trust-remote-code they compute the blocks."""
    if not os.path.isdir(folder):
        return []
    paths = sorted(glob.glob("**/*.py", root_dir=folder, recursive=True))
    return [[path, content_mark(os.path.join(folder, path))] for path in paths]


def foreign_code(hf_config: Mapping[str, Any], revision: str | None) -> list[list[str]]:
    """Commits of other hub repositories that the model's code comes from (auto_map "org/name--module.Class").

    Raises:
        UnsupportedError: no commit is known for one.
    """
    auto_map = hf_config.get("auto_map") or {}
    targets = auto_map.values() if isinstance(auto_map, Mapping) else ()
    # A tokenizer has a list of classes.
    names = {
        str(one) for value in targets for one in (value if isinstance(value, (list, tuple)) else [value])
    }
    found = []
    for name in sorted(names):
        repository, separator, target = name.partition("--")
        if not separator:
            continue
        commit = revision if _COMMIT.fullmatch(revision or "") else None
        commit = commit or _commit_of(repository, revision, target.split(".")[0] + ".py")
        if commit is None:
            raise UnsupportedError(
                f"the model's code comes from {repository}, and no commit of it is in the local hub cache; "
                "give --code-revision as a full commit hash"
            )
        found.append([name, commit])
    return found


def software() -> dict[str, Any]:
    """Versions of what computes the blocks beside vLLM itself: transformers, and vLLM's plugins."""
    points = [point for group in _PLUGINS for point in metadata.entry_points(group=group)]
    plugins = {f"{p.name} {p.dist.name} {p.dist.version}" if p.dist else p.value for p in points}
    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = ""
    return {
        "transformers": transformers,
        "plugins": sorted(plugins),
        "chosen": os.environ.get("VLLM_PLUGINS"),
    }


def display_name(model: str) -> str:
    """Name of the model for people, in folder names: no local path, no bare commit hash."""
    snapshot = _SNAPSHOT.search(model.rstrip("/"))
    if snapshot is not None and not snapshot["rest"]:
        return snapshot["repo"].replace("--", "/")
    return os.path.basename(model.rstrip("/")) if os.path.isabs(model) or os.path.exists(model) else model
