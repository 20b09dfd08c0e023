"""CorrectionSize takes the rows that the correction changes most."""

from __future__ import annotations

import pytest
import torch

from kvbaton.errors import InvariantError, UsageError
from kvbaton.selectors.base import ReusedRows
from kvbaton.selectors.correction import CorrectionSize


def rows(sizes: list[float] | None, n: int = 10) -> ReusedRows:
    at = torch.arange(n)
    return ReusedRows(at + 5, at, torch.zeros(n, dtype=torch.int64), 4,
                      correction=None if sizes is None else torch.tensor(sizes))


def test_takes_the_largest_corrections_in_position_order() -> None:
    sizes = [0.0, 5.0, 1.0, 9.0, 2.0, 2.0, 0.5, 8.0, 0.1, 0.2]
    assert CorrectionSize(share=0.3).begin(rows(sizes)).start().tolist() == [1, 3, 7]
    assert CorrectionSize(share=0.0, min_rows=1).begin(rows(sizes)).start().tolist() == [3]
    assert CorrectionSize(share=1.0).begin(rows(sizes)).start().tolist() == list(range(10))
    assert CorrectionSize(share=0.0, min_rows=99).begin(rows(sizes)).start().tolist() == list(range(10))


def test_rows_that_are_computed_anyway_are_part_of_the_budget() -> None:
    """Two segments of 10 rows whose first four are computed anyway: 12 rows can be chosen from."""
    offsets = torch.arange(4, 10).repeat(2)
    reused = ReusedRows(torch.arange(12), offsets, torch.tensor([0] * 6 + [1] * 6), 4,
                        correction=torch.arange(12.0))
    assert CorrectionSize(share=0.5).begin(reused).start().tolist() == [10, 11]
    assert CorrectionSize(share=0.4).begin(reused).start().tolist() == []
    assert CorrectionSize(share=1.0).begin(reused).start().tolist() == list(range(12))


def test_without_any_correction_the_first_rows_are_taken() -> None:
    assert CorrectionSize(share=0.2).begin(rows([0.0] * 10)).start().tolist() == [0, 1]


def test_misuse_is_refused() -> None:
    with pytest.raises(UsageError):
        CorrectionSize(share=1.5)
    with pytest.raises(UsageError):
        CorrectionSize(min_rows=-1)
    with pytest.raises(InvariantError):
        CorrectionSize().begin(rows(None))
