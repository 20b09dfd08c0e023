"""Fit: a ridge regression on standardised features, cut to a rank.

    y = m / (m + p) mean(y) + limited((x - mean(x)) A) U      A [F, R], U [R, F]; rank None: R is F
    limited(z) = z min(1, 1 / |z|)                         A is scaled so that |z| is 1 at the limit

The ridge is a constant number of tokens, the same for every model, layer and head, and does not touch the mean
offset; that one is shrunk by the number m of texts, because the mean of one text is not the mean of an edge.
Algorithm and measurements: docs/results/affine/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvbaton.correctors.fitted_map import FittedMap
from kvbaton.correctors.sums import Sums

if TYPE_CHECKING:
    from kvbaton.correctors.affine import Affine

SPARE_COLUMNS = 16
"""Of the subspace iteration: columns beside the wanted ones."""
NARROW = 128
"""Features up to which a solve in float64 takes a few hundredths of a second for a whole model."""
WELL_CONDITIONED = 5000
"""Condition number up to which float32 solves a standardised ridge to a thousandth."""


@dataclass(frozen=True)
class Ridge:
    """Inputs of N blocks and the ridge upon them: ``factor`` ``[N, F, F]``, the Cholesky factor of A = G + diag(added),
    where G is their gram about the mean and ``added`` ``[N, F]`` what the ridge adds; in `precision`.

    A ridge in proportion to a feature's variance is the same as an even one on standardised features.
    """

    factor: Tensor
    added: Tensor

    @classmethod
    def of(cls, sums: Sums, ridge_tokens: float) -> Ridge:
        dtype = precision(sums, ridge_tokens)
        inputs, weight = sums.inputs.to(dtype), sums.weight.to(dtype).clamp(min=1e-12)[:, None]
        gram = sums.gram.to(dtype).addcmul(inputs[:, :, None], (inputs / weight)[:, None], value=-1)
        variance = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0) / weight
        added = ridge_tokens * (variance + 1e-6 * variance.mean(-1, keepdim=True) + 1e-12)
        gram.diagonal(dim1=-2, dim2=-1).add_(added)
        return cls(torch.linalg.cholesky(gram), added)

    def solve(self, cross: Tensor) -> Tensor:
        """A^-1 ``cross`` ``[N, F, M]``."""
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


class Cut(NamedTuple):
    """Slopes that are cut to a rank: A^-1 C U^T U, where C ``[N, F, F]`` is the cross-products of inputs and targets.

    ``slopes`` ``[N, F, R]`` A^-1 C U^T; ``basis`` ``[N, F, R]`` U^T, orthonormal columns; ``explained`` ``[N]``
    tr(U C^T A^-1 C U^T).
    """

    slopes: Tensor
    basis: Tensor
    explained: Tensor


def uncut(cross: Tensor, inputs: Ridge) -> Cut:
    """All of the slopes on ``cross``."""
    slopes = inputs.solve(cross)
    basis = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device).expand_as(cross)
    return Cut(slopes, basis, (cross * slopes).sum((-2, -1)))


def cut(cross: Tensor, inputs: Ridge, rank: int) -> Cut:
    """Those along the directions of the targets that they explain most of.

    These are the eigenvectors of M = C^T A^-1 C with the largest eigenvalues (reduced-rank ridge regression, Mukherjee
    and Zhu 2011). Wide features go by subspace iteration (Halko, Martinsson and Tropp 2011) in float32, with some
    columns to spare, because A^-1 C and all eigenvectors would take most of the solving time: what is explained stays
    within a hundredth of the exact cut's (tests/test_affine.py).
    """
    features, columns = cross.shape[-1], rank + SPARE_COLUMNS
    if 4 * columns > features:
        whole = uncut(cross, inputs)
        return _best(whole.slopes, whole.basis, cross, rank)
    narrow = Ridge(inputs.factor.float(), inputs.added.float())
    c = cross.float()
    start = torch.randn(features, columns, generator=torch.Generator().manual_seed(0)).to(c.device)
    # The first product takes A for its diagonal, which is in proportion to what the ridge adds: the next one does not.
    basis = torch.linalg.qr(c.mT @ (start / narrow.added[..., None].sqrt())).Q
    basis = torch.linalg.qr(c.mT @ narrow.solve(c @ basis)).Q
    targets = c @ basis
    return Cut(*(part.to(cross.dtype) for part in _best(narrow.solve(targets), basis, targets, rank)))


def _best(slopes: Tensor, basis: Tensor, targets: Tensor, rank: int) -> Cut:
    """The best directions within ``basis`` (Rayleigh-Ritz); ``targets`` are C basis, ``slopes`` A^-1 targets."""
    values, vectors = torch.linalg.eigh(targets.mT @ slopes)
    vectors = vectors[..., -rank:]
    return Cut(slopes @ vectors, basis @ vectors, values[..., -rank:].sum(-1))


def fit(sums: Sums, rule: Affine, texts: float, dtype: torch.dtype) -> FittedMap:
    """Solve for the map of every block, from so many texts. ``dtype`` is that of the KV it will be applied to."""
    weight = sums.weight.double().clamp(min=1e-12)[:, None]
    mean_y, exact = sums.targets.double() / weight, sums.mean()
    mean, shift = exact.to(dtype), texts / (texts + rule.offset_prior) * mean_y
    if rule.rank == 0:
        empty = mean.new_zeros(*mean.shape, 0)
        return FittedMap.of(mean, shift.to(dtype), empty, empty.mT)
    inputs = Ridge.of(sums, rule.ridge_tokens)
    solved = inputs.factor.dtype
    cross = sums.cross.to(solved).addcmul(sums.inputs.to(solved)[:, :, None], mean_y.to(solved)[:, None], value=-1)
    found = uncut(cross, inputs) if rule.rank is None else cut(cross, inputs, rule.rank)
    # Mean square of the slopes of the rows learned: tr(S^T G S) with G = A - diag(added), over their weight.
    squares = found.explained - (inputs.added[..., None] * found.slopes.square()).sum((-2, -1))
    usual = (squares.clamp(min=0) / weight[:, 0].to(solved)).sqrt()
    limit = (rule.slope_limit * usual + 1e-12)[:, None, None]
    down, up = found.slopes / limit, found.basis.mT * limit
    # The mean is stored rounded to the KV's dtype: the shift takes up what that loses.
    missing = (mean.double() - exact)[:, None].to(solved)
    shift = shift + (missing @ down @ up)[:, 0]
    return FittedMap.of(mean, shift.to(dtype), down.to(dtype), up.to(dtype))
