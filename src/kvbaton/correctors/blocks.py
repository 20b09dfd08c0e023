"""Blocks: how keys and values of one layer are grouped into the feature vectors that an affine map takes in.

    inputs     blocks B   features F   a map sees
    joint-kv   H / g      2gD          keys and values of g heads: [k of head 1 .. g, v of head 1 .. g]
    split      2H / g     gD           keys from keys, values from values; blocks of keys first

    heads      g
    per-head   1
    grouped    as many heads as fit into 512 features (default): sums grow with F^2, solving with F^3
    joint      all H
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from kvbaton.correctors.base import LayerKV
from kvbaton.kv import Geometry


class Inputs(Enum):
    """What a map's features are, and its targets."""

    JOINT_KV = "joint-kv"
    SPLIT = "split"


class Heads(Enum):
    """How many KV heads a map sees."""

    PER_HEAD = "per-head"
    GROUPED = "grouped"
    JOINT = "joint"


GROUP_FEATURES = 512
"""Features of a block of grouped heads, at most, unless a single head has more."""


@dataclass(frozen=True)
class Blocks:
    """Packs ``[..., H, T, D]`` keys and values into ``[..., B, T, F]`` and back."""

    geometry: Geometry
    inputs: Inputs = Inputs.JOINT_KV
    heads: Heads = Heads.GROUPED

    @cached_property
    def together(self) -> int:
        """g, the heads of a block: a divisor of H."""
        if self.heads is Heads.PER_HEAD:
            return 1
        heads, most = self.geometry.kv_heads, GROUP_FEATURES // (self.geometry.head_dim * self._parts)
        if self.heads is Heads.JOINT:
            return heads
        return max(g for g in range(1, heads + 1) if heads % g == 0 and g <= max(most, 1))

    @property
    def _parts(self) -> int:
        """What a block holds of each of its heads: key and value, or one of them."""
        return 2 if self.inputs is Inputs.JOINT_KV else 1

    @property
    def count(self) -> int:
        """B, blocks a layer."""
        return 2 * self.geometry.kv_heads // (self.together * self._parts)

    @property
    def features(self) -> int:
        """F, features a block."""
        return self._parts * self.together * self.geometry.head_dim

    @property
    def layers(self) -> int:
        """Layers that are corrected: all but the first, whose keys and values no prefix changes."""
        return self.geometry.layers - 1

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """``[..., H, T, D]`` twice -> a new tensor ``[..., B, T, F]``."""
        k, v = (x.view(*x.shape[:-3], -1, self.together, *x.shape[-2:]).movedim(-3, -2) for x in (k, v))
        return torch.cat((k, v), dim=-2 if self.inputs is Inputs.JOINT_KV else -4).flatten(-2)

    def unpack(self, x: Tensor) -> LayerKV:
        """``[..., B, T, F]`` -> keys and values ``[..., H, T, D]``, views where possible."""
        k, v = x.chunk(2, dim=-1 if self.inputs is Inputs.JOINT_KV else -3)
        k, v = (part.view(*part.shape[:-1], self.together, -1).movedim(-2, -3).flatten(-4, -3) for part in (k, v))
        return k, v

    def weights(self, key: float, value: float) -> Tensor:
        """One number for every feature of a layer's blocks, by what it belongs to: ``[B, F]``."""
        heads, dim = self.geometry.kv_heads, self.geometry.head_dim
        return self.pack(torch.full((heads, 1, dim), key), torch.full((heads, 1, dim), value))[:, 0]

    @property
    def alone(self) -> Blocks:
        """The same with a block for every head."""
        return replace(self, heads=Heads.PER_HEAD)

    def single(self, head: int) -> tuple[int, Tensor]:
        """Where the block that ``head`` would have alone lies: in which block, at which of its features ``[f]``."""
        block, at = divmod(head, self.together)
        starts = torch.arange(self._parts) * self.together + at
        return block, (starts[:, None] * self.geometry.head_dim + torch.arange(self.geometry.head_dim)).flatten()

    def rows(self, layer: int) -> slice:
        """Where the blocks of ``layer`` (1 and up) lie in a tensor of all layers' blocks."""
        return slice((layer - 1) * self.count, layer * self.count)


def row_decay(start: int, rows: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    """g = (P / (P + t))^power ``[T, 1]`` for the rows t (``rows`` ``[T]``) of a segment at position P = ``start``.

    The influence of a prefix on a row falls with the share of attention that it still gets. A segment without a
    prefix counts as one behind a single token.
    """
    prefix = max(start, 1)
    return (prefix / (prefix + rows.float())).pow(power).to(dtype)[:, None]


def spread_rows(first: int, tokens: int, most: int, device: torch.device) -> Tensor:
    """At most ``most`` of the rows ``[first, tokens)``, evenly spread, both ends among them: ``[m]`` int64."""
    count = min(max(tokens - first, 0), most)
    return torch.linspace(first, tokens - 1, count, device=device).round().long()
