"""What a corrector is: it adds to a source KV what the reader's prefix changed.

A corrector is a frozen dataclass of hyper-parameters. What it learns lives in an `EdgeState`, one an
edge, kept by `memory.Memory`. Parts see plain tensors, never a transformers or vLLM class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from kvbaton.errors import InvariantError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

LayerKV: TypeAlias = tuple[Tensor, Tensor]
"""Unrotated keys and values ``[H, T, D]`` of one layer."""

Correction: TypeAlias = Callable[[int], LayerKV]
"""Corrected, unrotated keys and values ``[H, m, D]`` of a layer's first rows, computed when asked.

All rows, or fewer, as many in every layer: those behind them stay as the source has them (`parts`). Never writes to its
source.
"""


@runtime_checkable
class EdgeState(Protocol):
    """What was learned about one edge."""

    @property
    def nbytes(self) -> int: ...
    @property
    def texts(self) -> int:
        """Texts learned from so far."""
        ...

    def merge(self, other: Any) -> None:
        """Take in what another worker learned on the same edge."""
        ...

    def to_tensors(self) -> Mapping[str, Tensor]:
        """Everything, as named tensors: `Corrector.new_state` then `from_tensors` gives back an equal state."""
        ...

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill from `to_tensors`. Raises StoreError on missing names, wrong shapes or non-finite values."""
        ...

    def check(self) -> None:
        """Raise InvariantError if the state is broken."""
        ...


class Corrector(Protocol):
    """Adds to a source KV what the new prefix changed."""

    @property
    def learns(self) -> bool:
        """False: no state, and the engine never calls `learn`."""
        ...

    @property
    def needs_truth(self) -> bool:
        """True: the engine runs an untimed dense pass first and calls `reveal` instead of looking up learned state."""
        ...

    def new_state(self, geometry: Geometry) -> EdgeState: ...

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        """Whether `correct` would change anything; False is planned as a plain reuse."""
        ...

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        """Prepare the correction of ``source`` for use at ``place``. Pure; unrotated in, unrotated out."""
        ...

    def learn(self, state: EdgeState, source: KV, target: KV) -> None:
        """Take in one exact pair: the same text as ``source`` held it and as the reader computed it."""
        ...

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        """State made from the true KV, for correctors with `needs_truth`; others raise InvariantError."""
        ...


Turn: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""``turn(x [H, T, D], positions, layer)``: keys turned by so many positions with the model's own frequencies."""


@runtime_checkable
class Turning(Protocol):
    """A corrector whose offsets are rotated, as some released code has them, so that it needs the model's rotation."""

    def correct_turned(self, state: Any, source: KV, place: Place, turn: Turn) -> Correction:
        """`Corrector.correct` with the rotation at hand; the engine calls it instead."""
        ...


def parts(correction: Correction, source: KV, layer: int) -> list[LayerKV]:
    """A layer's keys and values in order: the corrected rows, then, not copied, the source's own where any are left."""
    near = correction(layer)
    rows = near[0].shape[1]
    return [near] if rows == len(source) else [near, (source.k[layer][:, rows:], source.v[layer][:, rows:])]


def joined(split: Sequence[LayerKV]) -> LayerKV:
    """All rows of a layer ``[H, T, D]`` from its `parts`, copied where there are several."""
    return split[0] if len(split) == 1 else (torch.cat([k for k, _ in split], 1), torch.cat([v for _, v in split], 1))


def as_is(source: KV) -> Correction:
    """The correction that changes nothing."""
    return lambda layer: (source.k[layer], source.v[layer])


def no_reveal(_truth: KV, _source: KV) -> EdgeState:
    """`Corrector.reveal` of every corrector that lives on what it learned."""
    raise InvariantError("reveal() was called on a corrector that needs no truth")
