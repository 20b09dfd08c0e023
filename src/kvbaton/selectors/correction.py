"""CorrectionSize: the rows that the correction changes most. Ours: the one score that beat the first rows (slightly).

A row whose value the correction moves far is a row that the new prefix changed far, and a linear map gets that wrong
in proportion. The score is free: the correction is computed anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbaton.errors import InvariantError, UsageError
from kvbaton.selectors.base import Fixed, Need, ReusedRows, Selection
from kvbaton.selectors.budget import best, check_share, rows_of


@dataclass(frozen=True)
class CorrectionSize:
    """Compute the rows with the largest value correction: a ``share`` of all shared rows, at least ``min_rows``.

    Rows that the engine computes anyway (`Recipe.lead_rows`) are part of the budget, as in `Leading`. The choice is
    made before layer 0 and kept. Chosen rows are scattered, so unlike leading rows they are computed over approximate
    neighbours.
    """

    share: float = 0.1
    min_rows: int = 0
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CORRECTION_SIZE})
    entry: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_share(self.share)
        if self.min_rows < 0:
            raise UsageError(f"min_rows must be 0 or more, got {self.min_rows}")

    def begin(self, reused: ReusedRows) -> Selection:
        if reused.correction is None:
            raise InvariantError("CorrectionSize was begun without the size of the corrections")
        _, at = torch.unique(reused.segments, return_inverse=True)
        tokens = torch.zeros_like(reused.offsets).scatter_reduce(0, at, reused.offsets + 1, "amax")
        total = int(tokens[:int(at.max()) + 1].sum()) if len(reused) else 0
        wanted = max(rows_of(self.share, total), self.min_rows) - (total - len(reused))
        return Fixed(best(torch.nan_to_num(reused.correction), min(max(wanted, 0), len(reused))))
