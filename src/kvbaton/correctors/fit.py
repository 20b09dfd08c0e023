"""Fit and FittedMap: a ridge regression on standardised features, cut to a rank, and what is applied of it.

    y = shrink * mean(y) + (x - mean(x)) A U        A [F, R], U [R, F]; rank None: A is left out, U is [F, F]

The ridge is a constant number of tokens, the same for every model, layer and head, and does not touch the mean
offset; that one is shrunk by the number of texts, because the mean of one text is not the mean of an edge.
Algorithm and measurements: docs/results/affine/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.correctors.sums import Sums
from kvbaton.errors import StoreError

SPARE_COLUMNS, ROUNDS = 8, 4
"""Of the subspace iteration: columns beside the wanted ones, and products with the matrix."""


@dataclass(frozen=True)
class FittedMap:
    """A map that is ready for use, for N blocks of F features, in the KV's dtype; read-only.

    ``mean`` ``[N, F]``, ``down`` ``[N, F, R]`` (None at full rank), ``lift`` ``[N, R + 1, F]`` (F + 1 at full rank): U
    with the offset as its last row, so that one product adds both.
    """

    mean: Tensor
    down: Tensor | None
    lift: Tensor

    @classmethod
    def of(cls, mean: Tensor, shift: Tensor, down: Tensor | None, up: Tensor) -> FittedMap:
        """From the parts of the equation: ``shift`` ``[N, F]``, ``up`` ``[N, R or F, F]``."""
        return cls(mean, down, torch.cat((up, shift[:, None]), 1))

    @property
    def shift(self) -> Tensor:
        return self.lift[:, -1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.to_tensors().values())

    def correct_(self, blocks: slice, x: Tensor, decay: Tensor) -> Tensor:
        """Add g times the map, ``decay`` g ``[T, 1]``, to rows ``x`` ``[B, T, F]`` of some ``blocks``, in place.

        They are centred before the product because a key's bias can be a hundred times its spread, which a
        half-precision product would round away.
        """
        inner = x - self.mean[blocks, None]
        if self.down is not None:
            inner = inner @ self.down[blocks]
        inner = torch.cat((inner.mul_(decay), decay.expand(len(x), -1, 1)), -1)
        return x.baddbmm_(inner, self.lift[blocks])

    def to(self, device: torch.device) -> FittedMap:
        down = None if self.down is None else self.down.to(device)
        return FittedMap(self.mean.to(device), down, self.lift.to(device))

    def to_tensors(self) -> dict[str, Tensor]:
        parts = {"map.mean": self.mean, "map.lift": self.lift}
        return parts if self.down is None else {**parts, "map.down": self.down}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], blocks: int, features: int, rank: int | None,
                     dtype: torch.dtype) -> FittedMap:
        """Raises StoreError where a part is missing, of another shape or type, or not finite."""
        inner = features if rank is None else rank
        shapes = {"mean": (blocks, features), "lift": (blocks, inner + 1, features)}
        if rank is not None:
            shapes["down"] = (blocks, features, rank)
        parts = {}
        for name, shape in shapes.items():
            found = tensors.get(f"map.{name}")
            if found is None or found.shape != shape or found.dtype != dtype or not bool(found.isfinite().all()):
                raise StoreError(f"affine state: map.{name} must be finite {dtype} of shape {shape}")
            parts[name] = found.clone()
        return cls(parts["mean"], parts.get("down"), parts["lift"])


def correlations(sums: Sums, ridge_tokens: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scale s ``[N, F]``, correlation R and its ridged Cholesky factor ``[N, F, F]``, float64."""
    weight = sums.weight.double().clamp(min=1e-12)
    mean = sums.inputs.double() / weight[:, None]
    spread = sums.gram.double().div_(weight[:, None, None]).sub_(mean[:, :, None] * mean[:, None, :])
    variance = spread.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    scale = (variance + 1e-6 * variance.mean(-1, keepdim=True) + 1e-12).sqrt()
    correlation = spread.div_(scale[:, :, None]).div_(scale[:, None, :])
    ridged = correlation.clone()
    ridged.diagonal(dim1=-2, dim2=-1).add_((ridge_tokens / weight)[:, None])
    return scale, correlation, torch.linalg.cholesky(ridged)


def leading_basis(slopes: Tensor, correlation: Tensor, rank: int) -> Tensor:
    """Orthonormal columns ``[N, F, rank]``: the directions of the targets that ``slopes`` explain most of.

    They span the eigenvectors of B^T R B (B ``slopes``, R ``correlation``, both ``[N, F, F]``) with the largest
    eigenvalues. Wide features go by subspace iteration in float32, with a few columns to spare, because all their
    eigenvectors would take most of the solving time. Where eigenvalues lie close together the span differs a little
    from the exact one: little is lost by that, because the directions taken instead explain almost as much.
    """
    features, columns = slopes.shape[-1], rank + SPARE_COLUMNS
    if 4 * columns > features:
        return _leading_eigenvectors(slopes.mT @ correlation @ slopes, rank)
    half = slopes.float()
    moment = half.mT @ correlation.float() @ half
    start = torch.randn(features, columns, generator=torch.Generator().manual_seed(0))
    basis = start.to(moment.device).expand(*moment.shape[:-2], features, columns)
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(moment @ basis).Q
    return (basis @ _leading_eigenvectors(basis.mT @ moment @ basis, rank)).to(slopes.dtype)


def _leading_eigenvectors(moment: Tensor, rank: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(moment).eigenvectors
    return vectors[..., -rank:]


def fit(sums: Sums, rank: int | None, ridge_tokens: float, shrink: float, dtype: torch.dtype) -> FittedMap:
    """Solve for the map of every block, in float64. ``dtype`` is that of the KV it will be applied to."""
    weight = sums.weight.double().clamp(min=1e-12)[:, None]
    mean_x, mean_y = sums.inputs.double() / weight, sums.targets.double() / weight
    mean = sums.mean().to(dtype)
    shift = shrink * mean_y
    if rank == 0:
        empty = mean.new_zeros(*mean.shape, 0)
        return FittedMap.of(mean, shift.to(dtype), empty, empty.mT)
    scale, correlation, factor = correlations(sums, ridge_tokens)
    cross = sums.cross.double() / weight[..., None] - mean_x[:, :, None] * mean_y[:, None, :]
    slopes = torch.cholesky_solve(cross / scale[..., None], factor)
    down, up = None, slopes / scale[..., None]
    if rank is not None:
        basis = leading_basis(slopes, correlation, rank)
        down, up = up @ basis, basis.mT
    # The mean is stored rounded to the KV's dtype: the shift takes up what that loses.
    missing = (mean.double() - sums.mean())[:, None]
    shift = shift + (missing @ up if down is None else missing @ down @ up)[:, 0]
    return FittedMap.of(mean, shift.to(dtype), None if down is None else down.to(dtype), up.to(dtype))
