"""Blocks: how keys and values of one layer are grouped into the feature vectors that an affine map takes in.

    inputs     heads       blocks B   features F   a map sees
    joint-kv   per-head    H          2D           key and value of its own head (default)
    split      per-head    2H         D            keys from keys, values from values
    joint-kv   joint       1          2HD          all heads at once; sums grow with (HD)^2
    split      joint       2          HD
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    JOINT = "joint"


@dataclass(frozen=True)
class Blocks:
    """Packs ``[..., H, T, D]`` keys and values into ``[..., B, T, F]`` and back."""

    geometry: Geometry
    inputs: Inputs = Inputs.JOINT_KV
    heads: Heads = Heads.PER_HEAD

    @property
    def count(self) -> int:
        """B, blocks a layer."""
        heads = 1 if self.heads is Heads.JOINT else self.geometry.kv_heads
        return heads if self.inputs is Inputs.JOINT_KV else 2 * heads

    @property
    def features(self) -> int:
        """F, features a block."""
        return 2 * self.geometry.kv_heads * self.geometry.head_dim // self.count

    @property
    def layers(self) -> int:
        """Layers that are corrected: all but the first, whose keys and values no prefix changes."""
        return self.geometry.layers - 1

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """``[..., H, T, D]`` twice -> a new tensor ``[..., B, T, F]``."""
        x = torch.cat((k, v), dim=-1 if self.inputs is Inputs.JOINT_KV else -3)
        if self.heads is Heads.JOINT:
            x = x.view(*x.shape[:-3], -1, self.geometry.kv_heads, *x.shape[-2:]).movedim(-3, -2).flatten(-2)
        return x

    def unpack(self, x: Tensor) -> LayerKV:
        """``[..., B, T, F]`` -> keys and values ``[..., H, T, D]``, views where possible."""
        if self.heads is Heads.JOINT:
            x = x.view(*x.shape[:-1], self.geometry.kv_heads, -1).movedim(-2, -3).flatten(-4, -3)
        k, v = x.chunk(2, dim=-1 if self.inputs is Inputs.JOINT_KV else -3)
        return k, v

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
