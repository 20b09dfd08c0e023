"""Audits: the divergence they report is the one that two separate sessions show, and they teach without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from hops import ANSWER, dense, same
from kvbaton.bench.chain import divergence
from kvbaton.correctors.record import Recorded
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Generate
from kvbaton.engine.session import Session
from kvbaton.errors import UsageError
from kvbaton.gates import Always, Residual
from kvbaton.prompt import Edge, Prompt
from kvbaton.recipes import Recipe, recipe

SYSTEM = {"solver": tiny.ids(9, 1), "critic": tiny.ids(14, 2)}


def prompt(reader: str, text: int, template: str = "") -> Prompt:
    made = tiny.prompt(reader, (None, SYSTEM[reader]), ("question", tiny.ids(30, text)), (None, tiny.ids(5, 3)))
    return replace(made, template=template)


def gated(gate: object) -> Recipe:
    return replace(recipe("affine"), gate=gate)  # type: ignore[arg-type]


def run(session: Session, text: int, template: str = "") -> HopResult:
    store = session.start_run()
    session.hop(prompt("solver", text, template), ANSWER, store)
    return session.hop(prompt("critic", text, template), ANSWER, store)


def test_a_reuse_hop_is_measured_against_dense_and_taught_from() -> None:
    engine = tiny.engine()
    with Session(engine, gated(Always()), audit=1.0) as session, Session(engine, gated(Always())) as blind:
        for text in (10, 11):
            audited, plain = run(session, text), run(blind, text)
        assert audited.divergence == pytest.approx(divergence(dense(engine, prompt("critic", 11)), plain), abs=1e-6)
        assert plain.divergence is None
        assert torch.equal(audited.logits, plain.logits), "an audit must not change the hop"
        assert audited.entries == plain.entries
        state = session.memory.state(Edge("question", "solver", "critic"))
        assert isinstance(state, Recorded)
        assert (state.record.learned, state.record.reused, state.record.audits) == (2, 1, 1)


def test_a_dense_hop_is_measured_by_what_reuse_would_have_done() -> None:
    engine = tiny.engine()
    with Session(engine, gated(Residual(target=0.0))) as session, Session(engine, gated(Always())) as reuse:
        for text in (10, 11):
            audited, plain = run(session, text), run(reuse, text)
        assert audited.dense
        assert not plain.dense
        assert audited.divergence == pytest.approx(divergence(audited, plain), abs=1e-6)
        assert same(audited, dense(engine, prompt("critic", 11)))


def test_generated_and_empty_answers_are_measured_too() -> None:
    with Session(tiny.engine(), gated(Always()), audit=1.0) as session:
        for text in (10, 11):
            store = session.start_run()
            session.hop(prompt("solver", text), ANSWER, store)
            hop = session.hop(prompt("critic", text), Generate(3), store)
        assert hop.divergence is not None
        assert hop.divergence > 0
        store = session.start_run()
        session.hop(prompt("solver", 12), ANSWER, store)
        stop = frozenset(range(tiny.VOCAB))
        assert session.hop(prompt("critic", 12), Generate(3, stop_ids=stop), store).divergence is not None


def test_a_changed_role_prompt_goes_dense_and_learns_anew() -> None:
    with Session(tiny.engine(), recipe("affine")) as session:
        assert [run(session, text, "old").dense for text in (10, 11, 12)] == [True, False, False]
        assert [run(session, text, "new").dense for text in (13, 14)] == [True, False]
        assert {str(edge) for edge in session.memory.edges()} == {
            "question: solver~old -> critic~old", "question: solver~new -> critic~new"}
        assert run(session, 15, "new").decisions[0].source == "solver"


def test_texts_of_another_kind_go_dense_within_two_runs() -> None:
    """Two kinds of text: each uses tokens of its own."""
    def hop(session: Session, text: int, first_token: int) -> HopResult:
        words, store = tuple(first_token + i % 8 for i in tiny.ids(30, text)), session.start_run()
        for reader in ("solver", "critic"):
            made = tiny.prompt(reader, (None, SYSTEM[reader]), ("question", words), (None, (1,)))
            last = session.hop(made, ANSWER, store)
        return last

    with Session(tiny.engine(), recipe("affine")) as session:
        assert [hop(session, text, 0).dense for text in range(10, 16)] == [True] + [False] * 5
        foreign = [hop(session, text, 80) for text in range(20, 24)]
        assert foreign[0].dense
        assert "foreign text" in foreign[0].decisions[0].reason
        assert not foreign[-1].dense, "their kind is known by now"
        assert not hop(session, 30, 0).dense, "and the old one is not forgotten"


def test_a_share_outside_0_to_1_is_refused() -> None:
    with pytest.raises(UsageError, match="audit"):
        Session(tiny.engine(), recipe("affine"), audit=2.0)
