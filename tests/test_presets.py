from __future__ import annotations

import pytest

from kvbaton import presets
from kvbaton.agents import Graph
from kvbaton.errors import TeamError

A, B, C, D, E = ((name, f"You are {name}.") for name in "abcde")


def reads(agents):
    return {agent.name: [field.share for field in agent.fields if field.name != "question"] for agent in agents}


@pytest.mark.parametrize(("agents", "expected"), [
    (presets.chain(A, B, C), {"a": [], "b": ["a"], "c": ["b"]}),
    (presets.star(A, B, C), {"a": [], "b": [], "c": ["a", "b"]}),
    (presets.full(A, B, C), {"a": [], "b": ["a"], "c": ["a", "b"]}),
    (presets.layered([A, B], [C, D], [E]), {"a": [], "b": [], "c": ["a", "b"], "d": ["a", "b"], "e": ["c", "d"]}),
    (presets.debate(A, B, C), {"a": ["a@-1", "b@-1"], "b": ["a@-1", "b@-1"], "c": ["a", "b"]}),
])
def test_a_preset_reads_what_its_drawing_says(agents, expected):
    assert reads(agents) == expected
    graph = Graph.of(agents)
    assert graph.inputs == ("question",)
    assert {agent.name: agent.system for agent in graph.agents} == {n: f"You are {n}." for n in expected}


def test_debaters_speak_every_round_and_the_judge_once():
    graph = Graph.of(presets.debate(A, B, C), rounds=3)
    assert [[agent.name for agent in agents] for agents in graph.schedule] == [["a", "b"], ["a", "b"], ["a", "b", "c"]]


@pytest.mark.parametrize("agents", [presets.chain(A, B), presets.star(A, B), presets.debate(A, B, C)])
def test_no_space_stands_before_shared_text(agents):
    """A space there would become a token of its own and leave the text without its usual first token."""
    for agent in agents:
        literals = [part for part in agent.templates[1].parts[:-1] if isinstance(part, str)]
        assert all(literal.endswith("\n") for literal in literals)


@pytest.mark.parametrize("make", [
    presets.chain, presets.full, presets.layered, lambda: presets.star(A), lambda: presets.debate(A, B),
    lambda: presets.layered([A], [])])
def test_too_few_roles(make):
    with pytest.raises(TeamError, match="at least"):
        make()
