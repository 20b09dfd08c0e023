"""Fit: a ridge regression on standardised features, cut to a rank.

    y = shrink * mean(y) + (x - mean(x)) A U        A [F, R], U [R, F]; rank None: A is left out, U is [F, F]

The ridge is a constant number of tokens, the same for every model, layer and head, and does not touch the mean
offset; that one is shrunk by the number of texts, because the mean of one text is not the mean of an edge.
Algorithm and measurements: docs/results/affine/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbaton.correctors.fitted_map import FittedMap
from kvbaton.correctors.sums import Sums

SPARE_COLUMNS = 12
"""Of the subspace iteration: columns beside the wanted ones."""
NARROW = 128
"""Features up to which a solve in float64 takes a few hundredths of a second for a whole model."""
WELL_CONDITIONED = 5000
"""Condition number up to which float32 solves a standardised ridge to a thousandth."""


@dataclass(frozen=True)
class Standardised:
    """Inputs of N blocks, standardised: ``scale`` s ``[N, F]``, ``ridge`` ``[N]`` and the Cholesky ``factor``
    ``[N, F, F]`` of R + ridge, where R is their correlation; in `precision`."""

    scale: Tensor
    ridge: Tensor
    factor: Tensor

    @classmethod
    def of(cls, sums: Sums, ridge_tokens: float) -> Standardised:
        dtype = precision(sums, ridge_tokens)
        weight = sums.weight.to(dtype).clamp(min=1e-12)
        mean, ridge = sums.inputs.to(dtype) / weight[:, None], ridge_tokens / weight
        spread = sums.gram.to(dtype) / weight[:, None, None]
        spread.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)
        variance = spread.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        scale = (variance + 1e-6 * variance.mean(-1, keepdim=True) + 1e-12).sqrt()
        spread.div_(scale[:, :, None]).div_(scale[:, None, :])
        spread.diagonal(dim1=-2, dim2=-1).add_(ridge[:, None])
        return cls(scale, ridge, torch.linalg.cholesky(spread))

    def solve(self, cross: Tensor) -> Tensor:
        """(R + ridge)^-1 ``cross`` ``[N, F, M]``."""
        solved: Tensor = torch.cholesky_solve(cross, self.factor)
        return solved


def precision(sums: Sums, ridge_tokens: float) -> torch.dtype:
    """What a solve is done in: float64, but wide features in float32 while the ridge keeps F / ridge, the condition
    number at most, low.

    A low one is the rule for the first few dozen texts, when maps are solved often; narrow features cost nothing.
    """
    features = sums.gram.shape[-1]
    low = features * float(sums.weight.max()) < WELL_CONDITIONED * ridge_tokens
    return torch.float32 if low and features > NARROW else torch.float64


def leading_basis(cross: Tensor, inputs: Standardised, rank: int) -> Tensor:
    """Orthonormal columns ``[N, F, rank]``: the directions of the targets that the slopes explain most of.

    They span the eigenvectors of M = B^T R B with the largest eigenvalues, where the slopes are B = (R + ridge)^-1 C
    and C is ``cross`` ``[N, F, F]``; R B = C - ridge B. Wide features go by one subspace iteration and a Nystrom step
    in float32, with a few columns to spare, because B itself and all eigenvectors would take most of the solving time:
    what is explained stays within a hundredth of the exact basis' (tests/test_affine.py).
    """
    features, columns, ridge = cross.shape[-1], rank + SPARE_COLUMNS, inputs.ridge[:, None, None]
    if 4 * columns > features:
        slopes = inputs.solve(cross)
        vectors: Tensor = torch.linalg.eigh(slopes.mT @ (cross - ridge * slopes)).eigenvectors
        return vectors[..., -rank:]
    c, inverse, ridge = cross.float(), torch.cholesky_inverse(inputs.factor.float()), ridge.float()

    def moment(basis: Tensor) -> Tensor:
        slopes = inverse @ (c @ basis)
        return c.mT @ (slopes - ridge * (inverse @ slopes))

    start = torch.randn(features, columns, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(moment(start.to(c.device).expand(*c.shape[:-2], features, columns))).Q
    image = moment(basis)
    # Nystrom: M is close to F F^T with F = image (basis^T M basis)^-1/2; its eigenvectors come from the small F^T F.
    root = _whitened(image, basis.mT @ image)
    return _whitened(root, root.mT @ root)[..., -rank:].to(cross.dtype)


def _whitened(x: Tensor, moment: Tensor) -> Tensor:
    """``x`` times the eigenvectors of a symmetric ``moment``, each over the root of its eigenvalue, largest last."""
    values, vectors = torch.linalg.eigh(moment)
    scaled: Tensor = vectors / (values.clamp(min=1e-6 * values[..., -1:]) + 1e-30).sqrt()[..., None, :]
    return x @ scaled


def fit(sums: Sums, rank: int | None, ridge_tokens: float, shrink: float, dtype: torch.dtype) -> FittedMap:
    """Solve for the map of every block. ``dtype`` is that of the KV it will be applied to."""
    weight = sums.weight.double().clamp(min=1e-12)[:, None]
    mean_x, mean_y = sums.inputs.double() / weight, sums.targets.double() / weight
    exact = sums.mean()
    mean, shift = exact.to(dtype), shrink * mean_y
    if rank == 0:
        empty = mean.new_zeros(*mean.shape, 0)
        return FittedMap.of(mean, shift.to(dtype), empty, empty.mT)
    found = Standardised.of(sums, ridge_tokens)
    scale = found.scale[..., None]
    cross = sums.cross.to(scale.dtype) / weight[..., None].to(scale.dtype)
    cross.baddbmm_(mean_x[:, :, None].to(scale.dtype), mean_y[:, None, :].to(scale.dtype), alpha=-1).div_(scale)
    if rank is None:
        down, up = None, found.solve(cross) / scale
    else:
        basis = leading_basis(cross, found, rank)
        down, up = found.solve(cross @ basis) / scale, basis.mT
    # The mean is stored rounded to the KV's dtype: the shift takes up what that loses.
    missing = (mean.double() - exact)[:, None].to(scale.dtype)
    shift = shift + (missing @ up if down is None else missing @ down @ up)[:, 0]
    return FittedMap.of(mean, shift.to(dtype), None if down is None else down.to(dtype), up.to(dtype))
