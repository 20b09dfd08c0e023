"""Formulas of the cost check, and that it charges what ran."""

from __future__ import annotations

import pytest

from kvbaton.bench.cost import selective_cost, shared_flops
from kvbaton.errors import UsageError
from kvbaton.overrides import override
from kvbaton.recipes import recipe
from tiny import engine


def test_flops_of_rows_are_weights_and_keys() -> None:
    tiny = engine("llama")
    weights = 64 * 64 * 2 + 64 * 16 * 2 + 3 * 64 * 96
    assert shared_flops(tiny, [10, 0, 0, 0], 100) == 10 * (2 * weights + 4 * 100 * 64)


def test_predictions_are_the_specs_and_pages_cost_far_more() -> None:
    methods = [override(recipe("cacheblend"), "selector.share=0.1"), override(recipe("random"), "selector.share=0.1")]
    blend, random = selective_cost(engine("llama"), methods, tokens=160, repeats=1)
    assert blend.rows_per_layer == (160, 160, 16, 16)
    assert blend.predicted == pytest.approx((2 + 0.1 * 2) / 4)
    assert random.predicted == pytest.approx(0.1)
    assert random.page_rounded == pytest.approx(0.815, abs=1e-3), "what a page-rounded simulation charges for 10 %"
    assert blend.dense_seconds > 0


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(UsageError):
        selective_cost(engine("llama"), [], tokens=8)
