"""Stacks: the matrices of V texts, in the form they are used in.

One text's matrix is ``[L, S, C]``: S its tokens, C = H*D all KV heads side by side. Two forms, one interface:

    Factored   left  one [L, S_v, R_v] a text          right  [L, sum of R_v, C], all texts side by side
    Full       one [L, S_v, C] a text

The right factors of all texts lie in one tensor, so that both uses are one thin product a layer:

    dots   row . right^T  ->  [T, sum of R]  * left    distance of new rows to every text, nothing reconstructed
    mix    (weight * left)   [T, sum of R]  @ right    weighted sum of all texts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvbaton.lowrank import LowRank


class Stack(Protocol):
    """Matrices ``[L, S_v, C]`` of V texts. Immutable."""

    @property
    def nbytes(self) -> int: ...
    @property
    def width(self) -> int:
        """Columns of the product that `dots` and `mix` make for one row and layer."""
        ...

    def dots(self, rows: Tensor, layers: slice) -> Tensor:
        """``[V, T]`` float32: row t of ``rows`` ``[l, T, C]`` times row t of each text, summed over those layers."""
        ...

    def mix(self, weights: Tensor, layers: slice) -> Tensor:
        """``[l, T, C]``: the texts' rows weighted by ``weights`` ``[V, T]``, which is 0 behind a text's end."""
        ...

    def squares(self) -> list[Tensor]:
        """For each text ``[S_v]`` float32: squared length of its rows, summed over layers."""
        ...

    def select(self, texts: Sequence[int]) -> Stack: ...
    def joined(self, other: Stack) -> Stack:
        """The texts of both; both of one form."""
        ...

    def tensors(self) -> list[dict[str, Tensor]]:
        """Named tensors of each text, for a file."""
        ...

    def to(self, device: torch.device) -> Stack: ...


@dataclass(frozen=True, eq=False)
class Factored:
    """Low-rank form: see the module's head."""

    lefts: tuple[Tensor, ...]
    right: Tensor

    @classmethod
    def fit(cls, parts: Iterable[Tensor], rank: int, dtype: torch.dtype) -> Factored:
        """One text's matrix, given in ``parts`` ``[l, S, C]`` of some layers: fitted in float32, kept in ``dtype``."""
        found = [LowRank.fit(part, rank).to(dtype) for part in parts]
        return cls((torch.cat([f.left for f in found]),), torch.cat([f.right for f in found]))

    @property
    def _columns(self) -> list[slice]:
        ends = accumulate((left.shape[-1] for left in self.lefts), initial=0)
        return [slice(start, end) for start, end in pairwise(ends)]

    @property
    def nbytes(self) -> int:
        return self.right.nbytes + sum(left.nbytes for left in self.lefts)

    @property
    def width(self) -> int:
        return self.right.shape[1]

    def dots(self, rows: Tensor, layers: slice) -> Tensor:
        tokens = rows.shape[1]
        projected = torch.bmm(rows, self.right[layers].mT)
        if projected.dtype == torch.float16:
            projected = projected.float()  # products of large keys overflow float16
        out = torch.zeros(len(self.lefts), tokens, device=rows.device)
        for total, left, columns in zip(out, self.lefts, self._columns, strict=True):
            n = min(tokens, left.shape[1])
            total[:n] = (projected[:, :n, columns] * left[layers, :n]).sum((0, 2), dtype=torch.float32)
        return out

    def mix(self, weights: Tensor, layers: slice) -> Tensor:
        tokens, right = weights.shape[1], self.right[layers]
        scaled = right.new_empty(len(right), tokens, self.width)
        for weight, left, columns in zip(weights.to(right.dtype), self.lefts, self._columns, strict=True):
            n = min(tokens, left.shape[1])
            torch.mul(left[layers, :n], weight[:n, None], out=scaled[:, :n, columns])
            scaled[:, n:, columns] = 0
        return torch.bmm(scaled, right)

    def squares(self) -> list[Tensor]:
        out = []
        for left, columns in zip(self.lefts, self._columns, strict=True):
            right, own = self.right[:, columns].float(), left.float()
            out.append((own @ (right @ right.mT) * own).sum((0, 2)))
        return out

    def select(self, texts: Sequence[int]) -> Factored:
        columns = self._columns
        kept = [self.right[:, columns[v]] for v in texts]
        return Factored(tuple(self.lefts[v] for v in texts), torch.cat(kept, 1) if kept else self.right[:, :0])

    def joined(self, other: Stack) -> Factored:
        assert isinstance(other, Factored)
        return Factored(self.lefts + other.lefts, torch.cat((self.right, other.right), 1))

    def tensors(self) -> list[dict[str, Tensor]]:
        return [{"left": left, "right": self.right[:, columns]}
                for left, columns in zip(self.lefts, self._columns, strict=True)]

    def to(self, device: torch.device) -> Factored:
        return Factored(tuple(left.to(device) for left in self.lefts), self.right.to(device))
