"""Pool: the texts an edge remembers, and how far a new text is from each. Immutable: a new text makes a new pool.

Distances are taken in factor space, with nothing reconstructed; layer 0 is exact for every text and left out:

    |c - qB|^2 = |c|^2 - 2 (c B^T) . q + |qB|^2        c new row, qB the text's row; the last term is kept
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvbaton.correctors.fullstack import Full
from kvbaton.correctors.stacks import Factored, Stack

_BLOCK = {"cpu": 1 << 21}
_BLOCK_ELSEWHERE = 1 << 26
"""Elements of a matrix or product held at a time: what a CPU's cache takes; on a GPU, enough to fill it."""


@dataclass
class Anchor:
    """One remembered text. ``credit``: sum of the mean weights it had in corrections."""

    token_ids: tuple[int, ...]
    tokens: int
    credit: float = 0.0


@dataclass(frozen=True, eq=False)
class Side:
    """Keys or values of V texts: ``base`` recognises them, ``offset`` corrects; ``squares``: see `Stack.squares`."""

    base: Stack
    offset: Stack
    squares: tuple[Tensor, ...]
    _seen: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)

    @classmethod
    def of(cls, base: Stack, offset: Stack) -> Side:
        return cls(base, offset, tuple(base.squares()))

    @classmethod
    def learned(cls, source: Tensor, target: Tensor, base_rank: int | None, rank: int | None) -> Side:
        """One text's side from ``[L, H, S, D]`` of the source and of the reader."""
        layers, heads, tokens, dim = source.shape
        parts = tuple(blocks(layers - 1, tokens, heads * dim, source.device))
        base = (rows_of(source, part).float() for part in parts)
        offset = (rows_of(target, part).float().sub_(rows_of(source, part)) for part in parts)
        return cls.of(_stack(base, base_rank, source.dtype), _stack(offset, rank, source.dtype))

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.offset.nbytes + sum(square.nbytes for square in self.squares)

    def squared_distances(self, x: Tensor) -> Tensor:
        """``[V, T]`` float32: squared distance of each row of ``x`` ``[L, H, T, D]``, summed over layers from 1, heads
        and channels; inf behind a text's end. Kept as long as that very tensor lives: gate and corrector ask alike."""
        if x not in self._seen:
            self._seen[x] = self._squared_distances(x)
        found: Tensor = self._seen[x]
        return found

    def _squared_distances(self, x: Tensor) -> Tensor:
        tokens = x.shape[2]
        dots = torch.zeros(len(self.squares), tokens, device=x.device)
        own = torch.zeros(tokens, device=x.device)
        for layers in blocks(len(x) - 1, tokens, self.base.width, x.device):
            rows = rows_of(x, layers)
            dots += self.base.dots(rows, layers)
            own += rows.float().square().sum((0, 2))
        out = torch.full_like(dots, torch.inf)
        for found, dot, square in zip(out, dots, self.squares, strict=True):
            n = min(tokens, len(square))
            found[:n] = (own[:n] - 2 * dot[:n] + square[:n]).clamp_min(0)
        return out

    def select(self, texts: Sequence[int]) -> Side:
        return Side(self.base.select(texts), self.offset.select(texts), tuple(self.squares[v] for v in texts))

    def joined(self, other: Side) -> Side:
        return Side(self.base.joined(other.base), self.offset.joined(other.offset), self.squares + other.squares)

    def to(self, device: torch.device) -> Side:
        return Side(self.base.to(device), self.offset.to(device), tuple(square.to(device) for square in self.squares))


@dataclass(frozen=True, eq=False)
class Pool:
    """V remembered texts, oldest first."""

    anchors: tuple[Anchor, ...]
    k: Side
    v: Side

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def device(self) -> torch.device:
        return self.k.squares[0].device

    def select(self, texts: Sequence[int]) -> Pool:
        return Pool(tuple(self.anchors[v] for v in texts), self.k.select(texts), self.v.select(texts))

    def joined(self, other: Pool) -> Pool:
        return Pool(self.anchors + other.anchors, self.k.joined(other.k), self.v.joined(other.v))

    def to(self, device: torch.device) -> Pool:
        return Pool(self.anchors, self.k.to(device), self.v.to(device))


def rows_of(x: Tensor, layers: slice = slice(None)) -> Tensor:
    """``[L-1, T, H*D]`` of ``x`` ``[L, H, T, D]``: layer 0 left out, heads side by side; ``layers`` counts from 1."""
    return x[1:][layers].transpose(1, 2).flatten(2)


def blocks(layers: int, tokens: int, width: int, device: torch.device) -> Iterator[slice]:
    """Runs of layers whose matrices of ``tokens`` by ``width`` are held at a time."""
    step = max(1, _BLOCK.get(device.type, _BLOCK_ELSEWHERE) // max(1, tokens * width))
    return (slice(start, min(start + step, layers)) for start in range(0, layers, step))


def _stack(parts: Iterable[Tensor], rank: int | None, dtype: torch.dtype) -> Stack:
    """One text's matrix, given in ``parts`` of some layers each."""
    return Full((torch.cat([part.to(dtype) for part in parts]),)) if rank is None else Factored.fit(parts, rank, dtype)
