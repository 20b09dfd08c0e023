"""Known values and properties of the paired statistics."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.bench import stats
from kvbaton.errors import UsageError

VALUES = st.lists(st.floats(-100, 100, allow_nan=False), min_size=1, max_size=12)


def test_sign_test_known_values() -> None:
    assert stats.sign_test([1] * 5, [0] * 5) == pytest.approx(2 / 32)
    assert stats.sign_test([1, 0], [0, 1]) == 1.0
    assert stats.sign_test([1, 1, 1], [1, 1, 1]) == 1.0
    # 8 up, 2 down: 2 * (1 + 10 + 45) / 1024
    assert stats.sign_test([1] * 8 + [0] * 2, [0] * 8 + [1] * 2) == pytest.approx(112 / 1024)


def test_interval_of_a_constant_is_a_point() -> None:
    got = stats.mean_interval([2.5] * 7)
    assert (got.value, got.low, got.high, got.n) == (2.5, 2.5, 2.5, 7)


def test_bootstrap_is_near_the_normal_interval() -> None:
    values = [float(i % 10) for i in range(400)]
    got = stats.mean_interval(values, seed=3)
    half = 1.96 * math.sqrt(8.25 / 400)
    assert got.low == pytest.approx(4.5 - half, abs=0.03)
    assert got.high == pytest.approx(4.5 + half, abs=0.03)


def test_pairing_beats_unpaired_spread() -> None:
    base = [float(10 * i) for i in range(30)]
    got = stats.paired_difference([b + 1 for b in base], base)
    assert (got.low, got.high) == (1, 1)
    assert got.excludes_zero


def test_gain_ratio_known_and_undefined() -> None:
    assert stats.gain_ratio([3.0, 3.0], [4.0, 4.0], [2.0, 2.0]).value == pytest.approx(0.5)
    assert stats.gain_ratio([1.0], [2.0], [3.0]).value == pytest.approx(2.0)
    assert math.isnan(stats.gain_ratio([1.0], [2.0], [2.0005]).value)


def test_ratio_of_means() -> None:
    got = stats.ratio_of_means([1.0, 3.0], [4.0, 4.0])
    assert got.value == 0.5
    assert 0.25 <= got.low <= got.high <= 0.75
    assert math.isnan(stats.ratio_of_means([1.0], [0.0]).value)


def test_agreement_counts_invalid_as_disagreement() -> None:
    assert stats.agreement(["A", None, "B", None], ["A", None, "C", "D"]) == 0.25


@pytest.mark.parametrize("call", [
    lambda: stats.mean_interval([]), lambda: stats.paired_difference([1], [1, 2]), lambda: stats.agreement([], []),
    lambda: stats.sign_test([1], []), lambda: stats.gain_ratio([1], [1], []), lambda: stats.ratio_of_means([1], []),
])
def test_unpaired_or_empty_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        call()


@settings(max_examples=25, deadline=None)
@given(VALUES, st.integers(0, 5))
def test_interval_is_seeded_and_inside_the_range(values: list[float], seed: int) -> None:
    got = stats.mean_interval(values, seed)
    assert got == stats.mean_interval(values, seed)
    assert min(values) - 1e-9 <= got.low <= got.high <= max(values) + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_sign_test_is_symmetric(pairs: list[tuple[int, int]]) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    assert stats.sign_test(a, b) == stats.sign_test(b, a)
    assert 0 < stats.sign_test(a, b) <= 1
