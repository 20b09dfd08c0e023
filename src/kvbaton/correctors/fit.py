"""Fit: a ridge regression on standardised features, cut to a rank.

    y = shrink * mean(y) + (x - mean(x)) A U        A [F, R], U [R, F]; rank None: A is left out, U is [F, F]

The ridge is a constant number of tokens, the same for every model, layer and head, and does not touch the mean
offset; that one is shrunk by the number of texts, because the mean of one text is not the mean of an edge.
Algorithm and measurements: docs/results/affine/README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbaton.correctors.fitted_map import FittedMap
from kvbaton.correctors.sums import Sums

SPARE_COLUMNS, ROUNDS = 8, 3
"""Of the subspace iteration: columns beside the wanted ones, and products with the matrix."""
NARROW = 128
"""Features up to which a solve in float64 takes a few hundredths of a second for a whole model."""
WELL_CONDITIONED = 5000
"""Condition number up to which float32 solves a standardised ridge to a thousandth."""


def correlations(sums: Sums, ridge_tokens: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scale s ``[N, F]``, correlation R ``[N, F, F]`` and the Cholesky factor of R + ridge, in `precision`."""
    dtype = precision(sums, ridge_tokens)
    weight = sums.weight.to(dtype).clamp(min=1e-12)
    mean = sums.inputs.to(dtype) / weight[:, None]
    spread = sums.gram.to(dtype) / weight[:, None, None]
    spread.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)
    variance = spread.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    scale = (variance + 1e-6 * variance.mean(-1, keepdim=True) + 1e-12).sqrt()
    correlation = spread.div_(scale[:, :, None]).div_(scale[:, None, :])
    ridged = correlation.clone()
    ridged.diagonal(dim1=-2, dim2=-1).add_((ridge_tokens / weight)[:, None])
    return scale, correlation, torch.linalg.cholesky(ridged)


def precision(sums: Sums, ridge_tokens: float) -> torch.dtype:
    """What a solve is done in: float64, but wide features in float32 while the ridge keeps F / ridge, the condition
    number at most, low.

    A low one is the rule for the first few dozen texts, when maps are solved often; narrow features cost nothing.
    """
    features = sums.gram.shape[-1]
    low = features * float(sums.weight.max()) < WELL_CONDITIONED * ridge_tokens
    return torch.float32 if low and features > NARROW else torch.float64


def leading_basis(cross: Tensor, correlation: Tensor, factor: Tensor, rank: int) -> Tensor:
    """Orthonormal columns ``[N, F, rank]``: the directions of the targets that the slopes explain most of.

    They span the eigenvectors of B^T R B with the largest eigenvalues, where R is the ``correlation``, the slopes are
    B = (R + ridge)^-1 C, C is ``cross`` (all ``[N, F, F]``) and ``factor`` the Cholesky factor of R + ridge. Wide
    features go by subspace iteration in float32, with a few columns to spare, because B itself and all its eigenvectors
    would take most of the solving time. Where eigenvalues lie close together the span differs a little from the exact
    one: little is lost by that, because the directions taken instead explain almost as much.
    """
    features, columns = cross.shape[-1], rank + SPARE_COLUMNS
    if 4 * columns > features:
        slopes = torch.cholesky_solve(cross, factor)
        return _leading_eigenvectors(slopes.mT @ correlation @ slopes, rank)
    c, r, inverse = cross.float(), correlation.float(), torch.cholesky_inverse(factor.float())

    def moment(basis: Tensor) -> Tensor:
        return c.mT @ (inverse @ (r @ (inverse @ (c @ basis))))

    start = torch.randn(features, columns, generator=torch.Generator().manual_seed(0))
    basis = start.to(c.device).expand(*c.shape[:-2], features, columns)
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(moment(basis)).Q
    return (basis @ _leading_eigenvectors(basis.mT @ moment(basis), rank)).to(cross.dtype)


def _leading_eigenvectors(moment: Tensor, rank: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(moment).eigenvectors
    return vectors[..., -rank:]


def fit(sums: Sums, rank: int | None, ridge_tokens: float, shrink: float, dtype: torch.dtype) -> FittedMap:
    """Solve for the map of every block. ``dtype`` is that of the KV it will be applied to."""
    weight = sums.weight.double().clamp(min=1e-12)[:, None]
    mean_x, mean_y = sums.inputs.double() / weight, sums.targets.double() / weight
    mean = sums.mean().to(dtype)
    shift = shrink * mean_y
    if rank == 0:
        empty = mean.new_zeros(*mean.shape, 0)
        return FittedMap.of(mean, shift.to(dtype), empty, empty.mT)
    scale, correlation, factor = correlations(sums, ridge_tokens)
    cross = sums.cross.to(scale.dtype) / weight[..., None].to(scale.dtype)
    cross.baddbmm_(mean_x[:, :, None].to(scale.dtype), mean_y[:, None, :].to(scale.dtype), alpha=-1)
    cross.div_(scale[..., None])
    if rank is None:
        down, up = None, torch.cholesky_solve(cross, factor) / scale[..., None]
    else:
        basis = leading_basis(cross, correlation, factor, rank)
        down, up = torch.cholesky_solve(cross @ basis, factor) / scale[..., None], basis.mT
    # The mean is stored rounded to the KV's dtype: the shift takes up what that loses.
    missing = (mean.double() - sums.mean())[:, None].to(scale.dtype)
    shift = shift + (missing @ up if down is None else missing @ down @ up)[:, 0]
    return FittedMap.of(mean, shift.to(dtype), None if down is None else down.to(dtype), up.to(dtype))
