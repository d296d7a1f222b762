"""thresholds.json is small, is read back, and says how far off it is."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from py_kvcache.calibrate.fit import fit
from py_kvcache.calibrate.thin import (
    MOST_BYTES,
    curve_error,
    table_error,
    thin_curve,
    thin_table,
    to_thresholds,
)
from py_kvcache.curves import Curve
from py_kvcache.models import read_thresholds
from py_kvcache.scheduler.policy import threshold_for


def test_what_is_written_is_read_and_answers_as_the_fit(made: Any, tmp_path: Path):
    found = fit(made.calibration())
    compact = to_thresholds(found, (), {"by": "test"})
    (tmp_path / "t").write_text(compact.text)
    read = read_thresholds(str(tmp_path / "t"))
    assert read == compact.thresholds
    assert read.exact == {one.source: one.exact for one in found.tiers}
    for one in found.tiers:
        for prompt, least in one.frontier:
            said = threshold_for(read.thresholds[one.source], prompt)
            true = found.never if least is None else least
            assert abs(said - true) / true <= compact.table_errors[one.source] + 1e-9
    curve = read.curve()
    assert curve is not None and curve(8192) == pytest.approx(made.computing(8192), rel=1e-3)


def test_no_hit_reaches_the_threshold_of_a_prompt_that_never_pays(made: Any):
    found = fit(made.calibration())
    table = to_thresholds(found).thresholds.thresholds["disk"]
    disk = found.tiers[0]
    shortest = min(prompt for prompt, least in disk.frontier if least is not None)
    for prompt, _ in disk.frontier:
        if prompt < shortest:
            assert threshold_for(table, prompt) > prompt


@pytest.mark.parametrize("seed", range(25))
def test_whatever_was_measured_it_has_at_most_1024_bytes(made: Any, seed: int):
    generator = random.Random(seed)
    sets = []
    for concurrency in generator.sample(range(1, 1000), generator.randint(1, 8)):
        lengths = tuple(sorted(generator.sample(range(16, 60_000), generator.randint(2, 20))))
        samples = []
        for kind in ("compute", "disk", "memory"):
            exponent, scale = generator.uniform(0.5, 2), generator.uniform(1e-9, 1e-3)
            samples += made.samples(kind, lambda n, e=exponent, s=scale: s * n**e, rounds=1, lengths=lengths)
        sets.append({"concurrency": concurrency, "samples": samples})
    calibration = made.calibration(sets=sets, longest=10_000_000, engine="f" * 16)
    first, *others = (fit(calibration, one.concurrency) for one in calibration.sets)
    compact = to_thresholds(first, others, {"at": "2026-11-30T21:00:00", "by": "x" * 40})
    assert len(compact.text.encode()) < MOST_BYTES
    assert len(compact.thresholds.prefill) <= 12
    assert all(len(table) <= 8 for table in compact.thresholds.thresholds.values())
    assert len(compact.thresholds.under_load) + len(compact.left_out) == len(others)


def test_what_finds_no_room_is_said(made: Any):
    samples = made.content()["sets"][0]["samples"]
    sets = [{"concurrency": n, "samples": samples} for n in range(1, 12)]
    calibration = made.calibration(sets=sets)
    first, *others = (fit(calibration, n) for n in range(1, 12))
    compact = to_thresholds(first, others)
    assert compact.thresholds.under_load and compact.left_out
    assert compact.thresholds.under_load[0].concurrency == 2


def test_a_thinned_curve_keeps_its_ends_and_the_knots_that_matter():
    curve = Curve.of([(n * 100, 1.0 if n < 7 else n - 5.0) for n in range(1, 12)])
    knots = thin_curve(curve, 4)
    assert knots[0] == (100, 1.0) and knots[-1] == (1100, 6.0) and len(knots) == 4
    assert curve_error(curve, Curve.of(knots)) < curve_error(curve, Curve.of([knots[0], knots[-1]]))
    assert curve_error(curve, Curve.of(thin_curve(curve, 11))) == pytest.approx(0, abs=1e-9)


def test_seconds_have_four_digits():
    assert thin_curve(Curve.of([(1, 0.0123456), (2, 1.23456)]), 2) == ((1, 0.01235), (2, 1.235))


@pytest.mark.parametrize("seed", range(10))
def test_no_other_choice_of_entries_is_nearer(seed: int):
    generator = random.Random(seed)
    table = tuple((10 * (n + 1), generator.randint(1, 50)) for n in range(8))
    for most in (1, 2, 3, 4):
        choices = [
            (*some, table[-1]) for count in range(most) for some in combinations(table[:-1], count)
        ]  # fmt: skip
        thin = thin_table(table, most)
        assert len(thin) <= most
        assert table_error(table, thin) == min(table_error(table, choice) for choice in choices)


def test_a_table_whose_entries_agree_becomes_one():
    assert thin_table(((10, 5), (20, 5), (30, 5)), 8) == ((30, 5),)
