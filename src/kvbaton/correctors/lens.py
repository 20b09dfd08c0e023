"""Lens: how unlike an edge's texts a new text is. One layer, a few blocks and rows: enough to tell a foreign topic.

The mean leverage of a text's rows, x^T (correlation + ridge)^-1 x of standardised x, over the value it has for the
rows already learned. Unseen texts of the same kind are a little above 1, texts of another kind 1.2 to 2.2 times
theirs (docs/decisions/0002-residual-gate.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.correctors.blocks import Blocks, spread_rows
from kvbaton.correctors.fit import Ridge
from kvbaton.correctors.sums import Sums
from kvbaton.errors import StoreError
from kvbaton.kv import KV

HEADS = 4
"""Heads of the watched layer that are looked at, each by itself, however many of them a map sees."""
ROWS = 64
"""Rows of a text that are looked at, spread over it; its first four, which are of another kind, are left out."""


def watched_layer(blocks: Blocks) -> int:
    """Three quarters up, but not layer 0."""
    return max(1, 3 * blocks.geometry.layers // 4)


@dataclass(frozen=True)
class Lens:
    """``mean`` ``[N, f]`` of the rows learned, ``whiten`` ``[N, f, f]``, of N single heads; read-only."""

    mean: Tensor
    whiten: Tensor

    @classmethod
    def of(cls, sums: Sums, blocks: Blocks, ridge_tokens: float) -> Lens:
        """From what was learned about the watched heads."""
        first = blocks.rows(watched_layer(blocks)).start
        places = [blocks.single(head) for head in range(min(HEADS, blocks.alone.count))]
        some = Sums.stack([sums.part(slice(first + block, first + block + 1), features) for block, features in places])
        found = Ridge.of(some, ridge_tokens)
        eye = torch.eye(found.factor.shape[-1], dtype=found.factor.dtype, device=found.factor.device)
        whiten = torch.linalg.solve_triangular(found.factor, eye.expand_as(found.factor), upper=False).mT
        # tr(W^T G W) of the rows learned, whose gram is G, because W^T (G + ridge) W = 1.
        usual = (len(eye) - (found.added[..., None] * whiten.square()).sum((-2, -1))).clamp(min=1e-12)
        whiten = whiten * (some.weight.to(whiten.dtype) / usual).sqrt()[:, None, None]
        dtype = blocks.geometry.dtype
        return cls(some.mean().to(dtype), whiten.to(dtype).contiguous())

    def novelty(self, source: KV, blocks: Blocks) -> float:
        """Mean leverage of the rows of ``source`` over its mean for the rows learned."""
        layer, tokens = watched_layer(blocks), len(source)
        rows = spread_rows(min(4, tokens - 1), tokens, ROWS, source.k.device)
        x = blocks.alone.pack(source.k[layer][:, rows], source.v[layer][:, rows])[:len(self.mean)]
        white = (x - self.mean[:, None]) @ self.whiten
        return float(white.float().square().sum(-1).mean())

    def to(self, device: torch.device) -> Lens:
        return Lens(self.mean.to(device), self.whiten.to(device))

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + self.whiten.nbytes

    def to_tensors(self) -> dict[str, Tensor]:
        return {"lens.mean": self.mean, "lens.whiten": self.whiten}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], blocks: Blocks) -> Lens:
        """Raises StoreError where a part is missing, of another shape or type, or not finite."""
        parts, dtype = [], blocks.geometry.dtype
        alone = blocks.alone
        vector = (min(HEADS, alone.count), alone.features)
        for name, shape in (("mean", vector), ("whiten", (*vector, alone.features))):
            found = tensors.get(f"lens.{name}")
            if found is None or found.shape != shape or found.dtype != dtype or not bool(found.isfinite().all()):
                raise StoreError(f"affine state: lens.{name} must be finite {dtype} of shape {shape}")
            parts.append(found.clone())
        return cls(*parts)
