"""Deviation: the rows whose KV changed most, seen in an early layer. CacheBlend, https://arxiv.org/abs/2405.16444."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch import Tensor

from kvbaton.errors import UsageError
from kvbaton.selectors.base import Fixed, LayerView, Need, ReusedRows, Selection
from kvbaton.selectors.budget import best, check_share, rows_of


class Measure(Enum):
    """What is compared at a check layer; squared L2 over KV heads and channels, not normalised."""

    VALUE = "value"
    """Values, as CacheBlend's reference code."""
    KEY = "key"
    """Keys, as LMCache; a rotation changes no distance, so unrotated keys give the same ranking."""

    def distance(self, view: LayerView) -> Tensor:
        """``[A]`` distance of every active row from its reused KV."""
        rows = view.compare()
        fresh, reused = (rows.fresh_v, rows.reused_v) if self is Measure.VALUE else (rows.fresh_k, rows.reused_k)
        return (fresh.float() - reused.float()).square().sum(dim=(0, 2))


@dataclass(frozen=True)
class Deviation:
    """Compute all reused rows up to ``check_layer``, then only the ``share`` that deviates most there.

    ``gradual`` above 1 is the paper's gradual filtering: each later layer re-selects among its rows by its own
    deviation, from ``gradual * share`` rows (at most all) down by equal steps, on average ``share`` a layer.
    A share of 0 checks nothing and computes no row.
    """

    share: float = 0.15
    check_layer: int = 1
    measure: Measure = Measure.VALUE
    gradual: float = 1.0
    needs: ClassVar[frozenset[Need]] = frozenset()
    entry: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_share(self.share)
        if self.check_layer < 0:
            raise UsageError(f"check_layer must be 0 or more, got {self.check_layer}")
        if not 1.0 <= self.gradual <= 2.0:
            raise UsageError(f"gradual goes from 1 (one selection) to 2, got {self.gradual}")

    def begin(self, reused: ReusedRows) -> Selection:
        if rows_of(self.share, len(reused)) == 0:
            return Fixed(reused.none())
        if self.check_layer >= reused.layers:
            raise UsageError(f"check_layer {self.check_layer} is beyond the model's last layer {reused.layers - 1}")
        return _Filter(self, reused, reused.all())

    def share_at(self, layer: int, layers: int) -> float:
        """Share of rows active at ``layer`` above the check layer."""
        steps = layers - self.check_layer - 2
        slope = 1.0 - 2.0 * (layer - self.check_layer - 1) / steps if steps > 0 else 0.0
        gradual = min(self.gradual, 1.0 / self.share)
        return self.share * (1.0 + (gradual - 1.0) * slope)


@dataclass
class _Filter:
    rule: Deviation
    reused: ReusedRows
    rows: Tensor

    def start(self) -> Tensor:
        return self.rows

    def after(self, layer: int, view: LayerView) -> Tensor:
        layers = self.reused.layers
        if layer < self.rule.check_layer or layer + 1 >= layers:
            return self.rows
        count = rows_of(self.rule.share_at(layer + 1, layers), len(self.reused))
        if count < self.rows.numel():
            self.rows = self.rows[best(self.rule.measure.distance(view), count)]
        return self.rows
