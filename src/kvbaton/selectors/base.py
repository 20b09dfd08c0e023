"""What a selector is: it says which reused rows are computed afresh, layer by layer.

    layer      0    1    2    3   ...  L-1
    private    ■    ■    ■    ■         ■     always active
    reused     ■    ■    ·    ·         ·     a selector's choice: rows leave, or enter where their
                                              hidden states were kept
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Need(Enum):
    """What a selector wants from the engine; an engine that lacks one refuses at start."""

    HIDDEN_AT_ENTRY = auto()
    """Hidden states kept by the source, so that rows can enter above layer 0."""
    QUERY_ATTENTION = auto()
    """Attention that the last prompt rows pay to the reused rows, from the packed pass itself."""
    QUERY_PASS = auto()
    """The same, over all layers, from a pass of the private rows alone before any row is chosen."""
    CORRECTION_SIZE = auto()
    """Size of the correction of every reused row."""


@dataclass(frozen=True)
class ReusedRows:
    """The reused rows of one prompt: n rows over all reused segments, in position order.

    ``positions`` ``[n]`` int64; ``offsets`` ``[n]`` index of a row inside its segment; ``segments`` ``[n]`` index of
    its segment; ``layers`` L. ``attention`` ``[n]`` (Need.QUERY_PASS) and ``correction`` ``[n]`` (Need.CORRECTION_SIZE)
    are None where not needed.
    """

    positions: Tensor
    offsets: Tensor
    segments: Tensor
    layers: int
    attention: Tensor | None = None
    correction: Tensor | None = None

    def __len__(self) -> int:
        return int(self.positions.numel())

    def none(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.positions.device)

    def all(self) -> Tensor:
        return torch.arange(len(self), device=self.positions.device)


class Compared(NamedTuple):
    """A rows computed afresh beside what is reused for them: ``[H, A, D]`` each, keys unrotated."""

    fresh_k: Tensor
    fresh_v: Tensor
    reused_k: Tensor
    reused_v: Tensor


@dataclass(frozen=True)
class LayerView:
    """What a layer shows to a selection: A active reused rows, valid until the call returns.

    ``rows`` ``[A]`` indices into `ReusedRows`; ``compare()`` gathers their keys and values; ``attention()`` ``[n]``
    mass that the last ``queries`` prompt rows pay to every reused row in this layer, summed over query heads
    (Need.QUERY_ATTENTION). Both cost nothing until they are called.
    """

    rows: Tensor
    compare: Callable[[], Compared]
    attention: Callable[[int], Tensor]


class Selection(Protocol):
    """One prompt's choice, asked after every layer. Mutable, used by one pass only."""

    def start(self) -> Tensor:
        """Rows (indices into `ReusedRows`, sorted) active at layer 0."""
        ...

    def after(self, layer: int, view: LayerView) -> Tensor:
        """Rows active at ``layer + 1``, sorted; rows not active at ``layer`` may only enter at `Selector.entry`."""
        ...


class Selector(Protocol):
    """Chooses the reused rows that are computed afresh. A frozen dataclass of hyper-parameters."""

    @property
    def needs(self) -> frozenset[Need]: ...

    @property
    def entry(self) -> int | None:
        """Layer at which rows may enter from kept hidden states (Need.HIDDEN_AT_ENTRY), else None."""
        ...

    def begin(self, reused: ReusedRows) -> Selection: ...


@dataclass(frozen=True)
class Fixed:
    """A selection that never changes above layer 0."""

    rows: Tensor

    def start(self) -> Tensor:
        return self.rows

    def after(self, layer: int, view: LayerView) -> Tensor:
        return self.rows


@dataclass(frozen=True)
class NoRows:
    """Full reuse: no reused row is computed."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    entry: ClassVar[int | None] = None

    def begin(self, reused: ReusedRows) -> Selection:
        return Fixed(reused.none())


@dataclass(frozen=True)
class AllRows:
    """Dense: every row is computed in every layer."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    entry: ClassVar[int | None] = None

    def begin(self, reused: ReusedRows) -> Selection:
        return Fixed(reused.all())
