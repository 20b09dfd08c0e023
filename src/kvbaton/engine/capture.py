"""Capture: collects the unrotated keys and values of one span as a pass computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbaton.engine.attention import QueryRows
from kvbaton.engine.hf import PackedPass, Watch
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Span


@dataclass
class Capture:
    """Buffers ``[L, H, T, D]`` of one span, filled row by row. ``entry``: also keep the hidden states entering it."""

    span: Span
    k: Tensor
    v: Tensor
    entry: int | None = None
    boundary: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, span: Span, geometry: Geometry, device: torch.device, entry: int | None) -> Capture:
        return cls(span, geometry.empty(len(span), device), geometry.empty(len(span), device), entry)

    def take(self, layer: int, view: PackedPass) -> None:
        """Copy the fresh rows of the span that this layer computed."""
        assert view.fresh is not None
        at, offsets = view.rows.within(self.span)
        fresh_k, fresh_v = (t[:, at] for t in view.fresh)
        if offsets.numel() == len(self.span):
            self.k[layer], self.v[layer] = fresh_k, fresh_v
        elif offsets.numel():
            self.k[layer].index_copy_(1, offsets, fresh_k)
            self.v[layer].index_copy_(1, offsets, fresh_v)

    def take_hidden(self, layer: int, rows: QueryRows, hidden: Tensor) -> None:
        """Keep the hidden states ``[A, hidden]`` that enter ``entry``."""
        if layer != self.entry:
            return
        at, offsets = rows.within(self.span)
        if offsets.numel():
            self._kept(layer, hidden).index_copy_(0, offsets, hidden[at])

    def put(self, offset: int, k: Tensor, v: Tensor, entering: Sequence[Tensor]) -> None:
        """One row: its ``k``, ``v`` ``[L, H, D]`` and the hidden states ``[hidden]`` that entered each layer."""
        self.k[:, :, offset], self.v[:, :, offset] = k, v
        if self.entry is not None:
            self._kept(self.entry, entering[self.entry])[offset] = entering[self.entry]

    def kv(self, source: str, exact: bool, tokens: int | None = None) -> KV:
        """What was captured, or its first ``tokens`` rows (copied, so that the rest can go)."""
        whole = KV(self.k, self.v, self.span.start, source, exact, tuple(self.boundary.items()))
        if tokens is None or tokens == len(self.span):
            return whole
        part = whole.rows(0, tokens)
        boundary = tuple((layer, h.clone()) for layer, h in part.boundary)
        return KV(part.k.clone(), part.v.clone(), part.start, source, exact, boundary)

    def _kept(self, layer: int, like: Tensor) -> Tensor:
        """The rows ``[T, hidden]`` of hidden states that enter ``layer``."""
        if layer not in self.boundary:
            self.boundary[layer] = like.new_empty(len(self.span), like.shape[-1])
        return self.boundary[layer]


class Captures(Watch):
    """A watch that only captures."""

    def __init__(self, captures: list[Capture]) -> None:
        self._captures = captures

    def enter(self, layer: int, rows: QueryRows, hidden: Tensor) -> tuple[QueryRows, Tensor]:
        for capture in self._captures:
            capture.take_hidden(layer, rows, hidden)
        return rows, hidden

    def leave(self, layer: int, view: PackedPass) -> None:
        for capture in self._captures:
            capture.take(layer, view)
