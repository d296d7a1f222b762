"""Documents promise what the code has: settings, metrics, targets, files, log lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from py_kvcache import metrics
from py_kvcache.config import Config

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
README = (REPOSITORY / "README.md").read_text()
OPERATIONS = (REPOSITORY / "docs" / "operations.md").read_text()
# How a default is written in the table where repr() is not how a person writes it.
WRITTEN = {True: "on", False: "off"}
COMPUTED = {
    "staging_bytes": "`io_depth` + `copy_headroom` slots",
    "preload_bytes": "a third of `memory_bytes`",
}


def written(key: str) -> str:
    default = Config.model_fields[key].default
    if key.endswith("_mode"):
        return f"0{default:o}"
    if default is None:
        return COMPUTED[key]
    if isinstance(default, bool):
        return WRITTEN[default]
    if isinstance(default, float):
        return f"{default:.2f}" if default < 1 else f"{default:g}"
    return str(default)


def test_the_settings_table_has_every_key_with_its_default_and_no_other():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", README.partition("## Settings")[2], re.MULTILINE))
    assert rows.pop("root") == ""
    assert rows == {key: written(key) for key in Config.model_fields if key != "root"}


def test_the_metrics_table_has_every_metric_with_its_labels_and_no_other():
    listed = {}
    for names, labels in re.findall(r"^\| (`[^|]*`) \| ([^|]*?) ?\|", OPERATIONS, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            listed[metrics.PREFIX + name] = tuple(re.findall(r"\w+", labels))
    assert listed == {metric.name: metric.labels for metric in metrics.ALL}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_in_documents_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_in_documents_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^    |`)make ([a-z-]+)", document.read_text(), re.MULTILINE)
    assert set(named) <= targets


def test_what_troubleshooting_says_is_logged_stands_in_the_code():
    code = " ".join(
        re.sub(r'"\s+f?"', "", path.read_text())  # a sentence over several lines
        for path in (REPOSITORY / "connector").rglob("*.py")
    )
    code = re.sub(r"\{[^}]*\}|%[sd]|%\.0f|\\\"", "...", code)
    guide = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^(?:\| |- )`([^`]+)`", guide, re.MULTILINE)
    assert len(quoted) > 10
    for sentence in quoted:
        for piece in re.split(r"\.\.\.|\bN\b|\d+%?|cuda|\"root\"", sentence):
            assert piece.strip(" ;:()") in code, (sentence, piece)
