"""Regret: what choosing by a threshold loses against always choosing right."""

from __future__ import annotations

import pytest

from py_kvcache.calibrate.regret import NEAR, Prompt, draw, regret


def test_a_right_threshold_loses_nothing_and_each_constant_what_it_must():
    prompts = [Prompt(100, 1.0, 2.0), Prompt(200, 3.0, 2.0)]
    found = regret(prompts, 200)
    assert found["best_s"] == 3.0 and found["threshold_regret"] == 0.0
    assert found["always_load_regret"] == pytest.approx(1 / 3)
    assert found["never_load_regret"] == pytest.approx(1 / 3)
    assert regret(prompts, 100)["threshold_regret"] == pytest.approx(1 / 3), "equality loads"
    assert regret(prompts, 201)["threshold_s"] == 4.0


@pytest.mark.parametrize(("threshold", "longest"), [(1024, 8192), (100, 8192), (100_000, 8192), (64, 64)])
def test_half_of_the_prompts_lie_near_the_threshold_where_there_are_such(threshold: int, longest: int):
    lengths = draw(threshold, 64, longest, 40)
    assert len(lengths) == 40 and all(64 <= length <= longest and length % 64 == 0 for length in lengths)
    near = [length for length in lengths if abs(length - threshold) <= NEAR * threshold + 32]
    assert len(near) >= 20 or threshold > 2 * longest
    assert (
        lengths == draw(threshold, 64, longest, 40) != draw(threshold, 64, longest, 40, seed=1)
        or longest == 64
    )
