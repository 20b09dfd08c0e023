"""Relay: a band of layers computed in full, then the rows that deviate or matter. https://arxiv.org/abs/2603.13289."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.errors import UsageError
from kvbaton.selectors.base import LayerView, Need, ReusedRows, Selection
from kvbaton.selectors.budget import best, check_share, rows_of

STORAGE_NOISE = 1e-5
"""1 - cosine that rounding to bfloat16 alone can make: no deviation."""


@dataclass(frozen=True)
class Relay:
    """Three zones of layers, as RelayCaching repairs a relayed text:

        0 ... first | first ... detect | detect+1 ... last | last+1 ...
        reuse       | every row        | chosen rows       | reuse

    After ``detect`` a row is chosen if its value deviates (1 - cosine over all KV heads) by at least ``tau_dev`` times
    the mean, or if the last ``queries`` prompt rows attend to it by at least ``tau_inf`` times the mean: the budget is
    an outcome. With ``share`` the budget is met exactly, by the larger of the two ratios. ``last=None``: the model's
    last layer. Rows enter at ``first`` from hidden states that the source kept; ``first=0`` needs none (the
    dense-shallow ablation).
    """

    first: int = 1
    detect: int = 5
    last: int | None = None
    tau_dev: float = 1.5
    tau_inf: float = 1.45
    queries: int = 10
    share: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.detect or (self.last is not None and self.last < self.detect):
            raise UsageError(f"Relay needs 0 <= first <= detect <= last, got {self.first}, {self.detect}, {self.last}")
        if self.queries < 1:
            raise UsageError(f"Relay needs at least one query, got {self.queries}")
        if self.share is not None:
            check_share(self.share)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.QUERY_ATTENTION, *([Need.HIDDEN_AT_ENTRY] if self.first else [])})

    @property
    def entry(self) -> int | None:
        return self.first or None

    def begin(self, reused: ReusedRows) -> Selection:
        last = reused.layers - 1 if self.last is None else self.last
        if not self.detect <= last < reused.layers:
            raise UsageError(f"Relay's layers {self.first}, {self.detect}, {last} do not fit a model whose last layer "
                             f"is {reused.layers - 1}: set selector.first, selector.detect and selector.last")
        return _Zones(self, reused, last, reused.none())

    def choose(self, view: LayerView) -> Tensor:
        """Chosen rows of a layer where every reused row is active."""
        rows = view.compare()
        fresh, held = (x.float().transpose(0, 1).flatten(1) for x in (rows.fresh_v, rows.reused_v))
        deviation = _over_mean(torch.relu(1.0 - torch.cosine_similarity(fresh, held, dim=1) - STORAGE_NOISE))
        influence = _over_mean(view.attention(self.queries).float())
        if self.share is not None:
            return best(torch.maximum(deviation, influence), rows_of(self.share, deviation.numel()))
        return torch.nonzero((deviation >= self.tau_dev) | (influence >= self.tau_inf)).flatten()


def _over_mean(scores: Tensor) -> Tensor:
    """Non-negative scores as multiples of their mean; all zero stays all zero."""
    return scores / scores.mean().clamp(min=torch.finfo(scores.dtype).tiny)


@dataclass
class _Zones:
    rule: Relay
    reused: ReusedRows
    last: int
    chosen: Tensor

    def _at(self, layer: int) -> Tensor:
        if not self.rule.first <= layer <= self.last or self.rule.share == 0.0:
            return self.reused.none()
        return self.reused.all() if layer <= self.rule.detect else self.chosen

    def start(self) -> Tensor:
        return self._at(0)

    def after(self, layer: int, view: LayerView) -> Tensor:
        if layer == self.rule.detect and self.rule.share != 0.0:
            self.chosen = self.rule.choose(view)
        return self._at(layer + 1)
