from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.agents import Agent, Graph
from kvbaton.errors import TeamError


def team(**prompts):
    return [Agent(name, prompt) for name, prompt in prompts.items()]


def names(agents):
    return [agent.name for agent in agents]


def test_placeholders_give_the_order_and_the_inputs():
    graph = Graph.of(team(judge="{q}{solver}{critic}", critic="{q}{solver}", solver="{q} and {hint}"))
    assert names(graph.order) == ["solver", "critic", "judge"]
    assert graph.inputs == ("q", "hint")


def test_agents_that_do_not_wait_for_each_other_keep_their_order():
    assert names(Graph.of(team(c="{q}", a="{q}", d="{a}{b}{c}", b="{q}")).order) == ["c", "a", "b", "d"]


def test_a_system_message_is_a_template_too():
    graph = Graph.of([Agent("a", "{q}", system="As {b} says"), Agent("b", "{q}")])
    assert names(graph.order) == ["b", "a"]


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(
    st.permutations(range(n)), st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n))))
def test_writers_come_before_their_readers(case):
    listed, edges = case
    reads = {i: [j for j in range(i) if edges[i][j]] for i in listed}
    graph = Graph.of([Agent(f"a{i}", "{q}" + "".join(f"{{a{j}}}" for j in reads[i])) for i in listed])
    at = {name: k for k, name in enumerate(names(graph.order))}
    assert len(at) == len(listed)
    assert all(at[f"a{j}"] < at[f"a{i}"] for i in listed for j in reads[i])


@pytest.mark.parametrize(("prompts", "words"), [
    ({"a": "{b}", "b": "{a}"}, "a -> b -> a"),
    ({"a": "{a}"}, "a -> a"),
    ({"x": "{c}", "a": "{c}", "b": "{a}", "c": "{b}"}, "c -> a -> b -> c"),
])
def test_a_cycle_is_printed(prompts, words):
    with pytest.raises(TeamError) as caught:
        Graph.of(team(**prompts))
    assert words in str(caught.value)
    assert "{name@-1}" in str(caught.value)


def test_the_round_before_breaks_a_cycle():
    assert names(Graph.of(team(a="{q}{b@-1}{a@-1}", b="{a}")).order) == ["a", "b"]


def test_duplicate_agent_names():
    with pytest.raises(TeamError, match="two agents are called 'a'"):
        Graph.of([Agent("a", "{q}"), Agent("b", "{q}"), Agent("a", "{q}")])


def test_empty_agent_list():
    with pytest.raises(TeamError, match="at least one agent"):
        Graph.of([])


def test_unknown_placeholder_names_place_and_nearest():
    with pytest.raises(TeamError, match=re.escape("agent 'judge', prompt, line 2, column 3: unknown placeholder "
                                                  "'solvr': did you mean 'solver'?")):
        Graph.of([Agent("solver", "{q}"), Agent("judge", "{q}\n  {solvr}")], inputs=["q"])


def test_unknown_agent_of_the_round_before():
    with pytest.raises(TeamError, match="did you mean 'solver'"):
        Graph.of(team(solver="{q}{solvr@-1}"))


def test_an_input_of_the_round_before():
    with pytest.raises(TeamError, match="inputs stay the same"):
        Graph.of(team(a="{q}{q@-1}"))


def test_a_name_that_is_input_and_agent():
    with pytest.raises(TeamError, match="'a' is an input and an agent"):
        Graph.of(team(a="{q}"), inputs=["q", "a"])


def test_an_input_declared_twice():
    with pytest.raises(TeamError, match="declared twice"):
        Graph.of(team(a="{q}"), inputs=["q", "q"])


def test_an_input_that_nobody_reads():
    with pytest.raises(TeamError, match=r"no agent reads \{hint\}"):
        Graph.of(team(a="{q}"), inputs=["q", "hint"])


@pytest.mark.parametrize(("fields", "words"), [
    ({"name": "a b", "prompt": "{q}"}, "no name for an agent"),
    ({"name": "", "prompt": "{q}"}, "no name for an agent"),
    ({"name": "a@-1", "prompt": "{q}"}, "no name for an agent"),
    ({"name": "a", "prompt": " \n"}, "empty prompt"),
    ({"name": "a", "prompt": "{q", "system": "fine"}, r"agent 'a', prompt, line 1, column 1: a lone '\{'"),
    ({"name": "a", "prompt": "{q}", "system": "x\n}"}, "agent 'a', system, line 2, column 1"),
    ({"name": "a", "prompt": "{q}", "max_new_tokens": 0}, "max_new_tokens"),
    ({"name": "a", "prompt": "{q}", "stop": "ab"}, "list of texts"),
    ({"name": "a", "prompt": "{q}", "stop": ("a", "")}, "list of texts"),
])
def test_an_agent_that_makes_no_sense(fields, words):
    with pytest.raises(TeamError, match=words):
        Agent(**fields)


def test_every_agent_runs_in_the_last_round_and_only_the_heard_before():
    graph = Graph.of(team(a="{q}{b@-1}", b="{q}{a@-1}{c}", c="{q}", judge="{a}{b}"), rounds=3)
    assert [names(agents) for agents in graph.schedule] == [["a", "c", "b"], ["a", "c", "b"], ["a", "c", "b", "judge"]]


def test_rounds_that_nobody_would_hear():
    with pytest.raises(TeamError, match="nothing said more than 1 round before the end is read"):
        Graph.of(team(a="{q}", b="{a}"), rounds=2)
    with pytest.raises(TeamError, match="more than 2 rounds before"):
        Graph.of(team(a="{q}", b="{a@-1}"), rounds=3)
    with pytest.raises(TeamError, match="rounds must be 1 or more"):
        Graph.of(team(a="{q}"), rounds=0)
