"""Hops decoded together give what each gives alone: float32, every family, lengths and plans mixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.tiny import FAMILIES, build, engine, ids, prompt

from kvbaton.bench.cast import taught
from kvbaton.bench.chain import Turn
from kvbaton.engine.attention import AttentionCall, as_bias, visible
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force, Generate, Sampled
from kvbaton.engine.session import Call, Session
from kvbaton.engine.together import attend_each, attend_one_by_one
from kvbaton.errors import PromptTooLong
from kvbaton.overrides import override
from kvbaton.prompt import Prompt
from kvbaton.recipes import recipe
from kvbaton.references import RunStore

QUESTIONS = [ids(n, n) for n in (23, 9, 14, 30)]
LIMITS = (7, 1, 12, 5)


def lesson(seed: int) -> list[Turn]:
    question, solved = ids(12 + seed, seed), ids(6, 50 + seed)
    return [Turn(solver(question), solved, "solver"), Turn(critic(question, solved), ids(5, 60 + seed), "critic")]


def solver(question: tuple[int, ...]) -> Prompt:
    return prompt("solver", (None, ids(5, 2)), ("question", question), (None, ids(4, 3)))


def critic(question: tuple[int, ...], solved: tuple[int, ...]) -> Prompt:
    return prompt("critic", (None, ids(11, 4)), ("question", question), (None, ids(3, 5)),
                  ("solver", solved or ids(1, 1)), (None, ids(2, 6)))


LESSONS = [lesson(seed) for seed in range(3)]


def play(session: Session, together: bool, decodes: list[Generate | Force]) -> tuple[list[HopResult], list[RunStore]]:
    """Solver, then critic, on every question; the last question's critic has no run to reuse from."""
    runs = [session.start_run() for _ in QUESTIONS]
    results: list[HopResult] = []
    solved: list[tuple[int, ...]] = [()] * len(runs)
    for reader in ("solver", "critic"):
        asked = [solver(q) if reader == "solver" else critic(q, s) for q, s in zip(QUESTIONS, solved, strict=True)]
        if reader == "critic":
            runs[-1] = session.start_run()
        calls = [Call(p, d, r, reader) for p, d, r in zip(asked, decodes, runs, strict=True)]
        made = session.hop_together(calls) if together else [session.hop(c.prompt, c.decode, c.run, c.writes)
                                                             for c in calls]
        solved = [hop.output_ids for hop in made]
        results += made
    return results, runs


def equal(one: tuple[list[HopResult], list[RunStore]], two: tuple[list[HopResult], list[RunStore]]) -> None:
    for a, b in zip(one[0], two[0], strict=True):
        assert a.output_ids == b.output_ids
        assert (a.stopped, a.dense, a.decisions, a.entries) == (b.stopped, b.dense, b.decisions, b.entries)
        assert len(a.token_times_s) == len(b.token_times_s)
        assert (a.logits is None) == (b.logits is None)
        if a.logits is not None:
            assert torch.allclose(a.logits, b.logits, rtol=0, atol=1e-5 * float(a.logits.abs().max()))
    for a, b in zip(one[1], two[1], strict=True):
        assert a.nbytes == b.nbytes
        assert a.boundary_bytes == b.boundary_bytes


def same_kv(one: RunStore, two: RunStore, *segments: object) -> int:
    """Compares what two runs hold of the segments; how many they hold."""
    held = [(one.get(s), two.get(s)) for s in segments]
    for a, b in held:
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert (a.start, a.source, a.exact) == (b.start, b.source, b.exact)
        for x, y in ((a.k, b.k), (a.v, b.v), *((h, g) for (_, h), (_, g) in zip(a.boundary, b.boundary, strict=True))):
            assert torch.allclose(x, y, rtol=0, atol=1e-5 * float(x.abs().max()))
    return sum(a is not None for a, _ in held)


UPPER_LAYERS = override(override(recipe("droidspeak"), "selector.first=2"), "selector.last=3")
"""Readers need the hidden states that enter layer 2 of what was written."""


@pytest.mark.parametrize(("family", "method"), [
    *((family, recipe("full-shared")) for family in FAMILIES), ("llama", recipe("hybrid")),
    ("mistral-window", recipe("hybrid")), ("qwen2", UPPER_LAYERS),
], ids=lambda value: getattr(value, "name", value))
def test_together_is_as_one_by_one(family, method):
    decodes = [Generate(limit) for limit in LIMITS]
    with taught(engine(family), method, LESSONS) as session:
        alone = play(session, False, decodes)
        together = play(session, True, decodes)
    equal(alone, together)
    if method.name == "full-shared":
        assert {hop.dense for hop in together[0][4:]} == {True, False}, "dense and reuse hops are in one batch"
    held = 0
    for i, (question, a, b) in enumerate(zip(QUESTIONS, alone[1], together[1], strict=True)):
        wrote = prompt("x", ("solver", together[0][i].output_ids), ("critic", together[0][4 + i].output_ids))
        held += same_kv(a, b, solver(question).segments[1], *wrote.segments)
    assert held >= 8
    assert method is not UPPER_LAYERS or together[0][4].boundary_bytes


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gemma3"])
def test_what_a_reader_makes_of_the_batch_is_right(family):
    """Logits of a reader behind answers that were decoded together equal those behind answers decoded alone."""
    logits = []
    for together in (False, True):
        with Session(engine(family), recipe("full-shared")) as session:
            results, runs = play(session, together, [Generate(limit) for limit in LIMITS])
            reads = [critic(q, r.output_ids) for q, r in zip(QUESTIONS[:3], results, strict=False)]
            logits.append([session.hop(p, Force(ids(4, 9)), run).logits for p, run in zip(reads, runs, strict=False)])
    for a, b in zip(*logits, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(a.abs().max()))


def test_answers_that_stop_early_leave_and_forced_ones_take_part():
    plain = [Generate(12)] * 4
    with Session(engine(), recipe("full-shared")) as session:
        free, _ = play(session, False, plain)
    stops = frozenset({free[0].output_ids[3], free[2].output_ids[0]})
    mixed: list[Generate | Force] = [Generate(12, stop_ids=stops), Force(ids(6, 8)), Generate(12, stop_ids=stops),
                                     Generate(9)]
    with Session(engine(), recipe("full-shared")) as session:
        alone = play(session, False, mixed)
    with Session(engine(), recipe("full-shared")) as session:
        together = play(session, True, mixed)
    equal(alone, together)
    assert together[0][2].output_ids == ()
    assert together[0][2].stopped
    assert len({len(hop.output_ids) for hop in together[0]}) > 2


def test_a_seed_means_the_same_in_a_batch():
    decodes = [Generate(8, Sampled(1.5, seed=seed)) for seed in (3, 3, 4, 5)]
    outputs = []
    for together in (False, True):
        with Session(engine("qwen2"), recipe("dense")) as session:
            outputs.append([hop.output_ids for hop in play(session, together, decodes)[0]])
    assert outputs[0] == outputs[1]


def test_one_call_is_a_hop_and_none_is_nothing():
    with Session(engine(), recipe("full-shared")) as session:
        run = session.start_run()
        assert session.hop_together([]) == []
        (one,) = session.hop_together([Call(solver(QUESTIONS[0]), Generate(6), run, "solver")])
        assert one.output_ids == session.hop(solver(QUESTIONS[0]), Generate(6), session.start_run()).output_ids


def test_a_batch_that_fails_leaves_every_run_as_it_was(monkeypatch):
    with Session(engine(), recipe("full-shared")) as session:
        runs = [session.start_run() for _ in range(2)]
        good = Call(solver(QUESTIONS[0]), Generate(4), runs[0], "solver")
        with pytest.raises(PromptTooLong):
            session.hop_together([good, Call(solver(ids(600, 1)), Generate(4), runs[1], "solver")])
        calls = 0

        def broken(run, view, token_ids, forward=HFEngine.run):
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("out of memory")
            return forward(run, view, token_ids)
        with monkeypatch.context() as patch:
            patch.setattr(HFEngine, "run", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                session.hop_together([good, replace(good, run=runs[1])])
        assert [run.nbytes for run in runs] == [0, 0]
        assert len(session.hop_together([good, replace(good, run=runs[1])])) == 2
        assert all(run.nbytes for run in runs)


def test_learning_in_a_batch_is_learning():
    """Two texts of one edge, taught in one batch and one after the other, teach the same."""
    sizes = []
    for together in (False, True):
        with Session(HFEngine(build("llama")), recipe("kvcmas")) as session:
            results, _ = play(session, together, [Generate(3)] * 4)
            sizes.append(results[-1].learned_bytes)
            assert all(hop.learn_s >= 0 for hop in results)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("window", [None, 7])
def test_one_call_a_layer_is_a_call_a_row(window):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, 16), torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16)
    positions, call = torch.tensor([39, 4, 20]), AttentionCall(0.3, window)
    bias = as_bias(visible(positions, 40, window), q.dtype)
    assert torch.allclose(attend_each(q, k, v, bias, 0.3), attend_one_by_one(q, k, v, positions, call), atol=1e-5)
