"""Residuals: the exact offset, stored per exact relation. GraphFlow, https://arxiv.org/abs/2605.22566.

A relation is an edge and the ids of a text. Its offset is stored, sparse if asked, once the relation was seen
``sightings`` times; nothing is interpolated, so a text that never recurs is never corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbaton.correctors.base import Correction, EdgeState, no_reveal
from kvbaton.errors import InvariantError, StoreError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sparse:
    """The largest entries of an offset above layer 0: ``values`` ``[L-1, m]``, places ``at`` in flat ``[H, T, D]``."""

    values: Tensor
    at: Tensor

    @classmethod
    def of(cls, offset: Tensor, drop: float) -> Sparse:
        """Of ``offset`` ``[L-1, H, T, D]``, without its ``drop`` share of smallest entries in each layer."""
        flat = offset.flatten(1)
        at = flat.abs().topk(flat.shape[1] - int(drop * flat.shape[1]), dim=1).indices.sort(dim=1).values
        return cls(flat.gather(1, at), at.to(torch.int32))

    def add_to(self, base: Tensor, layer: int) -> Tensor:
        """``base`` ``[H, T, D]`` of ``layer`` (1 or more) plus the offset, as a new tensor."""
        flat = base.flatten()
        return flat.index_add(0, self.at[layer - 1].long(), self.values[layer - 1].to(base.dtype)).view_as(base)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.at.nbytes


@dataclass
class ResidualState:
    """Relations of one edge: how often each text was seen, and the offsets ``(k, v)`` of those seen often enough."""

    geometry: Geometry
    seen: dict[Ids, int] = field(default_factory=dict)
    held: dict[Ids, tuple[Sparse, Sparse]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in self.held.values() for part in pair) + 8 * sum(len(ids) for ids in self.seen)

    @property
    def texts(self) -> int:
        return len(self.seen)

    def merge(self, other: Any) -> None:
        for ids, count in other.seen.items():
            self.seen[ids] = self.seen.get(ids, 0) + count
        self.held = {**other.held, **self.held}

    def to_tensors(self) -> Mapping[str, Tensor]:
        out = {}
        for i, (ids, count) in enumerate(self.seen.items()):
            out[f"t{i}_ids"], out[f"t{i}_seen"] = torch.tensor(ids), torch.tensor(count)
            for side, part in zip("kv", self.held.get(ids, ()), strict=False):
                out[f"t{i}_{side}_values"], out[f"t{i}_{side}_at"] = part.values, part.at
        return out

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        texts = sum(name.endswith("_ids") for name in tensors)
        try:
            for i in range(texts):
                ids = tuple(tensors[f"t{i}_ids"].tolist())
                self.seen[ids] = int(tensors[f"t{i}_seen"])
                if f"t{i}_k_values" in tensors:
                    k, v = (Sparse(tensors[f"t{i}_{side}_values"], tensors[f"t{i}_{side}_at"]) for side in "kv")
                    self.held[ids] = k, v
            self.check()
        except (KeyError, TypeError, ValueError, InvariantError) as error:
            raise StoreError(f"stored residuals are broken: {error}") from error

    def check(self) -> None:
        for ids, pair in self.held.items():
            if ids not in self.seen:
                raise InvariantError("a residual is held of a text that was never seen")
            for part in pair:
                if part.values.shape != part.at.shape or part.values.shape[:-1] != (self.geometry.layers - 1,):
                    raise InvariantError(f"a residual has {part.values.shape} values at {part.at.shape} places")
                if ((part.at < 0) | (part.at >= len(ids) * self.geometry.kv_heads * self.geometry.head_dim)).any():
                    raise InvariantError("a residual has a place outside its text")
                if not torch.isfinite(part.values).all():
                    raise InvariantError("a residual is not finite")


@dataclass(frozen=True)
class Residuals:
    """Store offsets by exact relation after ``sightings`` of it, at most ``capacity`` texts an edge.

    ``drop_k``, ``drop_v``: share of smallest entries that are not stored (the paper drops about .75 and .70). Over
    capacity the text seen least is forgotten, the oldest of equals first.
    """

    sightings: int = 2
    capacity: int = 64
    drop_k: float = 0.0
    drop_v: float = 0.0
    learns: ClassVar[bool] = True
    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.sightings < 1 or self.capacity < 1:
            raise UsageError("Residuals needs sightings and capacity of 1 or more")
        if not (0.0 <= self.drop_k < 1.0 and 0.0 <= self.drop_v < 1.0):
            raise UsageError("drop_k and drop_v are shares from 0 to below 1")

    def new_state(self, geometry: Geometry) -> ResidualState:
        return ResidualState(geometry)

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        return isinstance(state, ResidualState) and source.token_ids in state.held

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        assert isinstance(state, ResidualState)
        k, v = state.held[source.token_ids]
        return lambda layer: ((k.add_to(source.k[layer], layer), v.add_to(source.v[layer], layer)) if layer
                              else (source.k[0], source.v[0]))

    def learn(self, state: EdgeState, source: KV, target: KV) -> None:
        assert isinstance(state, ResidualState)
        ids = source.token_ids
        state.seen[ids] = state.seen.get(ids, 0) + 1
        if state.seen[ids] >= self.sightings:
            state.held[ids] = (Sparse.of(target.k[1:] - source.k[1:], self.drop_k),
                               Sparse.of(target.v[1:] - source.v[1:], self.drop_v))
        while len(state.seen) > self.capacity:
            least = min((known for known in state.seen if known != ids), key=state.seen.__getitem__)
            del state.seen[least]
            state.held.pop(least, None)

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        return no_reveal(truth, source)
