"""QueryAttention: the rows that the question looks at. ProphetKV, https://arxiv.org/abs/2602.02579."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbaton.errors import InvariantError
from kvbaton.selectors.base import Fixed, Need, ReusedRows, Selection
from kvbaton.selectors.budget import best, check_share, rows_of


@dataclass(frozen=True)
class QueryAttention:
    """Compute the ``share`` of reused rows that the private rows attend to most, summed over layers, in every layer.

    The attention comes from a first pass of the private rows alone over the reused KV, which is charged to the method.
    """

    share: float = 0.2
    needs: ClassVar[frozenset[Need]] = frozenset({Need.QUERY_PASS})
    entry: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_share(self.share)

    def begin(self, reused: ReusedRows) -> Selection:
        if reused.attention is None:
            raise InvariantError("QueryAttention was begun without the attention of a query pass")
        return Fixed(best(reused.attention, rows_of(self.share, len(reused))))
