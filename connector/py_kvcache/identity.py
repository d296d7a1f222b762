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
    model: str, revision: str | None, load_format: str, seed: int, config_commit: str | None = None
) -> dict[str, Any]:
    """Which weights these are: a commit, or the marks of local files; dummy weights come from a seed.

    Args:
        model, revision, load_format, seed: as vLLM has them.
        config_commit: the commit that transformers read the model's configuration from, if it knows.

    Raises:
        UnsupportedError: nothing here tells one version of the weights from another.
        OSError: a local file cannot be read.
    """
    if load_format == "dummy":
        return {"dummy_seed": seed}
    if os.path.exists(model):
        # Offline, vLLM is given the hub cache's own folder; its commit is the same on every node, the
        # times of its files are not. What somebody saved below it has no commit.
        snapshot = _SNAPSHOT.search(os.path.abspath(model))
        if snapshot is not None and not snapshot["rest"]:
            found = _at_commit(snapshot["commit"], model)
            if found["files"]:
                return found
        if marks := weights_mark(model):
            return {"files": marks, "code": code_mark(model)}
        raise UnsupportedError(
            f"{model} holds no weight files ({', '.join(SHARD_ENDINGS)}), so a change of the weights would "
            "go unseen; use a local copy or a hub name"
        )
    try:
        commit, folder = _snapshot_of(model, revision, "config.json", "params.json") or (None, "")
    except ValueError:
        raise UnsupportedError(
            f"{model} is neither a local folder nor a hub name, so a change of the weights would go unseen; "
            "use one of these"
        ) from None
    if commit is None and _COMMIT.fullmatch(revision or ""):
        commit = revision
    if commit is None:
        raise UnsupportedError(
            f"the commit of {model} is not in the local hub cache, so a change of the weights would go "
            "unseen; give --revision as a full commit hash, or use a local folder"
        )
    if config_commit not in (None, commit):
        raise UnsupportedError(
            f"{model} moved from commit {config_commit} to {commit} while the engine started, so nobody "
            "knows which weights it has; start it again, or give --revision as a full commit hash"
        )
    return _at_commit(commit, folder)


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
