"""Fidelity takes short cuts: hops that are the same with every method run once, the gold answer shares a prefill.

The plain reference runs every hop of every method, and the decider's once more for the gold answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from kvbaton.bench.cast import branch, taught
from kvbaton.bench.chain import divergence, replay
from kvbaton.bench.fidelity import Fidelity, nll
from kvbaton.bench.measures import Scene
from kvbaton.bench.runner import SOURCES
from kvbaton.bench.script import Script
from kvbaton.bench.tasks import task
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.gates import Always
from kvbaton.recipes import Recipe, recipe
from kvbaton.selectors.layers import LayerBlock
from tiny import engine_with_text

METHODS = ("full-shared", "affine", "kvcmas-isolated", "cacheblend", "droidspeak", "kvcomm", "epic", "dense")
"""Chained, Origin, isolated and learned, rows by deviation, kept hidden states, own text corrected, isolated, none."""


@cache
def engine() -> HFEngine:
    return engine_with_text(max_position_embeddings=4096)


def scene(track: str, number: int) -> Scene:
    """A question of one of the HotpotQA tracks, with answers of one's own making."""
    made, text = task(track), engine().text
    assert text is not None
    script = Script(text, made.agents(), engine().eos_ids)
    row = {"id": str(number), "question": f"Who is number {number}?", "answer": f"Ada {number}", "paragraphs": [
        {"title": f"Title {number} {i}", "text": f"Ada {i} lived in {number + i} houses."} for i in range(10)]}
    question = made.question(row, number)
    assert question is not None
    outputs = {agent.name: script.ids(f"{agent.name} says {number}. " * 4) for agent in made.agents()}
    return Scene(made, script, question, script.turns(question, outputs))


def plainly(one: Scene, session: Session) -> tuple[float, float, int]:
    """KL of the reader's hop, NLL of the gold answer and bytes held, with every hop run by ``session`` itself."""
    with Session(engine(), recipe("dense"), prefix_cache=False) as dense:
        truth = replay(dense, one.turns)[-1]
    run = session.start_run()
    for turn in one.turns[:-1]:
        session.hop(turn.prompt, Force(turn.answer), run, writes=turn.writes)
    reader, gold = one.turns[-1], one.script.ids(one.question.gold)
    gold_nll = nll(session.hop(reader.prompt, Force(gold), branch(run, reader.prompt)).logits, gold)
    hop = session.hop(reader.prompt, Force(reader.answer), run, writes=reader.writes)
    return divergence(truth, hop), gold_nll, hop.held_bytes


def ungated(method: str) -> Recipe:
    """The method on four layers, reusing whatever it can; dense as it is."""
    found = recipe(method)
    if isinstance(found.selector, LayerBlock):
        found = replace(found, selector=LayerBlock(1, 2))
    return found if method == "dense" else replace(found, gate=Always())


@pytest.mark.parametrize("track", ["hotpotqa-evidence", "hotpotqa-reports"])
@pytest.mark.parametrize("method", METHODS)
def test_short_cuts_change_nothing(track: str, method: str) -> None:
    asked, lessons = scene(track, 0), [scene(track, number).turns for number in (1, 2, 3)]
    with Session(engine(), SOURCES, prefix_cache=False) as reference, \
            taught(engine(), ungated(method), lessons) as session:
        measure = Fidelity()
        measure.open(asked, reference)
        (record,) = measure.measure([asked], session, repeat=0)
        kl, gold_nll, held_bytes = plainly(asked, session)
    first, last = record["hops"]
    assert (first["agent"], first["handed"]) == (asked.turns[0].prompt.reader, 0)
    assert (last["agent"], last["handed"]) == ("reader", 10)
    assert last["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-8)
    assert record["gold_nll"] == pytest.approx(gold_nll, rel=1e-5)
    assert last["held_bytes"] == held_bytes
    assert (last["reuse"] > 0) == (method != "dense")


def test_hops_that_every_method_runs_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run_by = scene("hotpotqa-evidence", 0), Counter[str]()
    hop = Session.hop

    def counted(self: Session, *given: object, **named: object) -> object:
        run_by[self.recipe.name] += 1
        return hop(self, *given, **named)  # type: ignore[arg-type]
    monkeypatch.setattr(Session, "hop", counted)
    with Session(engine(), SOURCES, prefix_cache=False) as reference:
        measure = Fidelity()
        measure.open(asked, reference)
        for name in ("full-shared", "epic", "droidspeak", "kvcomm"):
            with Session(engine(), ungated(name)) as session:
                measure.measure([asked], session, repeat=0)
    assert run_by["full-shared"] == run_by["epic"] == 2
    assert run_by["droidspeak"] == run_by["kvcomm"] == 11
