"""LayerBlock: every reused row inside one block of layers. DroidSpeak, https://arxiv.org/abs/2411.02820."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbaton.errors import UsageError
from kvbaton.selectors.base import LayerView, Need, ReusedRows, Selection


@dataclass(frozen=True)
class LayerBlock:
    """Compute all reused rows in layers ``first`` to ``last``, both included; reuse every other layer.

    Rows enter at ``first`` from the hidden states that the source kept there, so they carry the source's context. The
    block is found offline by `kvbaton.bench.profile`; the paper's full recomputation is ``first=0`` to the last layer.
    """

    first: int = 1
    last: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise UsageError(f"LayerBlock needs 0 <= first <= last, got first={self.first}, last={self.last}")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.HIDDEN_AT_ENTRY}) if self.first else frozenset()

    @property
    def entry(self) -> int | None:
        return self.first or None

    def begin(self, reused: ReusedRows) -> Selection:
        if self.last >= reused.layers:
            raise UsageError(f"LayerBlock ends at layer {self.last}: set selector.last to at most the model's last "
                             f"layer, {reused.layers - 1}")
        return _Block(self, reused)


@dataclass(frozen=True)
class _Block:
    block: LayerBlock
    reused: ReusedRows

    def _at(self, layer: int) -> Tensor:
        return self.reused.all() if self.block.first <= layer <= self.block.last else self.reused.none()

    def start(self) -> Tensor:
        return self._at(0)

    def after(self, layer: int, view: LayerView) -> Tensor:
        return self._at(layer + 1)
