"""LowRank: a matrix as the product of two thin ones, found by randomised SVD.

    matrix [..., T, C]  ~  left [..., T, R] @ right [..., R, C]        R <= min(T, C)

As fitted, the rows of ``right`` are orthonormal and ``left`` carries the singular values. Leading dimensions (layers)
are done together. Source: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011), sections 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.errors import InvariantError


@dataclass(frozen=True, eq=False)
class LowRank:
    """``left`` ``[..., T, R]`` times ``right`` ``[..., R, C]``."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.shape[:-2] != self.right.shape[:-2] or self.left.shape[-1] != self.right.shape[-2]:
            raise InvariantError(f"factors {tuple(self.left.shape)} and {tuple(self.right.shape)} do not fit")

    @classmethod
    def fit(cls, matrix: Tensor, rank: int, oversample: int = 8, power_iterations: int = 2, seed: int = 0) -> LowRank:
        """Nearly the best rank-``rank`` factors of ``matrix`` ``[..., T, C]``: float32, equal for equal input.

        Exact where ``rank`` is at least min(T, C); the factors then have that smaller rank. ``oversample``: extra
        directions sketched and cut again; ``power_iterations``: passes that sharpen the sketch.
        """
        if rank < 1:
            raise InvariantError(f"rank must be 1 or more, got {rank}")
        matrix = matrix.float()
        tokens, channels = matrix.shape[-2:]
        if rank >= min(tokens, channels):
            return cls._exact(matrix)
        width, passes = min(rank + oversample, tokens, channels), power_iterations + 1
        # Few channels: one product gives the whole Gram matrix for less than the passes over tall data would cost.
        gram = matrix.mT @ matrix if channels <= 2 * passes * width else None
        generator = torch.Generator(matrix.device).manual_seed(seed)
        basis = torch.randn(channels, width, generator=generator, device=matrix.device)
        for _ in range(passes):
            image = matrix.mT @ (matrix @ basis) if gram is None else gram @ basis
            basis = torch.linalg.qr(image).Q
        left = matrix @ basis
        turn = torch.linalg.eigh((left.mT @ left).double()).eigenvectors[..., -rank:].flip(-1).float()
        return cls(left @ turn, (basis @ turn).mT.contiguous())

    @classmethod
    def _exact(cls, matrix: Tensor) -> LowRank:
        tokens, channels = matrix.shape[-2:]
        if tokens >= channels:
            right = torch.eye(channels, device=matrix.device).expand(*matrix.shape[:-2], channels, channels)
            return cls(matrix, right.contiguous())
        basis, triangle = torch.linalg.qr(matrix.mT)
        return cls(triangle.mT.contiguous(), basis.mT.contiguous())

    @property
    def rank(self) -> int:
        return self.left.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.left.nbytes + self.right.nbytes

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.left.to(dtype), self.right.to(dtype))

    def dense(self) -> Tensor:
        """The matrix ``[..., T, C]``."""
        return self.left @ self.right

    def rows(self, n: int) -> LowRank:
        """The first ``n`` rows, as a view."""
        return LowRank(self.left[..., :n, :], self.right)

    def error(self, matrix: Tensor) -> Tensor:
        """Relative Frobenius error ``[...]`` against ``matrix`` ``[..., T, C]``; 0 for a zero matrix kept as zero."""
        matrix = matrix.float()
        missed: Tensor = self.left.float() @ self.right.float() - matrix
        size = matrix.square().sum((-2, -1)).clamp_min(torch.finfo(torch.float32).tiny)
        return (missed.square().sum((-2, -1)) / size).sqrt()


def effective_rank(matrix: Tensor, share: float = 0.9) -> Tensor:
    """Least rank ``[...]`` int64 that keeps ``share`` of the squared singular values of ``matrix`` ``[..., T, C]``."""
    energy: Tensor = torch.linalg.svdvals(matrix.float()).double().square()
    short = energy.cumsum(-1) < share * energy.sum(-1, keepdim=True)
    return short.sum(-1).add(1).clamp_max(energy.shape[-1])
