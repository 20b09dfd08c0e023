"""Affine: what the reader's prefix changes in a key and value, as a linear map of that key and value. Ours.

On an edge the offset of a token is to a large part a function of the token's own keys and values, so one small map a
layer and group of KV heads, updated in closed form on every dense hop, serves every text of the edge:

    g_t = (P / (P + t))^decay        P tokens of the reader before the segment, t position in the segment
    learn    x = [k, v], y = offset / g_t, weight g_t^2      sums only, no text is kept
    correct  [k, v] + s g_t (limited((x - mean) A) U + shift)   one thin product a layer; rank 0: the mean offset alone
             s = min(1, text_tokens / T)^0.5   T tokens of the text for a value, of all that the hop corrects for a key
             limited: no row's slope is more than slope_limit times as large as is usual among the rows learned
             A row whose value would get less than a tenth of the map is left as it is.

Layer 0 is exact and left alone. Keys are unrotated throughout. Measurements: docs/results/affine/README.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbaton.correctors.affine_state import AffineState
from kvbaton.correctors.base import Correction, EdgeState, LayerKV, no_reveal
from kvbaton.correctors.blocks import Blocks, Heads, Inputs, row_decay
from kvbaton.errors import InvariantError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

UNCUT_RANK = 8
"""A rank that is not cut for the map's size: below it much of the gain is lost (docs/decisions/0005)."""

FAINT = 0.1
"""A row that would get less of the map than this is left as it is: no reader notices, and long texts cost less."""


@dataclass(frozen=True)
class Affine:
    """A ridge map from a row's key and value to its offset.

    ``rank`` of the slope: None is full, 0 keeps only the mean offset (`shift`). ``map_numbers``: a rank above 8 is
    cut down until an edge's map holds no more numbers than these (2.4 MB in half precision). ``ridge_tokens``:
    strength of the ridge, as if that many tokens had said "no slope". ``text_tokens``: a text counts as at most so
    many tokens beside it, however long it is, because its rows share one topic; what a map gets wrong they share,
    too, so that a text longer than that is corrected by less, and keys, which compete for attention with all others
    of the hop, by less where all texts of the hop together are longer (docs/decisions/0007, 0009). ``slope_limit``: a
    row's slope |(x - mean) A| counts at most so many times its root mean square over the rows learned
    (docs/decisions/0008). ``offset_prior`` p: the mean offset of m texts counts m / (m + p). ``forget``: what was
    learned counts so much after each new text (1: nothing fades). ``skip_rows``: first rows of a segment left out of
    learning, because the engine computes them (`Recipe.lead_rows`). ``max_rows``: a longer text is learned from that
    many of its rows, spread over it, which then stand for all: the rows of one text say much the same, and learning
    must stay cheap beside the hop that it learns from. ``inputs`` and ``heads``: what one map sees,
    `correctors.blocks`.
    """

    rank: int | None = 32
    map_numbers: int = 1_200_000
    ridge_tokens: float = 500.0
    decay: float = 0.5
    text_tokens: int = 128
    slope_limit: float = 2.0
    offset_prior: float = 2.0
    forget: float = 1.0
    skip_rows: int = 0
    max_rows: int = 256
    inputs: Inputs = Inputs.JOINT_KV
    heads: Heads = Heads.GROUPED
    learns: ClassVar[bool] = True
    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 0:
            raise UsageError(f"rank must be None (full) or 0 and more, got {self.rank}")
        if self.slope_limit <= 0 or not math.isfinite(self.slope_limit):
            raise UsageError(f"slope_limit must be a finite number above 0, got {self.slope_limit}")
        if self.ridge_tokens <= 0 or self.offset_prior < 0 or self.decay < 0 or self.skip_rows < 0:
            raise UsageError("Affine needs ridge_tokens above 0, and offset_prior, decay and skip_rows of 0 or more")
        if min(self.max_rows, self.text_tokens, self.map_numbers) < 1:
            raise UsageError("max_rows, text_tokens and map_numbers must be 1 or more, got "
                             f"{self.max_rows}, {self.text_tokens} and {self.map_numbers}")
        if not 0 < self.forget <= 1:
            raise UsageError(f"forget is what remains of the past after a text, above 0 up to 1, got {self.forget}")

    def new_state(self, geometry: Geometry) -> AffineState:
        blocks = Blocks(geometry, self.inputs, self.heads)
        return AffineState(replace(self, rank=self._rank_on(blocks)), blocks)

    def _rank_on(self, blocks: Blocks) -> int | None:
        """The rank that is used on these blocks; None where it is no less than full."""
        if self.rank is None:
            return None
        # A map holds mean and shift, and for every rank one column of A and one row of U.
        fits = self.map_numbers // (2 * blocks.layers * blocks.count * blocks.features) - 1
        rank = min(self.rank, max(fits, UNCUT_RANK))
        return None if rank >= blocks.features else rank

    def strength(self, tokens: int) -> float:
        """What texts of so many tokens get of the map: s."""
        return math.sqrt(min(1.0, self.text_tokens / tokens))

    def shares(self, start: int, rows: Tensor, tokens: int) -> Tensor:
        """What the values of rows t (``rows`` ``[m]``) of a text of so many tokens get: s g_t ``[m, 1]``, falling."""
        share = row_decay(start, rows, self.decay, torch.float32) * self.strength(tokens)
        return share * (share >= FAINT)

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        return isinstance(state, AffineState) and state.map is not None

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        if not isinstance(state, AffineState) or state.map is None:
            raise InvariantError("Affine.correct needs a state that has learned: ask can_correct first")
        blocks = state.blocks
        keys = self.strength(place.corrected) / self.strength(len(source))
        found = state.map_on(source.k.device)
        if keys != 1:
            found = found.scaled(blocks.weights(keys, 1.0))
        shares = self.shares(place.start, torch.arange(len(source)), len(source))
        first = int(shares.count_nonzero())
        shares = shares[:first].to(source.k)
        scratch = found.scratch(blocks.count, shares)

        def layer(at: int) -> LayerKV:
            k, v = source.k[at][:, :first], source.v[at][:, :first]
            if at == 0 or first == 0:
                return k, v
            x = blocks.pack(k, v)
            return blocks.unpack(found.correct_(blocks.rows(at), x, scratch))

        return layer

    def learn(self, state: EdgeState, source: KV, target: KV) -> None:
        if not isinstance(state, AffineState):
            raise InvariantError(f"Affine learns into an AffineState, not {type(state).__name__}")
        state.learn(source, target)

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        return no_reveal(truth, source)
