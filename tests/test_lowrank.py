"""Randomised SVD against the exact one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.errors import InvariantError
from kvbaton.lowrank import LowRank, effective_rank


def decaying(*shape: int, power: float = 1.0, seed: int = 0) -> Tensor:
    """Random matrices ``shape`` whose singular values fall as 1 / i**power."""
    generator = torch.Generator().manual_seed(seed)
    small = min(shape[-2:])
    left = torch.linalg.qr(torch.randn(*shape[:-1], small, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(*shape[:-2], shape[-1], small, generator=generator)).Q
    return left * torch.arange(1, small + 1) ** -power @ right.mT


def best_error(matrix: Tensor, rank: int) -> Tensor:
    """Relative error of the best approximation of that rank (Eckart-Young)."""
    energy = torch.linalg.svdvals(matrix.double()).square()
    return (energy[..., rank:].sum(-1) / energy.sum(-1)).sqrt().float()


@pytest.mark.parametrize("shape", [(3, 200, 48), (3, 40, 400), (2, 3, 90, 64), (60, 60)])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_close_to_the_best_of_its_rank(shape: tuple[int, ...], rank: int) -> None:
    matrix = decaying(*shape)
    found = LowRank.fit(matrix, rank)
    assert found.left.shape == (*shape[:-1], rank)
    assert found.right.shape == (*shape[:-2], rank, shape[-1])
    assert (found.error(matrix) <= best_error(matrix, rank) * 1.02).all()
    torch.testing.assert_close(found.right @ found.right.mT, torch.eye(rank).expand(*shape[:-2], rank, rank),
                               atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(2, 30, 8), (2, 8, 30), (2, 9, 9), (2, 1, 7), (2, 7, 1)])
def test_exact_at_full_rank(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape)
    found = LowRank.fit(matrix, 99)
    assert found.rank == min(shape[-2:])
    torch.testing.assert_close(found.dense(), matrix, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 40), channels=st.integers(1, 40), true_rank=st.integers(0, 8), rank=st.integers(1, 12),
       seed=st.integers(0, 99))
def test_recovers_a_matrix_of_low_rank(tokens: int, channels: int, true_rank: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(2, tokens, true_rank, generator=generator)
              @ torch.randn(2, true_rank, channels, generator=generator))
    found = LowRank.fit(matrix, rank)
    assert found.rank == min(rank, tokens, channels)
    assert found.dense().isfinite().all()
    if rank >= true_rank:
        torch.testing.assert_close(found.dense(), matrix, rtol=1e-3, atol=1e-3)


def test_equal_input_gives_equal_factors_whatever_the_batch() -> None:
    matrix = decaying(4, 100, 48)
    once, twice, alone = LowRank.fit(matrix, 8), LowRank.fit(matrix, 8), LowRank.fit(matrix[1:2], 8)
    assert torch.equal(once.left, twice.left)
    assert torch.equal(once.right, twice.right)
    torch.testing.assert_close(alone.dense()[0], once.dense()[1], rtol=1e-4, atol=1e-6)
    assert not torch.equal(LowRank.fit(matrix, 8, seed=1).left, once.left)


def test_few_and_many_channels_agree() -> None:
    matrix = decaying(2, 300, 80, power=1.5)
    gram, passes = LowRank.fit(matrix, 8), LowRank.fit(matrix, 8, oversample=0, power_iterations=3)
    assert (passes.error(matrix) <= gram.error(matrix) * 1.02).all()


def test_views_sizes_and_errors() -> None:
    found = LowRank.fit(decaying(2, 30, 20), 4)
    torch.testing.assert_close(found.rows(7).dense(), found.dense()[:, :7])
    assert found.rows(7).left.data_ptr() == found.left.data_ptr()
    assert found.nbytes == 4 * 2 * 4 * (30 + 20)
    assert found.to(torch.bfloat16).nbytes == found.nbytes // 2
    assert LowRank.fit(torch.zeros(2, 9, 9), 3).error(torch.zeros(2, 9, 9)).tolist() == [0, 0]
    with pytest.raises(InvariantError, match="rank"):
        LowRank.fit(torch.zeros(3, 3), 0)
    with pytest.raises(InvariantError, match="do not fit"):
        LowRank(torch.zeros(2, 3, 4), torch.zeros(2, 5, 6))


def test_half_precision_input_is_fitted_in_float32() -> None:
    matrix = decaying(1, 60, 40).to(torch.bfloat16)
    found = LowRank.fit(matrix, 8)
    assert found.left.dtype == torch.float32
    assert (found.error(matrix) <= best_error(matrix, 8) * 1.02).all()


@settings(max_examples=30, deadline=None)
@given(power=st.floats(0.0, 3.0), share=st.floats(0.1, 1.0), seed=st.integers(0, 20))
def test_effective_rank_is_the_least_that_keeps_the_share(power: float, share: float, seed: int) -> None:
    matrix = decaying(3, 12, 9, power=power, seed=seed)
    for m, rank in zip(matrix, effective_rank(matrix, share).tolist(), strict=True):
        assert 1 <= rank <= 9
        assert rank == 9 or 1 - best_error(m, rank) ** 2 >= share - 1e-5
        assert rank == 1 or 1 - best_error(m, rank - 1) ** 2 <= share + 1e-5


def test_effective_rank_of_known_spectra() -> None:
    diagonal = torch.diag_embed(torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    assert effective_rank(diagonal).tolist() == [1, 3, 1]
    assert effective_rank(diagonal, 0.95).tolist() == [2, 3, 1]
