"""Approximate KV under salted hashes: against a request class that hashes blocks as vLLM does."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import Unsupported
from kvbaton.vllm.salting import check_can_salt, salt_request

SIZE = 4


def chain(request) -> list[bytes]:
    """Block hashes chained over the prefix, as vLLM computes them: new full blocks only."""
    out, at = [], len(request.block_hashes) * SIZE
    parent = request.block_hashes[-1] if request.block_hashes else b""
    while at + SIZE <= len(request.tokens):
        parent = hashlib.sha256(parent + repr(request.tokens[at:at + SIZE]).encode()).digest()
        out.append(parent)
        at += SIZE
    return out


class Request:
    def __init__(self, tokens) -> None:
        self.tokens, self.block_hashes, self._block_hasher = list(tokens), [], chain
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 8), st.lists(st.integers(0, 3), max_size=20))
def test_exact_blocks_in_front_are_shared_and_nothing_behind(tokens, first, answer) -> None:
    exact, approximate, again = Request(tokens), Request(tokens), Request(tokens)
    salt_request(approximate, "lane 1", first)
    salt_request(again, "lane 1", first)
    for token in answer:
        for request in (exact, approximate, again):
            request.tokens.append(token)
            request.update_block_hashes()
    assert len(approximate.block_hashes) == len(exact.block_hashes)
    assert approximate.block_hashes[:first] == exact.block_hashes[:first]
    assert not set(approximate.block_hashes[first:]) & set(exact.block_hashes)
    assert approximate.block_hashes == again.block_hashes


@given(st.lists(st.integers(0, 3), min_size=8, max_size=40), st.text(), st.text())
def test_other_salts_never_meet(tokens, one, other) -> None:
    a, b = Request(tokens), Request(tokens)
    salt_request(a, one, 1)
    salt_request(b, other, 1)
    assert (one == other) == bool(set(a.block_hashes[1:]) & set(b.block_hashes[1:]))


def test_a_client_cannot_name_the_salt() -> None:
    """P2: a salt is keyed by a secret of this process, so that equal texts in another key space differ."""
    a = Request(range(8))
    salt_request(a, "known", 0)
    first_exact = Request(range(8)).block_hashes[0]
    guesses = {hashlib.blake2b(first_exact, key=b"known", digest_size=32).digest(),
               hashlib.sha256(b"known" + first_exact).digest()}
    assert a.block_hashes[0] not in guesses


def test_without_prefix_caching_nothing_is_done() -> None:
    request = Request(range(8))
    request._block_hasher = None
    salt_request(request, "x", 0)
    assert request._block_hasher is None


def test_the_start_check_passes_here_and_refuses_another_way_of_hashing() -> None:
    check_can_salt(Request)

    class Eager(Request):
        def update_block_hashes(self) -> None:
            self.block_hashes = [b"fixed" * 8] * 3

    class Other:
        pass

    for odd in (Eager, Other):
        with pytest.raises(Unsupported, match="no-enable-prefix-caching"):
            check_can_salt(odd)
