"""Paired statistics over questions: bootstrap intervals, exact sign test, agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.errors import UsageError

DRAWS = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value and its bootstrap interval. ``n``: questions behind it."""

    value: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def _draws(n: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, n, size=(DRAWS, n))


def _array(values: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    out = np.asarray(values, dtype=np.float64)
    if out.size == 0:
        raise UsageError("no values: nothing was measured for this comparison")
    return out


def _interval(value: float, drawn: np.ndarray[tuple[int, ...], np.dtype[np.float64]], n: int) -> Interval:
    finite = drawn[np.isfinite(drawn)]
    if finite.size == 0:
        return Interval(value, math.nan, math.nan, n)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(finite, [tail, 1 - tail])
    return Interval(value, float(low), float(high), n)


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Mean over questions with its bootstrap interval."""
    x = _array(values)
    return _interval(float(x.mean()), x[_draws(x.size, seed)].mean(axis=1), x.size)


def paired_difference(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval:
    """Mean of ``a - b`` over the same questions, questions drawn with replacement."""
    if len(a) != len(b):
        raise UsageError(f"a paired comparison needs the same questions on both sides, got {len(a)} and {len(b)}")
    return mean_interval([x - y for x, y in zip(a, b, strict=True)], seed)


def ratio_of_means(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval:
    """``mean(a) / mean(b)`` over the same questions; nan where ``b`` is 0. Recovered quality is 1 minus this."""
    if len(a) != len(b):
        raise UsageError(f"a paired ratio needs the same questions on both sides, got {len(a)} and {len(b)}")
    x, y = _array(a), _array(b)
    pick = _draws(x.size, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = x[pick].mean(axis=1) / y[pick].mean(axis=1)
    value = float(x.mean() / y.mean()) if y.mean() else math.nan
    return _interval(value, drawn, x.size)


def gain_ratio(score: Sequence[float], dense: Sequence[float], floor: Sequence[float], seed: int = 0) -> Interval:
    """PGR: (score - floor) / (dense - floor), of means over the same questions. nan at a gap of 1e-3 or less.

    For a loss such as NLL the signs cancel, so the same call serves. Not clipped: below 0 is worse than no context.
    """
    if not len(score) == len(dense) == len(floor):
        raise UsageError("PGR needs the same questions for the method, dense and the floor")
    s, d, f = _array(score), _array(dense), _array(floor)
    if abs(d.mean() - f.mean()) <= 1e-3:
        return Interval(math.nan, math.nan, math.nan, s.size)
    pick = _draws(s.size, seed)
    base = f[pick].mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (s[pick].mean(axis=1) - base) / (d[pick].mean(axis=1) - base)
    return _interval(float((s.mean() - f.mean()) / (d.mean() - f.mean())), drawn, s.size)


def sign_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided exact sign test on paired values; ties say nothing and are left out. 1.0 if all are ties."""
    if len(a) != len(b):
        raise UsageError("the sign test needs the same questions on both sides")
    up = sum(x > y for x, y in zip(a, b, strict=True))
    down = sum(x < y for x, y in zip(a, b, strict=True))
    n = up + down
    tail = sum(math.comb(n, k) for k in range(min(up, down) + 1)) / 2**n
    return float(min(1.0, 2 * tail))


def median(values: Sequence[float]) -> float:
    return float(np.median(_array(values)))


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1), interpolated."""
    return float(np.quantile(_array(values), q))


def agreement(a: Sequence[object], b: Sequence[object]) -> float:
    """Share of questions on which both sides chose the same thing; None (no valid choice) agrees with nothing."""
    if len(a) != len(b) or not a:
        raise UsageError("agreement needs the same, non-empty questions on both sides")
    return sum(x is not None and x == y for x, y in zip(a, b, strict=True)) / len(a)
