"""Attention of scattered query rows over one cache, with the exact causal mask.

Rows are sorted by position and the cache slot of a token is its position, so a block of rows sees the slots
``[0, last row's position]`` and the mask inside a block is ``slot <= position`` (and ``> position - window``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbaton.prompt import Span

BLOCK_ROWS = 256
GAP_ROWS = 128
"""Rows further apart than this are attended in blocks of their own: early rows need not look at late slots."""
SPAN_SLOTS, SPANS = 512, 16
"""So are rows of different spans of so many positions (more on long prompts, which have at most so many spans)."""


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks for: ``scale`` of the logits, sliding ``window`` in tokens, logit ``softcap``."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass
class QueryRows:
    """A query rows at ``positions`` ``[A]``, ascending. Built once a row set, used by every layer."""

    positions: Tensor
    bottom_right: bool = False
    """Align the mask to the bottom right of the ``[A, slots]`` score matrix, as CacheBlend's reference code does."""
    _masks: dict[int | None, list[Tensor]] = field(default_factory=dict)
    _biases: dict[int | None, list[Tensor]] = field(default_factory=dict)
    _within: dict[Span, tuple[slice, Tensor]] = field(default_factory=dict)

    @cached_property
    def first(self) -> int:
        return int(self.positions[0])

    @cached_property
    def last(self) -> int:
        return int(self.positions[-1])

    @cached_property
    def contiguous(self) -> bool:
        return self.last - self.first + 1 == self.positions.numel()

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        """``(first row, end row, slots seen)`` of each block."""
        spans = self.positions // max(SPAN_SLOTS, (self.last + SPANS) // SPANS)
        gaps = ((self.positions.diff() > GAP_ROWS) | (spans.diff() > 0)).nonzero()[:, 0] + 1
        cuts = [0, *gaps.tolist(), self.positions.numel()]
        ends = [end for first, last in pairwise(cuts) for end in (*range(first + BLOCK_ROWS, last, BLOCK_ROWS), last)]
        last_seen = self.positions[torch.tensor(ends) - 1].tolist()
        return [(start, end, (self.last if self.bottom_right else seen) + 1)
                for (start, end), seen in zip(pairwise([0, *ends]), last_seen, strict=True)]

    def within(self, span: Span) -> tuple[slice, Tensor]:
        """The rows that lie in ``span``: their range in the row list, and their offsets in the span."""
        if span not in self._within:
            edges = self.positions.new_tensor([span.start, span.end])
            low, high = torch.searchsorted(self.positions, edges).tolist()
            self._within[span] = slice(low, high), self.positions[low:high] - span.start
        return self._within[span]

    def masks(self, window: int | None) -> list[Tensor]:
        """Boolean masks ``[rows, slots]`` of the blocks, true where a row may look."""
        if window not in self._masks:
            seen_until = self.positions
            if self.bottom_right:
                count = self.positions.numel()
                seen_until = torch.arange(self.last + 1 - count, self.last + 1, device=self.positions.device)
            self._masks[window] = [visible(seen_until[start:end], slots, window) for start, end, slots in self.blocks]
        return self._masks[window]

    def biases(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """`masks` as what is added to the logits: the kernel would otherwise convert them in every layer."""
        if window not in self._biases:
            self._biases[window] = [as_bias(mask, dtype) for mask in self.masks(window)]
        return self._biases[window]


def visible(positions: Tensor, slots: int, window: int | None) -> Tensor:
    """Slots that the row at each of ``positions`` ``[A]`` may look at: boolean ``[A, slots]``."""
    slot = torch.arange(slots, device=positions.device)[None, :]
    mask = slot <= positions[:, None]
    return mask if window is None else mask & (slot > positions[:, None] - window)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to the logits: 0 or -inf."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, call: AttentionCall) -> Tensor:
    """``q`` ``[Hq, A, D]`` over ``k``, ``v`` ``[H, slots, D]`` (slots > last position); returns ``[Hq, A, D]``."""
    if call.softcap is not None:
        return attend_plain(q, k, v, rows, call)
    if _causal_square(rows, call):
        return _attend_causal(q, k, v, rows, call)
    out = torch.empty_like(q)
    for index, (start, end, slots) in enumerate(rows.blocks):
        block, keys, values = q[:, start:end], k[None, :, :slots], v[None, :, :slots]
        single = end - start == 1
        if single:
            block = block.reshape(len(k), -1, q.shape[-1])  # a group's heads as rows: keys are read once
        sees_all = single and call.window is None and not rows.bottom_right
        bias = None if sees_all else rows.biases(call.window, q.dtype)[index]
        found = F.scaled_dot_product_attention(block[None], keys, values, attn_mask=bias, scale=call.scale,
                                               enable_gqa=True)
        out[:, start:end] = found[0].view(len(q), -1, q.shape[-1])
    return out


def _causal_square(rows: QueryRows, call: AttentionCall) -> bool:
    """A long contiguous run near the start: the square causal kernel skips the masked half."""
    fits_window = call.window is None or rows.last < call.window
    long_enough = rows.positions.numel() > max(BLOCK_ROWS, rows.first)
    return rows.contiguous and fits_window and long_enough and not rows.bottom_right


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, call: AttentionCall) -> Tensor:
    padded = F.pad(q, (0, 0, rows.first, 0))  # queries before the run, thrown away: cheaper than a mask
    slots = rows.last + 1
    out = F.scaled_dot_product_attention(padded[None], k[None, :, :slots], v[None, :, :slots], is_causal=True,
                                         scale=call.scale, enable_gqa=True)[0]
    return out[:, rows.first:]


def attend_plain(q: Tensor, k: Tensor, v: Tensor, rows: QueryRows, call: AttentionCall) -> Tensor:
    """The plain reference of `attend`: explicit weights in float32. Also the path for soft-capped logits."""
    out = torch.empty_like(q)
    for index, (start, end, slots) in enumerate(rows.blocks):
        weights = _weights(q[:, start:end], k[:, :slots], rows.masks(call.window)[index], call)
        groups = v[:, :slots].float().repeat_interleave(q.shape[0] // v.shape[0], dim=0)
        out[:, start:end] = (weights @ groups).to(q.dtype)
    return out


def attention_mass(q: Tensor, k: Tensor, rows: QueryRows, call: AttentionCall, queries: int) -> Tensor:
    """Attention that the last ``queries`` rows pay to each slot, summed over rows and heads: ``[slots]`` float32."""
    tail = QueryRows(rows.positions[-queries:])
    mass = torch.zeros(rows.last + 1, device=q.device)
    for (start, end, slots), mask in zip(tail.blocks, tail.masks(call.window), strict=True):
        block = q[:, q.shape[1] - tail.positions.numel():][:, start:end]
        mass[:slots] += _weights(block, k[:, :slots], mask, call).sum((0, 1))
    return mass


def _weights(q: Tensor, k: Tensor, mask: Tensor, call: AttentionCall) -> Tensor:
    """Softmax weights ``[Hq, rows, slots]`` in float32."""
    keys = k.float().repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scores = q.float() @ keys.transpose(1, 2) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)
