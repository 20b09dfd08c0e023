"""NoCorrection: reuse as it is, the corrector of every method that corrects nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvbaton.correctors.base import Correction, EdgeState, as_is, no_reveal
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place


@dataclass
class NoState:
    """State of a corrector that learns nothing."""

    nbytes: int = 0
    texts: int = 0

    def merge(self, other: Any) -> None: ...

    def to_tensors(self) -> Mapping[str, Tensor]:
        return {}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...

    def check(self) -> None: ...


@dataclass(frozen=True)
class NoCorrection:
    """Position-aligned reuse: the source as it is."""

    learns: ClassVar[bool] = False
    needs_truth: ClassVar[bool] = False

    def new_state(self, geometry: Geometry) -> EdgeState:
        return NoState()

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        return False

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        return as_is(source)

    def learn(self, state: EdgeState, source: KV, target: KV) -> None: ...

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        return no_reveal(truth, source)
