"""Reading and writing paged KV caches of any backend, without knowing how a backend packs its pages.

    layer cache   [blocks, H, block_size, 2 * D]      one page a (block, head)
    a page        some permutation of its block_size * D key and block_size * D value elements

A backend writes through its own writer, so positions are right by construction. No backend has a reader: the codec
learns the permutation once, by writing distinct bit patterns through the backend's writer into a scratch page and
looking where they went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbaton.errors import Unsupported

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""A backend's own writer: ``write(key [n, H, D], value [n, H, D], cache [blocks, H, block_size, 2D], slots [n])``."""


def slots_of(block_ids: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Cache slots of the positions ``[start, end)`` of a request whose block table is ``block_ids``."""
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)]


def blocks_of(block_ids: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Blocks that hold any of the positions ``[start, end)``."""
    return list(block_ids[start // block_size:-(-end // block_size)]) if end > start else []


@dataclass(frozen=True)
class Rows:
    """Rows of a paged cache, found once for all layers: ``blocks`` int64 ``[b]``, ``index`` int64 ``[T]`` of each row
    among the rows of these blocks, one block behind the other. ``run``: the same as a slice, if they follow each other.
    """

    blocks: Tensor
    index: Tensor
    run: slice | None

    @classmethod
    def at(cls, slots: Tensor, block_size: int) -> Rows:
        """The rows at ``slots`` int64 ``[T]``, in their order."""
        blocks, number = torch.unique_consecutive(slots // block_size, return_inverse=True)
        index = number * block_size + slots % block_size
        first = int(index[0]) if len(index) else 0
        follow = torch.equal(index, torch.arange(first, first + len(index), device=index.device))
        return cls(blocks, index, slice(first, first + len(index)) if follow else None)


@dataclass(frozen=True)
class PageCodec:
    """Where a page keeps its tokens' elements: ``k_at``, ``v_at`` int64 ``[block_size, D]`` into the flat page."""

    k_at: Tensor
    v_at: Tensor

    @classmethod
    def learn(cls, write: Writer, cache: Tensor) -> PageCodec:
        """Learn the packing of ``cache`` ``[blocks, H, block_size, 2D]``; the cache itself is not touched.

        Raises Unsupported if the writer changes values (a quantised cache), or does not keep all of them.
        """
        if cache.ndim != 4 or cache.shape[-1] % 2:
            raise Unsupported(f"KV cache of shape {tuple(cache.shape)}: not [blocks, heads, block size, 2 x head dim]")
        _, heads, size, width = cache.shape
        dim = width // 2
        return cls(*(_learn_part(write, cache, which, heads, size, dim) for which in ("k", "v")))

    @property
    def block_size(self) -> int:
        return self.k_at.shape[0]

    @cached_property
    def _views(self) -> tuple[_View | None, _View | None]:
        return _View.of(self.k_at), _View.of(self.v_at)

    def read(self, cache: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values ``[H, T, D]`` at ``rows``, in their order, in memory of their own."""
        pages = cache[rows.blocks].flatten(2)
        k, v = (_rows(pages, at, view, rows) for at, view in zip((self.k_at, self.v_at), self._views, strict=True))
        return k, v


@dataclass(frozen=True)
class _View:
    """Part of a page whose element (token, dim) lies at ``start + token * along + dim * across``: no gather needed."""

    start: int
    along: int
    across: int

    @classmethod
    def of(cls, at: Tensor) -> _View | None:
        """The view that ``at`` ``[block_size, D]`` describes, if it is one."""
        steps = [int(line[1] - line[0]) if len(line) > 1 else 1 for line in (at[:, 0], at[0])]
        view = cls(int(at[0, 0]), *steps)
        size, dim = (torch.arange(n, device=at.device) for n in at.shape)
        return view if torch.equal(at, view.start + size[:, None] * view.along + dim * view.across) else None


def _rows(pages: Tensor, at: Tensor, view: _View | None, rows: Rows) -> Tensor:
    """Rows ``[H, T, D]`` of the part of ``pages`` ``[b, H, page]`` whose elements lie at ``at``."""
    if view is None:
        size = at.shape[0]
        return pages[(rows.index // size)[:, None], :, at[rows.index % size]].permute(2, 0, 1).contiguous()
    blocks, heads, page = pages.shape
    whole = pages.as_strided((heads, blocks, *at.shape), (page, heads * page, view.along, view.across), view.start)
    flat = whole.reshape(heads, -1, at.shape[1])
    return flat.index_select(1, rows.index) if rows.run is None else flat[:, rows.run]


def _learn_part(write: Writer, cache: Tensor, which: str, heads: int, size: int, dim: int) -> Tensor:
    """Flat place ``[size, dim]`` of every key (or value) element inside a page of head 0.

    Small integers are distinct, finite bit patterns in every float type, and exact: 256 at a time, so that the
    narrowest mantissa (bfloat16: 8 bits) can hold them.
    """
    count = size * dim
    place = torch.full((count,), -1, dtype=torch.int64, device=cache.device)
    slots = torch.arange(size, dtype=torch.int64, device=cache.device)
    empty = torch.zeros(size, heads, dim, dtype=cache.dtype, device=cache.device)
    low = torch.arange(count, device=cache.device) % 255 + 1
    high = torch.arange(count, device=cache.device) // 255 + 1
    found = []
    for digits in (low, high):
        if int(digits.max()) > 256:
            raise Unsupported(f"a page of {size} x {dim} elements is too large to learn its packing")
        pattern = digits.to(cache.dtype).view(size, 1, dim).expand(size, heads, dim).contiguous()
        scratch = _scratch(cache)
        write(pattern if which == "k" else empty, pattern if which == "v" else empty, scratch, slots)
        found.append(scratch[0, 0].flatten().float())
    codes = (found[1].round().long() - 1) * 255 + found[0].round().long() - 1
    written = torch.nonzero(found[0]).flatten()
    place[codes[written].clamp(0, count - 1)] = written
    if written.numel() != count or bool((place < 0).any()) or not torch.equal(found[0], found[0].round()):
        raise Unsupported("the attention backend does not keep keys and values as they are (a quantised KV cache?): "
                          "run vLLM without --kv-cache-dtype")
    return place.view(size, dim)


def _scratch(cache: Tensor) -> Tensor:
    """Two zero pages with the memory layout of ``cache``."""
    shape = (2, *cache.shape[1:])
    strides = cache.stride()
    order = sorted(range(4), key=lambda axis: -strides[axis])
    flat = torch.zeros([shape[axis] for axis in order], dtype=cache.dtype, device=cache.device)
    return flat.permute([order.index(axis) for axis in range(4)])
