"""Small corrector and KV for tests of what surrounds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbaton.correctors.base import Correction
from kvbaton.errors import InvariantError, StoreError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

GEOMETRY = Geometry(3, 2, 4, torch.float32)


def kv(tokens: int, seed: int, geometry: Geometry = GEOMETRY, scale: float = 1.0, source: str = "a") -> KV:
    """Random keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.layers, geometry.kv_heads, tokens, geometry.head_dim)
    k, v = (scale * torch.randn(shape, generator=generator) for _ in range(2))
    return KV(k.to(geometry.dtype), v.to(geometry.dtype), start=0, source=source, exact=True)


def shifted(source: KV, offset: KV) -> KV:
    """``source`` plus ``offset``, layer 0 left as it is: what a reader computes."""
    k, v = source.k.clone(), source.v.clone()
    k[1:] += offset.k[1:]
    v[1:] += offset.v[1:]
    return KV(k, v, start=7, source="b", exact=True)


@dataclass
class SumState:
    """Sum of the offsets' token means ``[2, L, H, D]``, texts seen, and padding that gives it a chosen size."""

    total: Tensor
    padding: Tensor
    seen: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + self.padding.nbytes + self.seen.nbytes

    @property
    def texts(self) -> int:
        return int(self.seen)

    def merge(self, other: Any) -> None:
        self.total, self.seen = self.total + other.total, self.seen + other.seen

    def to_tensors(self) -> Mapping[str, Tensor]:
        return {"total": self.total, "seen": self.seen, "padding": self.padding}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != {"total", "seen", "padding"} or tensors["total"].shape != self.total.shape:
            raise StoreError("total, seen or padding is missing or has a wrong shape")
        self.total, self.seen, self.padding = tensors["total"], tensors["seen"], tensors["padding"]

    def check(self) -> None:
        if self.texts < 0:
            raise InvariantError("texts are negative")


@dataclass(frozen=True)
class MeanOffset:
    """Adds the mean offset of the edge."""

    padding: int = 0
    learns: ClassVar[bool] = True
    needs_truth: ClassVar[bool] = False

    def new_state(self, geometry: Geometry) -> SumState:
        shape = (2, geometry.layers, geometry.kv_heads, geometry.head_dim)
        return SumState(torch.zeros(shape), torch.zeros(self.padding, dtype=torch.uint8))

    def can_correct(self, state: Any, source: KV) -> bool:
        return state is not None and state.texts > 0

    def correct(self, state: Any, source: KV, place: Place) -> Correction:
        k, v = (state.total / state.texts)[..., None, :]
        return lambda layer: (source.k[layer] + k[layer], source.v[layer] + v[layer])

    def learn(self, state: Any, source: KV, target: KV) -> None:
        offsets = torch.stack((target.k - source.k, target.v - source.v)).mean(-2)
        state.total, state.seen = state.total + offsets, state.seen + 1
