"""Claims, chunks, jumps and loads on positions: property tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import InvariantError, Unsupported
from kvbaton.prompt import Span
from kvbaton.recipes import Recipe
from kvbaton.references import Origin
from kvbaton.selectors.leading import Leading
from kvbaton.selectors.random import RandomRows
from kvbaton.vllm import planning
from kvbaton.vllm.matching import Match
from kvbaton.vllm.planning import Piece
from kvbaton.vllm.wire import Shared


@st.composite
def spans(draw) -> tuple[int, list[Span]]:
    """A prompt length and disjoint, ordered spans in it; the last may end the prompt."""
    at, out = draw(st.integers(1, 9)), []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 30))
        out.append(Span(at, at + length))
        at += length + draw(st.integers(0, 9))
    return max(at, out[-1].end), out


def recipe(**fields) -> Recipe:
    return Recipe("test", "", "-", Origin(), **fields)


@given(spans(), st.integers(0, 6))
def test_pieces_leave_lead_rows_and_the_last_token(drawn, lead) -> None:
    tokens, reused = drawn
    pieces = planning.pieces_of(recipe(lead_rows=lead), 3, tokens, list(enumerate(reused)))
    rows = {row for piece in pieces for row in range(piece.span.start, piece.span.end)}
    assert rows == {row for span in reused for row in range(span.start + lead, span.end) if row != tokens - 1}
    assert all(reused[p.segment].start <= p.span.start < p.span.end <= reused[p.segment].end for p in pieces)


@given(spans(), st.floats(0, 1), st.integers(0, 5))
def test_pieces_leave_the_selectors_leading_rows(drawn, share, lead) -> None:
    """The budget is a share of the segment; lead rows are part of it. The engine's own rule, counted by hand."""
    tokens, reused = drawn
    made = recipe(lead_rows=lead, selector=Leading(share=share, min_rows=2))
    pieces = {p.segment: p.span for p in planning.pieces_of(made, 3, tokens, list(enumerate(reused)))}
    for number, span in enumerate(reused):
        end = min(span.end, tokens - 1)
        first = max(lead, 2, int(share * (end - span.start) + 0.5))
        expected = Span(span.start + first, end) if span.start + max(first, lead) < end else None
        assert pieces.get(number) == expected


def test_scattered_rows_are_refused() -> None:
    with pytest.raises(Unsupported, match="scattered"):
        planning.pieces_of(recipe(selector=RandomRows(share=0.3)), 3, 100, [(0, Span(5, 90))])


@dataclass
class Walk:
    """A prefill step by step, as the gap-jump scheduler does it."""

    pieces: list[Piece]
    tokens: int
    budget: int

    def run(self) -> tuple[list[int], list[int]]:
        """Rows that were computed and rows that were loaded, in order."""
        computed, loaded, at = [], [], 0
        while at < self.tokens:
            to = planning.reach(self.pieces, at)
            for part in planning.cut(self.pieces, at, to):
                loaded += range(part.span.start, part.span.end)
            at = to
            end = planning.chunk_end(self.pieces, at, min(self.budget, self.tokens - at))
            assert at < end <= at + self.budget
            computed += range(at, end)
            at = end
        return computed, loaded


@given(spans(), st.integers(1, 40), st.integers(0, 5))
def test_every_row_is_computed_or_loaded_once(drawn, budget, lead) -> None:
    tokens, reused = drawn
    pieces = planning.pieces_of(recipe(lead_rows=lead), 3, tokens, list(enumerate(reused)))
    computed, loaded = Walk(pieces, tokens, budget).run()
    assert sorted(computed + loaded) == list(range(tokens))
    assert set(loaded) == {row for p in pieces for row in range(p.span.start, p.span.end)}
    assert tokens - 1 in computed


@given(spans(), st.integers(0, 150))
def test_a_claim_from_any_local_hit_covers_no_computed_row(drawn, hit) -> None:
    tokens, reused = drawn
    pieces = planning.pieces_of(recipe(), 3, tokens, list(enumerate(reused)))
    end = planning.reach(pieces, hit)
    covered = {row for p in planning.cut(pieces, hit, end) for row in range(p.span.start, p.span.end)}
    assert covered == set(range(hit, end))
    assert end <= max(hit, tokens - 1)


@given(spans(), st.lists(st.integers(0, 9), min_size=200, max_size=200))
def test_the_prompt_keeps_every_token_and_slot(drawn, ids) -> None:
    tokens, reused = drawn
    ids = ids[:tokens] + [1] * (tokens - len(ids))
    shared = [Shared(s.start, s.end, "ab"[i % 2], None) for i, s in enumerate(reused)]
    prompt = planning.build_prompt("reader", ids, shared)
    assert prompt.token_ids == tuple(ids)
    assert [span for _, _, span, _ in prompt.shared()] == reused
    assert [slot for *_, slot in prompt.shared()] == [i // 2 for i in range(len(reused))]


def test_overlapping_segments_are_a_bug() -> None:
    with pytest.raises(InvariantError):
        planning.build_prompt("r", [1] * 9, [Shared(1, 5, "a", None), Shared(4, 6, "b", None)])


def test_gaps_are_what_no_match_covers() -> None:
    matches = [Match(0, 5, 0, 0), Match(12, 20, 1, 3)]
    assert planning.gaps(matches, 40, 4) == [Span(5, 12), Span(20, 40)]
    assert planning.gaps(matches, 40, 8) == [Span(20, 40)]
    assert planning.gaps([], 3, 4) == []
