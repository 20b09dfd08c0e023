"""Text found by content: against a plain search, under collisions, and after texts leave."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.vllm.matching import Match, TextIndex

WINDOW = 4
short_text = st.lists(st.integers(0, 3), min_size=0, max_size=24)


def plain_find(texts: dict[int, list[int]], prompt: list[int]) -> list[Match]:
    """The same by trying everything."""
    found, at = [], 0
    while at < len(prompt):
        best = None
        for text, tokens in texts.items():
            for offset in range(len(tokens)):
                n = 0
                while offset + n < len(tokens) and at + n < len(prompt) and tokens[offset + n] == prompt[at + n]:
                    n += 1
                if n >= WINDOW and (best is None or n > len(best)):
                    best = Match(at, at + n, text, offset)
        if best:
            found.append(best)
        at = best.end if best else at + 1
    return found


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=4), st.lists(st.integers(0, 30), max_size=40),
       st.data())
def test_finds_what_a_plain_search_finds(texts, noise, data) -> None:
    index, known = TextIndex(WINDOW), dict(enumerate(texts))
    for text, tokens in known.items():
        index.add(text, tokens)
    prompt = list(noise)
    for tokens in texts:
        at = data.draw(st.integers(0, len(prompt)))
        prompt[at:at] = tokens
    assert index.find(prompt) == plain_find(known, prompt)


@given(st.lists(short_text, min_size=1, max_size=4), short_text)
def test_matches_are_disjoint_in_order_and_true(texts, prompt) -> None:
    index = TextIndex(WINDOW)
    for text, tokens in enumerate(texts):
        index.add(text, tokens)
    end = 0
    for match in index.find(prompt):
        assert match.start >= end
        assert len(match) >= WINDOW
        assert prompt[match.start:match.end] == texts[match.text][match.offset:match.offset + len(match)]
        end = match.end


def test_a_hash_collision_is_never_believed(monkeypatch) -> None:
    """P5: crafted collisions. Here every window of every text collides."""
    monkeypatch.setattr(TextIndex, "_hashes", lambda self, tokens: np.zeros(
        max(0, len(tokens) - self.window + 1), dtype=np.uint64))
    index = TextIndex(WINDOW)
    index.add(0, [1, 2, 3, 4, 5])
    assert index.find([9, 8, 7, 6, 5, 4]) == []
    assert index.find([9, 1, 2, 3, 4, 9]) == [Match(1, 5, 0, 0)]


def test_hashes_differ_between_processes() -> None:
    assert TextIndex(8)._powers[1] != TextIndex(8)._powers[1]


def test_a_removed_text_is_not_found_and_others_stay() -> None:
    index = TextIndex(WINDOW)
    index.add(0, [1, 2, 3, 4, 5])
    index.add(1, [1, 2, 3, 4, 6])
    index.remove(0)
    assert index.find([1, 2, 3, 4, 5]) == [Match(0, 4, 1, 0)]
    index.remove(1)
    assert index.find([1, 2, 3, 4, 5]) == []
    assert not index._places


def test_token_ids_above_32_bit_halves_do_not_collide() -> None:
    index = TextIndex(WINDOW)
    index.add(0, [0, 0, 0, 0])
    assert index.find([65536, 65536, 65536, 65536]) == []
