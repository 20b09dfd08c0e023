"""FittedMap: what is applied of a fit.

    y = shift + limited((x - mean(x)) A) U        A [F, R], U [R, F]
    limited(z) = z min(1, 1 / |z|)

A row unlike those learned has slopes larger than any that were seen to be right: it gets no more than the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.errors import StoreError


@dataclass(frozen=True)
class Scratch:
    """Room for the products of one layer, used again for the next: fresh memory would take as long as the products.

    ``centred`` ``[B, T, F]``; ``inner`` ``[B, T, R + 1]``; ``shares`` ``[T, R]``, all columns
    alike, as the last of ``inner`` is.
    """

    centred: Tensor
    inner: Tensor
    shares: Tensor


@dataclass(frozen=True)
class FittedMap:
    """A map that is ready for use, for N blocks of F features, in the KV's dtype; read-only.

    ``mean`` ``[N, F]``, ``down`` ``[N, F, R]``, ``lift`` ``[N, R + 1, F]``: U with the offset as its last row, so that
    one product adds both.
    """

    mean: Tensor
    down: Tensor
    lift: Tensor

    @classmethod
    def of(cls, mean: Tensor, shift: Tensor, down: Tensor, up: Tensor) -> FittedMap:
        """From the parts of the equation: ``shift`` ``[N, F]``, ``down`` ``[N, F, R]``, ``up`` ``[N, R, F]``."""
        return cls(mean, down, torch.cat((up, shift[:, None]), 1))

    @property
    def shift(self) -> Tensor:
        return self.lift[:, -1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.to_tensors().values())

    def scratch(self, blocks: int, shares: Tensor) -> Scratch:
        """For a layer of so many blocks, whose rows get their ``shares`` ``[T, 1]`` of the map."""
        inner = shares.new_empty(blocks, len(shares), self.lift.shape[-2])
        inner[..., -1:] = shares
        centred = shares.new_empty(blocks, len(shares), self.lift.shape[-1])
        # Written out, because a product with a column that is only expanded is several times slower.
        return Scratch(centred, inner, shares.expand(-1, inner.shape[-1] - 1).contiguous())

    def correct_(self, blocks: slice, x: Tensor, scratch: Scratch) -> Tensor:
        """Add to rows ``x`` ``[B, T, F]`` of some ``blocks`` their shares of the map, in place.

        They are centred before the product because a key's bias can be a hundred times its spread, which a
        half-precision product would round away.
        """
        inner = torch.sub(x, self.mean[blocks, None], out=scratch.centred) @ self.down[blocks]
        inner.flatten(0, 1).renorm_(2, 0, 1)
        torch.mul(inner, scratch.shares, out=scratch.inner[..., :-1])
        return x.baddbmm_(scratch.inner, self.lift[blocks])

    def scaled(self, by: Tensor) -> FittedMap:
        """The map whose results are ``by`` ``[B, F]`` times as large, for the B blocks of every layer."""
        layers = len(self.lift) // len(by)
        return FittedMap(self.mean, self.down, self.lift * by.to(self.lift).repeat(layers, 1)[:, None])

    def to(self, device: torch.device) -> FittedMap:
        return FittedMap(self.mean.to(device), self.down.to(device), self.lift.to(device))

    def to_tensors(self) -> dict[str, Tensor]:
        return {"map.mean": self.mean, "map.down": self.down, "map.lift": self.lift}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], blocks: int, features: int, rank: int | None,
                     dtype: torch.dtype) -> FittedMap:
        """Raises StoreError where a part is missing, of another shape or type, or not finite."""
        inner = features if rank is None else rank
        shapes = {"mean": (blocks, features), "down": (blocks, features, inner), "lift": (blocks, inner + 1, features)}
        parts = {}
        for name, shape in shapes.items():
            found = tensors.get(f"map.{name}")
            if found is None or found.shape != shape or found.dtype != dtype or not bool(found.isfinite().all()):
                raise StoreError(f"affine state: map.{name} must be finite {dtype} of shape {shape}")
            parts[name] = found.clone()
        return cls(**parts)
