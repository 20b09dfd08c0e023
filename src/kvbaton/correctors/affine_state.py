"""AffineState: what an edge has learned about its affine map, and how it learns more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbaton.correctors.blocks import Blocks, row_decay, spread_rows
from kvbaton.correctors.fit import fit
from kvbaton.correctors.fitted_map import FittedMap, Scratch
from kvbaton.correctors.lens import Lens
from kvbaton.correctors.record import Record
from kvbaton.correctors.sums import Sums
from kvbaton.correctors.texts import Texts
from kvbaton.errors import InvariantError
from kvbaton.kv import KV

if TYPE_CHECKING:
    from kvbaton.correctors.affine import Affine

REFITS = frozenset({1, 2, 3, 5, 8, 12, 20, 30})
"""Dense hops after which the map is solved anew; then after every 50th."""


@dataclass
class AffineState:
    """``sums`` (cold, float32: solved from), ``map`` (hot, in the KV's dtype: applied), ``record`` (read by gates).

    One writer at a time; `Affine.correct` may run beside it, because a new map replaces the old one as a whole.
    """

    rule: Affine
    blocks: Blocks
    sums: Sums | None = None
    map: FittedMap | None = None
    lens: Lens | None = None
    seen: Texts = field(default_factory=Texts)
    record: Record = field(default_factory=Record)

    @property
    def _shape(self) -> tuple[int, int]:
        """Blocks of all layers together, and features of each."""
        return self.blocks.layers * self.blocks.count, self.blocks.features

    @property
    def texts(self) -> int:
        return self.seen.count

    @property
    def hot_nbytes(self) -> int:
        """Bytes that a reuse hop reads."""
        return (self.map.nbytes if self.map else 0) + (self.lens.nbytes if self.lens else 0)

    @property
    def nbytes(self) -> int:
        return self.hot_nbytes + self.seen.nbytes + (0 if self.sums is None else self.sums.nbytes)

    def map_on(self, device: torch.device) -> FittedMap:
        """The map on ``device``, moved there once. Call only where there is one."""
        if self.map is None:
            raise InvariantError("an affine state without a map was asked for it")
        if self.map.mean.device != device:
            self.map = self.map.to(device)
        return self.map

    def novelty(self, source: KV) -> float | None:
        """How unlike what was learned a text is, 1 or a little more for its like; None: nothing learned."""
        if self.lens is None:
            return None
        if self.lens.mean.device != source.k.device:
            self.lens = self.lens.to(source.k.device)
        return self.lens.novelty(source, self.blocks)

    def learn(self, source: KV, target: KV) -> None:
        """Measure the present map on this text, add the text to the sums, solve anew when it is due."""
        rows = spread_rows(self.rule.skip_rows, len(source), self.rule.max_rows, source.k.device)
        if not len(rows):
            return
        stands_for = (min(len(source) - self.rule.skip_rows, self.rule.text_tokens) / len(rows)) ** 0.5
        sums = self.sums or Sums.zeros(*self._shape, source.k.device)
        if self.rule.forget < 1:
            sums.scale(self.rule.forget)
        decay = row_decay(target.start, rows, self.rule.decay, source.k.dtype).float() * stands_for
        shares = self.rule.shares(target.start, rows, len(source)).to(source.k)
        scratch = None if self.map is None else self.map_on(source.k.device).scratch(self.blocks.count, shares)
        offsets, errors = [], []
        for layer in range(1, self.blocks.geometry.layers):
            k, v, to_k, to_v = (side[layer].index_select(1, rows) for side in (source.k, source.v, target.k, target.v))
            x = self.blocks.pack(k, v)
            dy = self.blocks.pack(to_k.float() - k.float(), to_v.float() - v.float())
            if self.sums is None:
                sums.centre[self.blocks.rows(layer)] = x.float().mean(-2)
            sums.add(self.blocks.rows(layer), x.float(), dy * stands_for, decay)
            size = to_v.float().square().sum().clamp(min=1e-30)
            offsets.append((to_v.float() - v.float()).square().sum() / size)
            if scratch is not None:
                errors.append(self._left(layer, x, dy, scratch) / size)
        error = float(torch.stack(errors).mean()) if errors else None
        self.record.learned_from(float(torch.stack(offsets).mean()), error, self.novelty(source))
        self.sums = sums
        self.seen.add(source.token_ids, self.rule.forget)
        if self.record.learned in REFITS or self.record.learned % 50 == 0:
            self.solve()

    def _left(self, layer: int, x: Tensor, dy: Tensor, scratch: Scratch) -> Tensor:
        """Squared value offsets that the present map leaves of ``dy``; ``x`` ``[B, T, F]`` is overwritten."""
        left = x.float() + dy - self.map_on(x.device).correct_(self.blocks.rows(layer), x, scratch)
        return self.blocks.unpack(left)[1].square().sum()

    def solve(self) -> None:
        """Fit the map to everything learned so far. Off the TTFT path: the engine's learner calls `learn`."""
        if self.sums is not None:
            self.map = fit(self.sums, self.rule, self.seen.effective, self.blocks.geometry.dtype)
            self.lens = Lens.of(self.sums, self.blocks, self.rule.ridge_tokens)

    def merge(self, other: AffineState) -> None:
        """Take in another worker's sums on the same edge; both must follow the same rule."""
        if other.rule != self.rule or other.blocks != self.blocks:
            raise InvariantError(f"cannot merge states of {self.rule} and {other.rule}")
        if other.sums is None:
            return
        self.sums = self.sums or Sums.zeros(*self._shape, other.sums.gram.device)
        self.sums.merge(other.sums)
        self.seen.merge(other.seen)
        self.record.merge(other.record)
        self.solve()

    def to_tensors(self) -> Mapping[str, Tensor]:
        parts = (self.seen, self.record, self.sums, self.map, self.lens)
        return {name: tensor for part in parts if part is not None for name, tensor in part.to_tensors().items()}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        seen, record = Texts.from_tensors(tensors), Record.from_tensors(tensors)
        if seen.count:
            self.sums = Sums.from_tensors(tensors, *self._shape)
            self.map = FittedMap.from_tensors(tensors, *self._shape, self.rule.rank, self.blocks.geometry.dtype)
            self.lens = Lens.from_tensors(tensors, self.blocks)
        self.seen, self.record = seen, record

    def check(self) -> None:
        if (self.sums is None) != (self.map is None) or (self.sums is None) != (self.texts == 0):
            raise InvariantError("an affine state has sums, a map and texts together, or none of them")
        if self.sums is not None:
            self.sums.check()
        self.record.check()
