"""The page codec against page layouts that it is not told: plain, transposed keys, tile-packed, any permutation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.errors import Unsupported
from kvbaton.vllm.paging import PageCodec, Rows, Writer, blocks_of, slots_of


def permuted_writer(k_at: Tensor, v_at: Tensor) -> Writer:
    """A backend that keeps element (token, dim) of a page at ``k_at[token, dim]`` and ``v_at[token, dim]``."""
    size = k_at.shape[0]

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            for head in range(key.shape[1]):
                page = cache[slot // size, head].view(-1)
                page[k_at[slot % size]] = key[row, head]
                page[v_at[slot % size]] = value[row, head]

    return write


def layout(size: int, dim: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """``seed`` None: K transposed then V row-major, as vLLM's CPU backend in float32; else a random permutation."""
    places = torch.arange(2 * size * dim)
    if seed is None:
        return places[:size * dim].view(dim, size).t(), places[size * dim:].view(size, dim)
    order = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
    return order[:size * dim].view(size, dim), order[size * dim:].view(size, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("slots", [[70, 3, 4, 159, 64], slots_of([3, 1, 4, 0], 13, 103, 32), [9]])
def test_reads_back_what_a_backend_wrote(dtype, heads, seed, slots) -> None:
    size, dim = 32, 16
    write = permuted_writer(*layout(size, dim, seed))
    cache = torch.zeros(5, heads, size, 2 * dim, dtype=dtype)
    codec = PageCodec.learn(write, cache)
    assert not cache.any(), "learning must not touch the cache"
    slots = torch.tensor(slots)
    key, value = torch.randn(2, len(slots), heads, dim).to(dtype)
    write(key, value, cache, slots)
    k, v = codec.read(cache, Rows.at(slots, size))
    assert torch.equal(k, key.transpose(0, 1))
    assert torch.equal(v, value.transpose(0, 1))


def test_reads_a_cache_with_another_memory_order() -> None:
    """A layer's pages may be a permuted view of memory: [H, blocks, ...] underneath."""
    size, dim, heads = 32, 8, 2
    write = permuted_writer(*layout(size, dim, 3))
    cache = torch.zeros(heads, 4, size, 2 * dim).transpose(0, 1)
    codec = PageCodec.learn(write, cache)
    key, value = torch.randn(2, 1, heads, dim)
    write(key, value, cache, torch.tensor([40]))
    assert torch.equal(codec.read(cache, Rows.at(torch.tensor([40]), size))[1], value.transpose(0, 1))


def test_a_writer_that_changes_values_is_refused() -> None:
    plain = permuted_writer(*layout(32, 8, 0))

    def quantised(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        plain((key / 16).round() * 16, (value / 16).round() * 16, cache, slots)

    with pytest.raises(Unsupported, match="quantised"):
        PageCodec.learn(quantised, torch.zeros(2, 1, 32, 16))


def test_a_writer_that_puts_keys_and_values_into_one_place_is_refused() -> None:
    k_at, _ = layout(32, 8, 0)
    with pytest.raises(Unsupported, match="as they are"):
        PageCodec.learn(permuted_writer(k_at, k_at), torch.zeros(2, 1, 32, 16))


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(Unsupported, match="head dim"):
        PageCodec.learn(permuted_writer(*layout(32, 8, 0)), torch.zeros(2, 32, 16))


@given(st.integers(0, 90), st.integers(0, 40), st.sampled_from([16, 32]), st.randoms())
def test_slots_and_blocks_of_a_block_table(start, length, size, random) -> None:
    table = random.sample(range(1000), 20)
    slots = slots_of(table, start, start + length, size)
    assert [(table.index(s // size) * size + s % size) for s in slots] == list(range(start, start + length))
    assert set(blocks_of(table, start, start + length, size)) == {s // size for s in slots}
