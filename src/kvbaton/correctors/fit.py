"""Fit: a ridge regression on standardised features, cut to a rank.

    y = shrink * mean(y) + limited((x - mean(x)) A) U      A [F, R], U [R, F]; rank None: R is F
    limited(z) = z min(1, 1 / |z|)                         A is scaled so that |z| is 1 at the limit

The ridge is a constant number of tokens, the same for every model, layer and head, and does not touch the mean
offset; that one is shrunk by the number of texts, because the mean of one text is not the mean of an edge.
Algorithm and measurements: docs/results/affine/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbaton.correctors.fitted_map import FittedMap
from kvbaton.correctors.sums import Sums

if TYPE_CHECKING:
    from kvbaton.correctors.affine import Affine

SPARE_COLUMNS = 12
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


def leading_basis(cross: Tensor, inputs: Ridge, rank: int) -> Tensor:
    """Orthonormal columns ``[N, F, rank]``: the directions of the targets that the slopes explain most of.

    They span the eigenvectors of M = C^T A^-1 C with the largest eigenvalues, where C is ``cross`` ``[N, F, F]``
    (reduced-rank ridge regression, Mukherjee and Zhu 2011). Wide features go by one subspace iteration and a Nystrom
    step in float32, with a few columns to spare, because A^-1 C and all eigenvectors would take most of the solving
    time: what is explained stays within a hundredth of the exact basis' (tests/test_affine.py).
    """
    features, columns = cross.shape[-1], rank + SPARE_COLUMNS
    if 4 * columns > features:
        vectors: Tensor = torch.linalg.eigh(cross.mT @ inputs.solve(cross)).eigenvectors
        return vectors[..., -rank:]
    c, factor = cross.float(), inputs.factor.float()

    def moment(basis: Tensor) -> Tensor:
        return c.mT @ torch.cholesky_solve(c @ basis, factor)

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


def fit(sums: Sums, rule: Affine, shrink: float, dtype: torch.dtype) -> FittedMap:
    """Solve for the map of every block. ``dtype`` is that of the KV it will be applied to."""
    weight = sums.weight.double().clamp(min=1e-12)[:, None]
    mean_y, exact = sums.targets.double() / weight, sums.mean()
    mean, shift = exact.to(dtype), shrink * mean_y
    if rule.rank == 0:
        empty = mean.new_zeros(*mean.shape, 0)
        return FittedMap.of(mean, shift.to(dtype), empty, empty.mT)
    inputs = Ridge.of(sums, rule.ridge_tokens)
    solved = inputs.factor.dtype
    cross = sums.cross.to(solved).addcmul(sums.inputs.to(solved)[:, :, None], mean_y.to(solved)[:, None], value=-1)
    if rule.rank is None:
        basis = torch.eye(cross.shape[-1], dtype=solved, device=cross.device).expand_as(cross)
    else:
        basis = leading_basis(cross, inputs, rule.rank)
    targets = cross @ basis
    slopes = inputs.solve(targets)
    # Squared slopes of the rows learned, summed: tr(S^T G S) with G = A - diag(added) and A S = targets.
    squares = (slopes * (targets - inputs.added[..., None] * slopes)).sum((-2, -1)).clamp(min=0)
    limit = (rule.slope_limit * (squares / weight[:, 0].to(solved)).sqrt() + 1e-12)[:, None, None]
    down, up = slopes / limit, basis.mT * limit
    # The mean is stored rounded to the KV's dtype: the shift takes up what that loses.
    missing = (mean.double() - exact)[:, None].to(solved)
    shift = shift + (missing @ down @ up)[:, 0]
    return FittedMap.of(mean, shift.to(dtype), down.to(dtype), up.to(dtype))
