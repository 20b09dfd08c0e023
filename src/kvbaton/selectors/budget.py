"""Budgets: a share of rows as a count, and the best rows of a score. Used by every selector with a budget."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbaton.errors import UsageError


def check_share(share: float, what: str = "share") -> None:
    """Raise UsageError unless ``share`` is a ratio."""
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"{what} is a ratio of rows from 0 to 1, got {share}")


def rows_of(share: float, rows: int) -> int:
    """``share`` of ``rows`` as a count, rounded half up."""
    return min(rows, int(share * rows + 0.5))


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` highest of ``scores`` ``[n]``, sorted; on a tie the earlier row wins."""
    order = torch.argsort(scores.float(), descending=True, stable=True)
    return torch.sort(order[:count]).values
