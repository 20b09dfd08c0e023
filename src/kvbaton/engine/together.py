"""Decoding many answers as one: a pass takes one row of each, so that the weights are read once for all of them.

    answer 0   prompt ■■■■■ ▪▪▪ → ▫                row b sees cache b alone; the caches lie in one padded allocation,
    answer 1   prompt ■■ ▪▪▪▪▪▪ → ▫ ░░             so that attention is one call a layer. An answer that is over leaves
    answer 2   prompt ■■■■ ▪    → ▫ ░░░            and the last one takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbaton.correctors.base import LayerKV
from kvbaton.engine.attention import AttentionCall, QueryRows, as_bias, attend, visible
from kvbaton.engine.decode import Answer, Generated
from kvbaton.engine.hf import HFEngine, Pass
from kvbaton.rope import Rope


def finish_together(engine: HFEngine, answers: Sequence[Answer]) -> None:
    """`Answer.finish` of every answer, with the generated ones in one batch where there are several."""
    growing = [answer for answer in answers if isinstance(answer, Generated) and not answer.over]
    if len(growing) > 1:
        batch = _Batch(engine, growing)
        while batch.answers:
            batch.step()
    for answer in answers:
        answer.finish()


class _Batch:
    """Answers that still grow, and their caches side by side: keys (rotated) and values ``[L, B, H, slots, D]``."""

    def __init__(self, engine: HFEngine, answers: list[Generated]) -> None:
        self._engine, self.answers = engine, answers
        slots = max(answer.written.span.end for answer in answers)
        geometry = engine.geometry
        shape = (geometry.layers, len(answers), geometry.kv_heads, slots, geometry.head_dim)
        self._k, self._v = (torch.zeros(shape, dtype=geometry.dtype, device=engine.device) for _ in range(2))
        for row, answer in enumerate(answers):
            prompt = slice(answer.written.span.start)
            self._k[:, row, :, prompt] = answer.cache.k[:, :, prompt]
            self._v[:, row, :, prompt] = answer.cache.v[:, :, prompt]

    def step(self) -> None:
        """Feed the next token of every answer; take out those that are over."""
        tokens, positions = zip(*(answer.next for answer in self.answers), strict=True)
        rows = _RowEach(self._engine.rope, self._k, self._v, positions)
        logits = self._engine.logits(self._engine.run(rows, self._engine.tensor(tokens)))
        k, v = (torch.stack(layers) for layers in zip(*rows.fresh, strict=True))
        for row, answer in enumerate(self.answers):
            answer.written.put(answer.fed, k[:, :, row], v[:, :, row], [hidden[row] for hidden in rows.entering])
            answer.fed += 1
            if not answer.full:
                answer.push(logits[row])
        for row in reversed(range(len(self.answers))):
            if self.answers[row].over:
                self._drop(row)

    def _drop(self, row: int) -> None:
        last = self.answers.pop()
        if row < len(self.answers):
            self.answers[row] = last
            self._k[:, row], self._v[:, row] = self._k[:, -1], self._v[:, -1]
        self._k, self._v = self._k[:, :-1], self._v[:, :-1]


class _RowEach(Pass):
    """One row of each of B hops. ``fresh`` ``[H, B, D]`` and ``entering`` ``[B, hidden]`` grow layer by layer."""

    def __init__(self, rope: Rope, k: Tensor, v: Tensor, positions: Sequence[int]) -> None:
        self._rope, self._k, self._v = rope, k, v
        self._positions = torch.tensor(positions, device=k.device)
        self._order = torch.arange(len(positions), device=k.device)
        self._slots = max(positions) + 1
        self._biases: dict[int | None, Tensor] = {}
        self.fresh: list[LayerKV] = []
        self.entering: list[Tensor] = []

    @property
    def positions(self) -> Tensor:
        return self._positions

    def enter(self, layer: int, hidden: Tensor) -> Tensor:
        self.entering.append(hidden)
        return hidden

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> LayerKV:
        self.fresh.append((key[0], value[0]))
        k, v = self._k[layer_idx], self._v[layer_idx]
        rotated = self._rope.rotate(key[0], *self._rope.angles(self._positions, layer_idx))
        k[self._order, :, self._positions] = rotated.transpose(0, 1)
        v[self._order, :, self._positions] = value[0].transpose(0, 1)
        return k[:, :, :self._slots], v[:, :, :self._slots]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        q = self._rope.rotate(query[0], *self._rope.angles(self._positions, len(self.fresh) - 1)).transpose(0, 1)
        if call.softcap is not None:
            return attend_one_by_one(q, key, value, self._positions, call)[None]
        if call.window not in self._biases:
            mask = visible(self._positions, self._slots, call.window)
            self._biases[call.window] = as_bias(mask, q.dtype)
        return attend_each(q, key, value, self._biases[call.window], call.scale)[None]


def attend_each(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Row b of ``q`` ``[B, Hq, D]`` over ``k[b]``, ``v[b]`` of ``[B, H, slots, D]``, in one call; ``[B, Hq, D]``.

    ``bias`` ``[B, slots]`` is added to the logits.
    """
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # a group's heads as rows: keys are read once
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias[:, None, None], scale=scale).reshape(q.shape)


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, call: AttentionCall) -> Tensor:
    """The plain reference of `attend_each`: a call a row. Also the path for soft-capped logits."""
    rows = [attend(q[b, :, None], k[b], v[b], QueryRows(positions[b:b + 1]), call) for b in range(len(q))]
    return torch.stack(rows)[:, :, 0]
