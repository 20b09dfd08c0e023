"""The full-size form of `correctors.stacks`: every matrix as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.correctors.stacks import Stack


@dataclass(frozen=True, eq=False)
class Full:
    """One matrix ``[L, S_v, C]`` a text."""

    matrices: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def width(self) -> int:
        return self.matrices[0].shape[-1] if self.matrices else 0

    def dots(self, rows: Tensor, layers: slice) -> Tensor:
        tokens = rows.shape[1]
        out = torch.zeros(len(self.matrices), tokens, device=rows.device)
        for total, matrix in zip(out, self.matrices, strict=True):
            n = min(tokens, matrix.shape[1])
            total[:n] = (rows[:, :n].float() * matrix[layers, :n]).sum((0, 2))
        return out

    def mix(self, weights: Tensor, layers: slice) -> Tensor:
        first = self.matrices[0][layers]
        out = torch.zeros(len(first), weights.shape[1], self.width, device=first.device)
        for weight, matrix in zip(weights, self.matrices, strict=True):
            n = min(out.shape[1], matrix.shape[1])
            out[:, :n].addcmul_(matrix[layers, :n].float(), weight[:n, None])
        return out.to(first.dtype)

    def squares(self) -> list[Tensor]:
        return [matrix.float().square().sum((0, 2)) for matrix in self.matrices]

    def select(self, texts: Sequence[int]) -> Full:
        return Full(tuple(self.matrices[v] for v in texts))

    def joined(self, other: Stack) -> Full:
        assert isinstance(other, Full)
        return Full(self.matrices + other.matrices)

    def tensors(self) -> list[dict[str, Tensor]]:
        return [{"full": matrix} for matrix in self.matrices]

    def to(self, device: torch.device) -> Full:
        return Full(tuple(matrix.to(device) for matrix in self.matrices))
