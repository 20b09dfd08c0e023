"""AnchorState: the pool of one edge, as `Anchors` keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbaton.correctors.fullstack import Full
from kvbaton.correctors.pool import Anchor, Pool, Side
from kvbaton.correctors.stacks import Factored, Stack
from kvbaton.errors import InvariantError, StoreError
from kvbaton.kv import KV, Geometry

_FACTORED, _FULL = {"left", "right"}, {"full"}


@dataclass
class AnchorState:
    """At most ``limit`` texts. ``pool`` is replaced whole, never written to: a reader may hold the one before.

    Bytes: every factor once, 2 (L-1) bytes (r_base + r_offset) (S + H D) a text of S tokens, and 8 S for the squared
    lengths that distances need.
    """

    geometry: Geometry
    rank: int | None
    base_rank: int | None
    limit: int
    window: int
    pool: Pool | None = None
    texts: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else self.pool.nbytes

    def add(self, text: Pool) -> None:
        """Remember one text; one of the same ids is replaced, and one is dropped where the pool is full."""
        pool, ids = self.pool, text.anchors[0].token_ids
        if pool is None:
            self.pool, self.texts = text, 1
            return
        same = [v for v, anchor in enumerate(pool.anchors) if ids and anchor.token_ids == ids]
        self.texts += not same
        if same:
            text.anchors[0].credit += pool.anchors[same[0]].credit
            dropped = same[0]
        elif len(pool) < self.limit:
            self.pool = pool.joined(text)
            return
        else:
            dropped = min(range(min(self.window, len(pool))), key=lambda v: pool.anchors[v].credit)
        self.pool = pool.select([v for v in range(len(pool)) if v != dropped]).joined(text)

    def pool_on(self, device: torch.device) -> Pool:
        """The pool, moved to that device if it was loaded elsewhere."""
        assert self.pool is not None
        if self.pool.device != device:
            self.pool = self.pool.to(device)
        return self.pool

    def value_distances(self, source: KV) -> Tensor:
        """``[A]`` float32: L2 distance of all values of ``source`` above layer 0 to each text at least as long."""
        if self.pool is None:
            return torch.empty(0)
        squared = self.pool_on(source.v.device).v.squared_distances(source.v).sum(1)
        return squared[squared.isfinite()].sqrt()

    def merge(self, other: Any) -> None:
        if other.pool is None:
            return
        known = {anchor.token_ids for anchor in self.pool.anchors} if self.pool else set()
        for v, anchor in enumerate(other.pool.anchors):
            if not anchor.token_ids or anchor.token_ids not in known:
                text = other.pool.select([v])
                self.add(Pool((Anchor(anchor.token_ids, anchor.tokens, anchor.credit),), text.k, text.v))

    def to_tensors(self) -> Mapping[str, Tensor]:
        out = {"texts": torch.tensor([self.texts])}
        for v, anchor in enumerate(self.pool.anchors if self.pool else ()):
            out[f"anchor{v}.ids"] = torch.tensor(anchor.token_ids, dtype=torch.int64)
            out[f"anchor{v}.credit"] = torch.tensor([anchor.credit], dtype=torch.float64)
        for name, stack in self._stacks().items():
            for v, tensors in enumerate(stack.tensors()):
                out |= {f"anchor{v}.{name}.{part}": tensor for part, tensor in tensors.items()}
        return out

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.endswith(".ids") for name in tensors)
        try:
            self.texts, self.pool = int(tensors["texts"].item()), None
            for v in range(count):
                text = self._read(tensors, f"anchor{v}.")
                self.pool = text if self.pool is None else self.pool.joined(text)
            self.check()
        except (InvariantError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise StoreError(f"a stored anchor is broken or missing: {error}") from error
        if set(self.to_tensors()) != set(tensors):
            raise StoreError("stored anchors have tensors that nobody wrote")

    def check(self) -> None:
        if self.pool is None:
            return
        if len(self.pool) > self.limit or not len(self.pool) <= self.texts:
            raise InvariantError(f"{len(self.pool)} of {self.texts} texts are held, the pool is {self.limit}")
        for anchor in self.pool.anchors:
            if not 0 <= anchor.credit < torch.inf or len(anchor.token_ids) not in (0, anchor.tokens):
                raise InvariantError(f"an anchor of {anchor.tokens} tokens has other ids, or a bad credit")
        for name, stack in self._stacks().items():
            for anchor, parts in zip(self.pool.anchors, stack.tensors(), strict=True):
                self._check_parts(name, anchor.tokens, parts)

    def _check_parts(self, name: str, tokens: int, parts: Mapping[str, Tensor]) -> None:
        layers, channels = self.geometry.layers - 1, self.geometry.kv_heads * self.geometry.head_dim
        rank = self.base_rank if name.startswith("base") else self.rank
        cut = min(tokens, channels) if rank is None else min(rank, tokens, channels)
        shapes = {"left": (layers, tokens, cut), "right": (layers, cut, channels), "full": (layers, tokens, channels)}
        for part, tensor in parts.items():
            if tuple(tensor.shape) != shapes[part] or tensor.dtype != self.geometry.dtype:
                raise InvariantError(f"{name} {part} is {tuple(tensor.shape)} {tensor.dtype}, not {shapes[part]}")
            if not tensor.isfinite().all():
                raise InvariantError(f"{name} {part} is not finite")

    def _stacks(self) -> dict[str, Stack]:
        if self.pool is None:
            return {}
        k, v = self.pool.k, self.pool.v
        return {"base_k": k.base, "base_v": v.base, "offset_k": k.offset, "offset_v": v.offset}

    def _read(self, tensors: Mapping[str, Tensor], prefix: str) -> Pool:
        def stack(name: str, rank: int | None) -> Stack:
            at = f"{prefix}{name}."
            if rank is None:
                return Full((tensors[at + "full"],))
            return Factored((tensors[at + "left"],), tensors[at + "right"])

        k, v = (Side.of(stack(f"base_{side}", self.base_rank), stack(f"offset_{side}", self.rank)) for side in "kv")
        ids = tensors[prefix + "ids"]
        if ids.ndim != 1 or ids.dtype != torch.int64:
            raise ValueError(f"{prefix}ids is not a list of token ids")
        return Pool((Anchor(tuple(ids.tolist()), len(k.squares[0]), tensors[prefix + "credit"].item()),), k, v)
