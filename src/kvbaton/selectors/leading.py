"""Leading: the first rows of every reused segment. EPIC's LegoLink, https://arxiv.org/abs/2410.15332."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbaton.errors import UsageError
from kvbaton.selectors.base import Fixed, Need, ReusedRows, Selection
from kvbaton.selectors.budget import check_share


@dataclass(frozen=True)
class Leading:
    """Compute the first rows of each reused segment, in every layer.

    Give ``share`` (of the segment's tokens, rounded half up) or ``rows`` (a count), not both; then at least
    ``min_rows`` and at most ``max_rows`` of a segment. Rows are counted from the segment's first token, so rows that
    the engine already computes exactly (`Recipe.lead_rows`) are part of the budget, not added to it.
    """

    share: float | None = None
    rows: int | None = None
    min_rows: int = 0
    max_rows: int | None = None
    needs: ClassVar[frozenset[Need]] = frozenset()
    entry: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.rows is None):
            raise UsageError("Leading takes share or rows, one of the two")
        if self.share is not None:
            check_share(self.share)
        if min(self.rows or 0, self.min_rows, 0 if self.max_rows is None else self.max_rows) < 0:
            raise UsageError("Leading counts rows: rows, min_rows and max_rows must be 0 or more")

    def begin(self, reused: ReusedRows) -> Selection:
        _, at = torch.unique(reused.segments, return_inverse=True)
        tokens = torch.zeros_like(reused.offsets).scatter_reduce(0, at, reused.offsets + 1, "amax")[at]
        if self.share is not None:
            rows = torch.floor(tokens.double() * self.share + 0.5).to(torch.int64)
        else:
            rows = torch.full_like(tokens, self.rows or 0)
        rows = rows.clamp(min=self.min_rows, max=self.max_rows)
        return Fixed(torch.nonzero(reused.offsets < rows).flatten())
