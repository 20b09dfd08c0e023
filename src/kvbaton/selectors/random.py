"""RandomRows: the control. A method that does not beat it at the same budget has selected nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbaton.selectors.base import Fixed, Need, ReusedRows, Selection
from kvbaton.selectors.budget import check_share, rows_of


@dataclass(frozen=True)
class RandomRows:
    """Compute a random ``share`` of the reused rows in every layer; equal ``seed`` and row count give equal rows."""

    share: float = 0.1
    seed: int = 0
    needs: ClassVar[frozenset[Need]] = frozenset()
    entry: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_share(self.share)

    def begin(self, reused: ReusedRows) -> Selection:
        order = torch.randperm(len(reused), generator=torch.Generator().manual_seed(self.seed))
        rows = torch.sort(order[: rows_of(self.share, len(reused))]).values
        return Fixed(rows.to(reused.positions.device))
