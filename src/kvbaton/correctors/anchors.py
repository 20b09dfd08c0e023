"""Anchors: offsets of earlier texts of the edge, mixed by similarity. KVCMAS, sections 2.2 to 2.7 of its description.

    anchor       base (how the source held the text) and offset (what the reader's prefix added), both of rank r
    weigh        softmax over anchors of -distance / temperature, for each token, keys and values apart
    correct      row t += sum of weight[v, t] * offset_v[t]

Layer 0 does not depend on the prefix: it is never stored nor corrected. Keys are unrotated throughout, so an offset
holds at any position. Rows are matched by index from the start of the text; an anchor corrects the rows it covers, the
weights of a row add up over the anchors that cover it, and rows behind every anchor stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbaton.correctors.anchors_state import AnchorState
from kvbaton.correctors.base import Correction, EdgeState, LayerKV, no_reveal
from kvbaton.correctors.pool import Anchor, Pool, Side, blocks
from kvbaton.correctors.stacks import Stack
from kvbaton.errors import UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place


@dataclass(frozen=True)
class Anchors:
    """Remember ``pool`` texts an edge. ``rank`` of offsets and ``base_rank`` of bases: None is full size.

    ``top_k``: only the so many anchors nearest by keys correct a text (None: all). ``temperature`` divides the root
    mean square distance of a token over layers, heads and channels. ``window``: a full pool drops, of its so many
    oldest texts, the one that had the least weight in corrections so far; never the text being learned.
    """

    rank: int | None = 32
    base_rank: int | None = 32
    pool: int = 10
    top_k: int | None = None
    temperature: float = 1.0
    window: int = 5
    learns: ClassVar[bool] = True
    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("rank", "base_rank", "top_k", "pool", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"Anchors needs {name} of 1 or more, got {value}")
        if not self.temperature > 0:
            raise UsageError(f"Anchors needs a temperature above 0, got {self.temperature}")

    def new_state(self, geometry: Geometry) -> AnchorState:
        return AnchorState(geometry, self.rank, self.base_rank, self.pool, self.window)

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        return isinstance(state, AnchorState) and state.pool is not None

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        """Also credits the anchors with their weights, by which the pool forgets."""
        assert isinstance(state, AnchorState)
        pool = state.pool_on(source.k.device)
        chosen = self._nearest(pool, source)
        k, v = (self._weights(side.squared_distances(x)[chosen], x)
                for side, x in ((pool.k, source.k), (pool.v, source.v)))
        for anchor, used in zip(chosen, ((k + v) / 2).mean(1).tolist(), strict=True):
            pool.anchors[anchor].credit += used
        whole = len(chosen) == len(pool)
        offsets = [side.offset if whole else side.offset.select(chosen) for side in (pool.k, pool.v)]
        return _Mixed(source, (k, v), (offsets[0], offsets[1]))

    def learn(self, state: EdgeState, source: KV, target: KV) -> None:
        assert isinstance(state, AnchorState)
        k, v = (Side.learned(x, true, self.base_rank, self.rank)
                for x, true in ((source.k, target.k), (source.v, target.v)))
        state.add(Pool((Anchor(source.token_ids, len(source)),), k, v))

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        return no_reveal(truth, source)

    def _nearest(self, pool: Pool, source: KV) -> list[int]:
        """Anchors that correct the text: all, or the ``top_k`` whose covered rows are nearest by keys on average."""
        if self.top_k is None or self.top_k >= len(pool):
            return list(range(len(pool)))
        distances = pool.k.squared_distances(source.k).sqrt()
        covered = distances.isfinite()
        mean = distances.where(covered, 0).sum(1) / covered.sum(1)
        return sorted(mean.topk(self.top_k, largest=False).indices.tolist())

    def _weights(self, squared: Tensor, x: Tensor) -> Tensor:
        """``[V, T]``: weights of the anchors on each row, 0 where an anchor does not reach."""
        layers, heads, _, dim = x.shape
        mean = (squared / ((layers - 1) * heads * dim)).sqrt()
        return torch.softmax(-mean / self.temperature, 0).nan_to_num(0.0)


class _Mixed:
    """Corrected keys and values of a layer, made in blocks of layers as they are asked for in order."""

    def __init__(self, source: KV, weights: tuple[Tensor, Tensor], offsets: tuple[Stack, Stack]) -> None:
        self._source, self._weights, self._offsets = source, weights, offsets
        width = max(offset.width for offset in offsets)
        self._blocks = tuple(blocks(len(source.k) - 1, len(source), width, source.k.device))
        self._held: tuple[slice, Tensor, Tensor] | None = None

    def __call__(self, layer: int) -> LayerKV:
        if layer == 0:
            return self._source.k[0], self._source.v[0]
        index = layer - 1
        if self._held is None or not self._held[0].start <= index < self._held[0].stop:
            block = next(b for b in self._blocks if b.start <= index < b.stop)
            self._held = block, self._corrected(0, self._source.k, block), self._corrected(1, self._source.v, block)
        block, k, v = self._held
        return k[index - block.start], v[index - block.start]

    def _corrected(self, side: int, x: Tensor, block: slice) -> Tensor:
        _, heads, tokens, dim = x.shape
        added = self._offsets[side].mix(self._weights[side], block)
        return x[1:][block] + added.view(-1, tokens, heads, dim).transpose(1, 2)
