"""Teaching: interrupted anywhere, it ends with the same memory; afterwards nothing is learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbaton import store
from kvbaton.bench.cast import branch, cast
from kvbaton.bench.chain import Turn, replay
from kvbaton.prompt import Edge
from kvbaton.recipes import recipe
from kvbaton.references import RunStore
from tiny import engine, ids, prompt


def chain(seed: int) -> list[Turn]:
    text, answer = ids(20, seed), ids(5, seed + 1)
    first = prompt("a", (None, ids(9, 100)), ("q", text), (None, ids(3, 101)))
    second = prompt("b", (None, ids(14, 102)), ("q", text), (None, ids(2, 103)), ("a", answer), (None, ids(3, 104)))
    return [Turn(first, answer, "a"), Turn(second, ids(4, seed + 2), None)]


LESSONS = [chain(10 * i) for i in range(4)]


def tensors(file: Path) -> list[dict[str, torch.Tensor]]:
    return list(store.read(file)[1])


@pytest.mark.parametrize("method", ["kvcmas", "affine", "kvcomm", "graphflow-bare"])
@pytest.mark.parametrize("stop", [1, 3])
def test_interrupted_teaching_ends_the_same(tmp_path: Path, method: str, stop: int) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    cast(engine(), recipe(method), LESSONS, whole).close()

    def interrupt(done: int) -> None:
        if done == stop:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        cast(engine(), recipe(method), LESSONS, cut, interrupt)
    assert not cut.exists()
    told: list[int] = []
    cast(engine(), recipe(method), LESSONS, cut, told.append).close()
    assert told == list(range(stop + 1, 5))
    assert {p.name for p in tmp_path.iterdir()} == {"whole.safetensors", "cut.safetensors"}
    for a, b in zip(tensors(whole), tensors(cut), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_is_learned_after_teaching(tmp_path: Path) -> None:
    session = cast(engine(), recipe("affine"), LESSONS[:2], tmp_path / "x.safetensors")
    def texts() -> dict[Edge, int]:
        states = {edge: session.memory.state(edge) for edge in session.memory.edges()}
        return {edge: state.texts for edge, state in states.items() if state}
    before = texts()
    replay(session, LESSONS[3])
    session.close()
    assert texts() == before
    assert set(before.values()) == {2}


def test_a_branch_leaves_the_run_alone(tmp_path: Path) -> None:
    session = cast(engine(), recipe("full-shared"), [], tmp_path / "x.safetensors")
    run: RunStore = session.start_run()
    from kvbaton.engine.sampling import Force

    first, second = LESSONS[0]
    session.hop(first.prompt, Force(first.answer), run, writes=first.writes)
    held = run.get(first.prompt.segments[1])
    session.hop(second.prompt, Force(second.answer), branch(run, second.prompt))
    session.close()
    assert run.get(first.prompt.segments[1]) is held
