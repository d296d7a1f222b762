"""docs/faults.md names tests that exist, and leaves out no report that we know of."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAULTS, _, BEHAVIOURS = (
    (TESTS.parent / "docs" / "faults.md").read_text().partition("## Behaviours that the authors")
)

REPORTS = {
    "vLLM": """39732 52838 49176 49328 55297 49829 50031 50045 53485 54363 49118 52170 52211 50687 50388 45497
        47812 49250 34484 49252 53298 50696 47282 45704 48596 31341 29870 46014 55191 55904 55907 51875 45387
        45388 57841 57104 53868 43674 44016 49734 52678 53133 46713 46559 45765 45659 51439 56425 51080 51081
        54327 52784 54779""",
    "llm-d": "514 457 512 286 721 218",
    "LMCache": "1139 2136 4364 4386 4388 4375 1824 1522 4991 2951",
    "TensorRT-LLM": "17429 17773",
    "SGLang": "33268 35484 28653 9927 26886 12092 31108 31881",
    "Mooncake": "2348 2719 2156",
    "riffle": "608",
    "pegaflow": "120",
    "libuv": "4004",
    "dynamo": "15079",
    "moby": "39396 46762",
    "liburing": "1078 948 365 498",
    "for-mac": "7707",
    "openzfs": "18610 18844 16598",
    "seastar": "3518",
    "node": "57047",
    "directio": "9",
}


def rows(text: str) -> list[list[str]]:
    """Cells of each row of the table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def cited(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py::\w+)`", text)


@cache
def names_in(file: str) -> set[str]:
    """Names that pytest collects at the top of a file; without importing it."""
    names: list[str] = []
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):  # hypothesis's machines
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return {name for name in names if name.startswith(("test_", "Test"))}


@pytest.mark.parametrize("test", sorted({*cited(FAULTS), *cited(BEHAVIOURS)}))
def test_every_test_that_the_table_names_exists(test: str):
    file, _, name = test.partition("::")
    assert (TESTS / file).is_file(), file
    assert name in names_in(file)


def test_nothing_in_the_column_of_tests_has_another_form():
    """Else a misspelt one would be looked for by nobody."""
    for row in [*rows(FAULTS), *rows(BEHAVIOURS)]:
        assert cited(row[-1]) == re.findall(r"`([^`]*)`", row[-1])


def test_every_known_report_has_its_row_and_no_row_has_others():
    named = [
        (project, number)
        for row in rows(FAULTS)
        for part in row[1].split(";")
        for project, numbers in [part.split(maxsplit=1)]
        for number in re.findall(r"#(\d+)", numbers)
    ]
    known = {(project, number) for project, numbers in REPORTS.items() for number in numbers.split()}
    assert set(named) == known
    assert len(named) == len(known), "each report once"


def test_every_fault_has_a_test_and_every_behaviour_a_test_or_a_later_step():
    faults, behaviours = rows(FAULTS), rows(BEHAVIOURS)
    assert len(faults) == 41
    assert [row for row in faults if len(row) != 4 or not cited(row[3])] == []
    assert len(behaviours) > 10
    assert [row for row in behaviours if not cited(row[1]) and not re.search(r"\*step \d\*", row[1])] == []
