"""Texts: how many distinct texts an edge has learned from. No text is kept, only a hash of its ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kvbaton.errors import StoreError
from kvbaton.prompt import Segment

KEPT = 256
"""Hashes kept, the latest: with more texts than that, one counted twice changes nothing."""


class Texts:
    """``count``: distinct texts; ``effective``: the same, each faded as often as a new text came after it."""

    def __init__(self, count: int = 0, effective: float = 0.0, hashes: Iterable[int] = ()) -> None:
        self.count, self.effective = count, effective
        self._hashes: deque[int] = deque(hashes, maxlen=KEPT)

    @property
    def nbytes(self) -> int:
        return 8 * len(self._hashes)

    def add(self, token_ids: tuple[int, ...], forget: float) -> None:
        """Count a text unless it is known; a text whose ids nobody set (empty) counts as new."""
        new = self._take(_hash(token_ids)) if token_ids else True
        self.count += new
        self.effective = max(1.0, self.effective * forget + new)

    def merge(self, other: Texts) -> None:
        shared = sum(not self._take(text) for text in other._hashes)
        self.count += other.count - shared
        self.effective = max(self.effective, self.effective + other.effective - shared)

    def _take(self, text: int) -> bool:
        if text in self._hashes:
            return False
        self._hashes.append(text)
        return True

    def to_tensors(self) -> dict[str, Tensor]:
        return {"texts.count": torch.tensor([self.count, self.effective], dtype=torch.float64),
                "texts.hashes": torch.tensor(list(self._hashes), dtype=torch.int64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Texts:
        count, hashes = tensors.get("texts.count"), tensors.get("texts.hashes")
        if count is None or hashes is None or count.shape != (2,) or hashes.ndim != 1 or len(hashes) > KEPT:
            raise StoreError("affine state: the number or the hashes of its texts are missing or misshapen")
        if not bool(count.isfinite().all() and (count >= 0).all()) or hashes.dtype != torch.int64:
            raise StoreError("affine state: the number or the hashes of its texts make no sense")
        return cls(int(count[0]), float(count[1]), hashes.tolist())


def _hash(token_ids: tuple[int, ...]) -> int:
    return int.from_bytes(bytes.fromhex(Segment(token_ids).key)[:8], "big", signed=True)
