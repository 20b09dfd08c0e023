"""The spliced cache of one hop, and the exact prefix cache of role prompts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbaton.kv import Geometry


class SplicedCache:
    """Preallocated keys (rotated) and values ``[L, H, capacity, D]`` of one hop; a token's slot is its position.

    Rows arrive from three sides: reused spans, the exact prefix, and freshly computed rows. Owned by one hop.
    """

    def __init__(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        self.geometry = geometry
        self.k = geometry.empty(capacity, device)
        self.v = geometry.empty(capacity, device)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


@dataclass
class PrefixCache:
    """Exact KV of role prompts, by token ids: the same for every method, as an engine with prefix caching has it.

    Holds rotated keys and values ``[L, H, T, D]`` from position 0, within ``budget_bytes``; the least recently
    used goes first.
    """

    budget_bytes: int = 256 * 2**20
    _held: OrderedDict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=OrderedDict)

    def get(self, token_ids: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        held = self._held.get(token_ids)
        if held is not None:
            self._held.move_to_end(token_ids)
        return held

    def put(self, token_ids: tuple[int, ...], k: Tensor, v: Tensor) -> None:
        """Copies the rows; too large a prefix is not kept."""
        if k.nbytes + v.nbytes > self.budget_bytes:
            return
        self._held[token_ids] = (k.clone(), v.clone())
        while self.nbytes > self.budget_bytes:
            self._held.popitem(last=False)

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self._held.values())
