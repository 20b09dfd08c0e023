"""The books of stored texts: lanes, references, budget, pins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.prompt import Segment
from kvbaton.references import Chained, Nothing, Origin
from kvbaton.vllm.options import Method
from kvbaton.vllm.texts import TextBooks
from kvbaton.vllm.wire import Lane

LANE = Lane("team", Method("full-shared"))
OTHER = Lane("other team", Method("full-shared"))


def books(budget: int = 1000) -> TextBooks:
    return TextBooks(budget, lambda tokens: 10 * tokens, window=4)


def segment(*ids: int, share: str = "q") -> Segment:
    return Segment(ids, share)


def test_a_text_is_known_by_owner_and_ids_and_only_in_its_lane() -> None:
    held = books()
    text = held.offer_read(LANE, Origin(), segment(1, 2, 3, 4), "a", 9, True)
    assert text is not None
    assert held.named(LANE, segment(1, 2, 3, 4, share="q@-1")) == text
    assert held.named(LANE, segment(1, 2, 3, 4, share="solver")) is None
    assert held.named(LANE, segment(1, 2, 3)) is None
    assert held.named(OTHER, segment(1, 2, 3, 4)) is None
    assert held.index(OTHER).find([1, 2, 3, 4]) == []
    assert held.index(LANE).find([1, 2, 3, 4])[0].text == text.id


def test_origin_keeps_the_first_exact_owner() -> None:
    held, ids = books(), (1, 2, 3, 4)
    first = held.offer_read(LANE, Origin(), segment(*ids), "a", 9, False)
    exact = held.offer_read(LANE, Origin(), segment(*ids), "b", 5, True)
    assert first is not None
    assert exact is not None
    assert held.take_dropped() == (first.id,)
    assert held.offer_read(LANE, Origin(), segment(*ids), "c", 5, True) is None
    assert held.named(LANE, segment(*ids)) == exact
    assert held.nbytes == 40


def test_chained_replaces_after_every_hop() -> None:
    held, ids = books(), (1, 2, 3, 4)
    texts = [held.offer_read(LANE, Chained(), segment(*ids), role, 9, True) for role in "abc"]
    assert held.named(LANE, segment(*ids)) == texts[-1]
    assert len(held) == 1
    assert [m.text for m in held.index(LANE).find(ids)] == [texts[-1].id]


def test_the_dense_method_keeps_nothing() -> None:
    held = books()
    assert held.offer_read(LANE, Nothing(), segment(1, 2, 3, 4), "a", 0, True) is None
    assert held.offer_written(LANE, Nothing(), segment(1, 2, 3, 4), "a", 0, True) is None
    assert held.nbytes == 0


def test_the_text_used_longest_ago_goes_first_and_pinned_texts_stay() -> None:
    held = books(budget=100)
    a, b = (held.offer_read(LANE, Origin(), segment(*ids), "r", 0, True) for ids in ((1, 2, 3, 4), (5, 6, 7, 8)))
    held.pin([a.id])
    c = held.offer_read(LANE, Origin(), segment(9, 9, 9, 9), "r", 0, True)
    assert held.take_dropped() == (b.id,)
    assert held.get(a.id)
    assert held.get(c.id)
    held.unpin([a.id])
    d = held.offer_read(LANE, Origin(), segment(8, 8, 8, 8), "r", 0, True)
    assert held.get(a.id) is None, "pinning counted as its last use, c is younger"
    assert held.get(d.id)


def test_a_replaced_text_that_is_in_use_is_dropped_after_its_use() -> None:
    held = books()
    old = held.offer_read(LANE, Chained(), segment(1, 2, 3, 4), "a", 0, True)
    held.pin([old.id])
    held.offer_read(LANE, Chained(), segment(1, 2, 3, 4), "b", 0, True)
    assert held.take_dropped() == ()
    held.unpin([old.id])
    assert held.take_dropped() == (old.id,)


def test_a_text_larger_than_the_budget_is_not_stored() -> None:
    held = books(budget=30)
    assert held.offer_read(LANE, Origin(), segment(1, 2, 3, 4), "a", 0, True) is None
    assert len(held) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.sampled_from(["read", "wrote", "pin", "unpin"])),
                max_size=40))
def test_books_balance(steps) -> None:
    held, pinned = books(budget=120), []
    alive: set[int] = set()
    for value, length, what in steps:
        if what in ("read", "wrote"):
            offer = held.offer_read if what == "read" else held.offer_written
            text = offer(LANE, Chained(), segment(*[value] * length), "r", 0, True)
            if text is not None:
                alive.add(text.id)
        elif what == "pin" and held.all_ids():
            pinned.append(held.all_ids()[value % len(held)])
            held.pin(pinned[-1:])
        elif what == "unpin" and pinned:
            held.unpin([pinned.pop()])
        alive -= set(held.take_dropped())
        assert held.nbytes == sum(10 * held.get(t).tokens for t in held.all_ids())
        assert set(held.all_ids()) <= alive
        assert held.nbytes <= 120 or all(t in pinned for t in held.all_ids())
    held.unpin(pinned)
    alive -= set(held.take_dropped())
    assert alive == set(held.all_ids()), "a worker keeps exactly what is in the books"
    for text in held.all_ids():
        held.forget(text)
    assert held.nbytes == 0
    assert not held.index(LANE)._places
