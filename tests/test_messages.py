"""KVCOMM's part: plain references for its weights, the aligned form against the released one, its pool and its gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hops import ANSWER
from kvbaton.correctors.messages import AbsoluteMessages, Messages
from kvbaton.correctors.messages_state import Message, MessageState
from kvbaton.engine.result import HopResult
from kvbaton.engine.session import Session
from kvbaton.errors import StoreError, UsageError
from kvbaton.gates import MessageEntropy
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.overrides import override
from kvbaton.prompt import Place, Prompt, Segment
from kvbaton.recipes import recipe
from tiny import engine, ids, prompt
from toys import GEOMETRY, kv

L, H, D = GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim


def text(tokens: int, seed: int) -> KV:
    return replace(kv(tokens, seed), token_ids=ids(tokens, seed))


def moved(source: KV, dk: torch.Tensor, dv: torch.Tensor, start: int) -> KV:
    return KV(source.k + dk, source.v + dv, start, "critic", True)


def taught(corrector: Messages, lengths: tuple[int, ...], start: int = 0) -> MessageState:
    state = corrector.new_state(GEOMETRY)
    for i, tokens in enumerate(lengths):
        offset = kv(tokens, 50 + i)
        corrector.learn(state, text(tokens, i), moved(text(tokens, i), offset.k, offset.v, start))
        state.check()
    return state


def test_token_weights_are_the_papers_softmax_of_mean_distances() -> None:
    state, source = taught(Messages(), (9, 7, 5, 8)), text(7, 99)
    usable = [m for m in state.held.values() if len(m) >= 7]
    assert len(usable) == 3
    correction = Messages().correct(state, source, Place(0, len(source)))
    for side, index in (("k", 0), ("v", 1)):
        for token in range(7):
            distances = torch.stack([(getattr(source, side)[:, :, token] - getattr(m, side)[:, :, token]).abs().mean()
                                     for m in usable])
            weights = torch.softmax(-distances, 0)
            for layer in range(1, L):
                offset = sum(w * getattr(m, "d" + side)[layer, :, token] for w, m in zip(weights, usable, strict=True))
                expected = getattr(source, side)[layer, :, token] + offset
                torch.testing.assert_close(correction(layer)[index][:, token], expected, rtol=0, atol=1e-5)


def test_own_text_weighs_messages_by_channel_over_their_last_tokens() -> None:
    own, corrector = text(4, 70), Messages()
    state = corrector.new_state(GEOMETRY)
    for i, tokens in enumerate((9, 7)):
        corrector.learn(state, replace(own, before=text(tokens, i)), moved(own, kv(4, 50 + i).k, kv(4, 50 + i).v, 3))
    source = replace(own, before=text(6, 99))
    k, v = corrector.correct(state, source, Place(30, len(source)))(2)
    for h in range(H):
        for d in range(D):
            distances = torch.stack([(source.before.v[2, h, :, d] - m.v[2, h, len(m) - 6:, d]).norm()
                                     for m in state.held.values()])
            weights = torch.softmax(-distances, 0)
            offset = sum(w * m.dv[2, h, :, d] for w, m in zip(weights, state.held.values(), strict=True))
            torch.testing.assert_close(v[h, :, d], own.v[2, h, :, d] + offset, rtol=0, atol=1e-5)
    assert k.shape == own.k[2].shape


def test_layer_0_is_left_as_it_is() -> None:
    source = text(5, 9)
    k, v = Messages().correct(taught(Messages(), (5, 6)), source, Place(0, len(source)))(0)
    assert torch.equal(k, source.k[0])
    assert torch.equal(v, source.v[0])


@pytest.mark.parametrize("start", [0, 3, 500])
def test_equal_position_free_offsets_hold_at_every_position(start: int) -> None:
    """KVCOMM's acceptance test: the released form fails it unless a text starts where it started then."""
    rope, source = engine().rope, text(6, 99)
    dk = torch.randn(L, H, 1, rope.head_dim)
    wide = [KV(*(torch.randn(L, H, 6, rope.head_dim) for _ in range(2)), 0, "a", True, token_ids=ids(6, i))
            for i in range(3)]
    source = wide.pop()
    aligned, absolute = Messages(), AbsoluteMessages()
    states = [c.new_state(GEOMETRY) for c in (aligned, absolute)]
    for state in states:
        for i, message in enumerate(wide):
            aligned.learn(state, message, KV(message.k + dk, message.v, 3, "b", True, token_ids=ids(6, i)))
    right = source.k[1] + dk[1]
    place = Place(start, len(source))
    torch.testing.assert_close(aligned.correct(states[0], source, place)(1)[0], right, rtol=0, atol=1e-5)
    released = absolute.correct_turned(states[1], source, place, rope.turn)(1)[0]
    assert torch.allclose(released, right, atol=1e-4) == (start == 3)


def test_a_pool_is_never_larger_and_keeps_the_newest_and_the_used() -> None:
    corrector = Messages(pool=7)
    state = taught(corrector, (8,) * 7)
    state.credit(text(8, 0))
    for i in range(7, 30):
        corrector.learn(state, text(8, i), text(8, i))
        state.check()
        assert text(8, i).token_ids in state.held
        assert text(8, 0).token_ids in state.held, "the one that was used stays"
    assert state.texts == 7


def test_one_dominant_message_alone_is_credited() -> None:
    state = taught(Messages(), (6, 6, 6))
    state.credit(text(6, 1))
    assert [m.uses for m in state.held.values()] == [0, 1, 0]


def test_closeness_is_of_what_is_held_now() -> None:
    state, source = taught(Messages(), (6, 6)), text(6, 9)
    before = state.closeness(source)
    assert state.closeness(source) is before
    assert not torch.equal(state.closeness(text(6, 10)), before)
    state.add((9,), Message(source.k, source.v, source.k, source.v, 0))
    assert state.closeness(source).argmax() == 2


def test_a_repeated_message_is_held_once() -> None:
    state = taught(Messages(), (5, 6))
    Messages().learn(state, text(5, 0), moved(text(5, 0), torch.zeros(L, H, 5, D), torch.zeros(L, H, 5, D), 9))
    assert state.texts == 2


def test_only_messages_as_long_as_the_text_are_used() -> None:
    state = taught(Messages(), (5, 6))
    assert Messages().can_correct(state, text(6, 9))
    assert not Messages().can_correct(state, text(7, 9))
    assert not Messages().can_correct(None, text(3, 9))


def test_the_gate() -> None:
    two, source = taught(Messages(), (6, 6)), text(6, 9)
    for state, gamma, accepts in ((None, 1.0, False), (taught(Messages(), (6,)), 1.0, False), (two, 1.0, True),
                                  (two, 0.0, False), (taught(Messages(), (6, 4)), 1.0, False)):
        verdict = MessageEntropy(gamma).judge(state, source, 0)
        assert (verdict.accept, verdict.teach) == (accepts, not accepts)
    near = replace(source, v=source.v * 0)
    two.add((1, 2), Message(near.k, near.v, near.k, near.v, 0))
    assert MessageEntropy(0.3).judge(two, near, 0).accept, "one message is clearly the nearest"


def test_store_round_trip_and_broken_stores() -> None:
    state = taught(Messages(pool=4), (5, 7, 6))
    state.credit(text(5, 0))
    back = MessageState(GEOMETRY, 4)
    back.from_tensors(state.to_tensors())
    assert list(back.held) == list(state.held)
    assert [m.uses for m in back.held.values()] == [m.uses for m in state.held.values()]
    assert back.nbytes == state.nbytes
    for harm in ({"message0.k": torch.zeros(L, H, 5)}, {"message1.dv": torch.full((L, H, 7, D), float("nan"))},
                 {"message2.v": torch.zeros(L, H, 2, D)}, {"message0.counts": torch.zeros(3)}):
        with pytest.raises(StoreError):
            MessageState(GEOMETRY, 4).from_tensors({**state.to_tensors(), **harm})


def test_merge_stays_within_the_pool() -> None:
    one, two = taught(Messages(pool=3), (5, 6)), MessageState(GEOMETRY, 3)
    for i in range(10, 13):
        two.add(ids(5, i), Message(*(kv(5, i).k for _ in range(4)), 0))
    one.merge(two)
    one.check()
    assert one.texts == 3


@pytest.mark.parametrize("bad", [lambda: Messages(pool=0), lambda: MessageEntropy(gamma=1.5)])
def test_impossible_settings_are_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        bad()  # type: ignore[operator]


def asked(question: int, reader: str, lead: int, tokens: int = 20) -> Prompt:
    own, behind = ids(lead, 900 + lead), ids(4, 800 + lead)
    return prompt(reader, (None, own), ("question", ids(tokens, question)), (None, behind))


def questions(session: Session, *numbers: int, tokens: int = 20) -> list[HopResult]:
    results = []
    for number in numbers:
        run = session.start_run()
        results += [session.hop(asked(number, reader, lead, tokens), ANSWER, run)
                    for reader, lead in (("solver", 6), ("critic", 9))]
    return results


@pytest.mark.parametrize("name", ["kvcomm", "kvcomm-upstream"])
def test_reuse_computes_one_token_and_the_first_two_requests_are_dense(name: str) -> None:
    with Session(engine(), override(recipe(name), "gate.gamma=1")) as session:
        hops = questions(session, 1, 2, 3)
        session.memory.check()
    assert [hop.dense for hop in hops] == [True] * 4 + [False] * 2
    for hop in hops[4:]:
        assert hop.entries.recomputed == hop.layers, "the last prompt token alone; the role prompt is cached"
        assert [d.action for d in hop.decisions] == ["correct", "correct"]
        assert hop.effective_reuse_ratio <= 1.0


def test_a_longer_text_makes_every_reader_dense() -> None:
    with Session(engine(), override(recipe("kvcomm"), "gate.gamma=1")) as session:
        questions(session, 1, 2)
        longer, usual = questions(session, 3, tokens=30), questions(session, 4)
    assert [hop.dense for hop in (*longer, *usual)] == [True, True, False, False]


def test_own_text_that_changes_is_computed() -> None:
    with Session(engine(), override(recipe("kvcomm"), "gate.gamma=1")) as session:
        questions(session, 1, 2)
        run = session.start_run()
        lead, question, _ = asked(3, "critic", 9).segments
        changed = Prompt("critic", (lead, question, Segment(ids(7, 1))))
        hop = session.hop(changed, ANSWER, run)
    assert [d.action for d in hop.decisions] == ["correct"]
    assert hop.entries.recomputed == 7 * hop.layers


def test_a_saved_memory_of_many_edges_corrects_as_before(tmp_path: Path) -> None:
    """Edges hold the same base: in memory once, in the file each for itself."""
    method, file = override(recipe("kvcomm"), "gate.gamma=1"), tmp_path / "memory.kvb"
    with Session(engine(), method, prefix_cache=False) as session:
        questions(session, 1, 2)
        session.memory.save(file, engine().identity)
        before = questions(session, 3)
    memory = Memory.load(file, method.corrector, engine().geometry, engine().identity)
    with Session(engine(), method, memory=memory, prefix_cache=False) as fresh:
        after = questions(fresh, 3)
    assert not any(hop.dense for hop in after)
    assert all(torch.equal(one.logits, two.logits) for one, two in zip(before, after, strict=True))
