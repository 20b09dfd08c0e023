"""Oracle: adds the true offset, optionally cut to a rank. The upper bound of every corrector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbaton.correctors.base import Correction, EdgeState
from kvbaton.correctors.none import NoState
from kvbaton.errors import InvariantError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.lowrank import LowRank
from kvbaton.prompt import Place


@dataclass
class Truth(NoState):
    """The true KV of one text as its reader computes it."""

    kv: KV | None = None


@dataclass(frozen=True)
class Oracle:
    """``rank``: of the offset ``[T, H*D]`` of a layer, keys and values apart; None: the truth itself."""

    rank: int | None = None
    learns: ClassVar[bool] = False
    needs_truth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise UsageError(f"Oracle needs rank None (full) or 1 and more, got {self.rank}")

    def new_state(self, geometry: Geometry) -> EdgeState:
        return Truth()

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        return isinstance(state, Truth) and state.kv is not None

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        assert isinstance(state, Truth)
        truth = state.kv
        assert truth is not None
        return lambda layer: (self._cut(source.k[layer], truth.k[layer]), self._cut(source.v[layer], truth.v[layer]))

    def learn(self, state: EdgeState, source: KV, target: KV) -> None:
        """Learns nothing: it is told."""

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        if truth.k.shape != source.k.shape:
            raise InvariantError(f"truth {tuple(truth.k.shape)} and source {tuple(source.k.shape)} are not of one text")
        return Truth(kv=truth)

    def _cut(self, source: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """``[H, T, D]``: ``source`` plus the offset to ``truth``, cut to the rank."""
        if self.rank is None:
            return truth
        heads, tokens, dim = source.shape
        offset = (truth.float() - source.float()).transpose(0, 1).reshape(tokens, heads * dim)
        cut = LowRank.fit(offset, self.rank).dense().view(tokens, heads, dim).transpose(0, 1)
        return (source.float() + cut).to(source.dtype)
