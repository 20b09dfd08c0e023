"""Teams of the usual shapes, from roles: ``(name, system)`` pairs. Every agent reads the input ``{question}``.

    chain     a -> b -> c                 each takes up what the one before wrote
    star      a, b, c -> d                workers by themselves, the last reads them all
    full      a -> b; a, b -> c; ...      each reads everyone before
    layered   (a, b) -> (c, d) -> e       each layer reads the whole layer before
    debate    a <-> b <-> c, then d       all but the last answer each other, round by round (`Team(rounds=...)`)
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.agents import Agent
from kvbaton.errors import TeamError
from kvbaton.templates import PREVIOUS

Role = tuple[str, str]
"""Name and system prompt. The system prompt is a template too: double its braces."""


def chain(*roles: Role) -> list[Agent]:
    """Each agent reads the question and what the agent before it wrote."""
    return layered(*[[role] for role in roles])


def star(*roles: Role) -> list[Agent]:
    """All but the last work by themselves; the last reads them all."""
    _at_least(2, roles, "star")
    return layered(roles[:-1], roles[-1:])


def full(*roles: Role) -> list[Agent]:
    """Each agent reads the question and all agents before it."""
    _at_least(1, roles, "full")
    names = [name for name, _ in roles]
    return [_worker(role, names[:i]) for i, role in enumerate(roles)]


def layered(*layers: Sequence[Role]) -> list[Agent]:
    """Each agent reads the question and everyone in the layer before its own."""
    _at_least(1, layers, "layered")
    agents: list[Agent] = []
    before: list[str] = []
    for layer in layers:
        _at_least(1, layer, "a layer of layered")
        agents += [_worker(role, before) for role in layer]
        before = [name for name, _ in layer]
    return agents


def debate(*roles: Role) -> list[Agent]:
    """All but the last debate: each reads what everyone said in the round before. The last hears the final round."""
    _at_least(3, roles, "debate")
    *debaters, judge = roles
    names = [name for name, _ in debaters]
    heard = f"{{question}}\n\nThe last round, empty if you are the first to speak:{_notes(names, PREVIOUS)}"
    ask = "Answer the question anew; say where you now agree or disagree, and why."
    return [
        *(Agent(name, system=system, prompt=f"{heard}\n\nYou are {name}. {ask}") for name, system in debaters),
        Agent(judge[0], system=judge[1], prompt=f"{{question}}\n\nHow the debate ended:{_notes(names)}"
                                                "\n\nDecide, and answer the question."),
    ]


def _worker(role: Role, readable: Sequence[str]) -> Agent:
    name, system = role
    if not readable:
        return Agent(name, system=system, prompt="{question}")
    return Agent(name, system=system, prompt=f"{{question}}\n\nYour colleagues' notes:{_notes(readable)}"
                                             "\n\nBuild on what is right in them and correct what is wrong.")


def _notes(names: Sequence[str], back: str = "") -> str:
    """Texts under their writers' names. A line break, not a space, stands before shared text: no token spans it."""
    return "".join(f"\n\n[{name}]\n{{{name}{back}}}" for name in names)


def _at_least(count: int, given: Sequence[object], what: str) -> None:
    if len(given) < count:
        raise TeamError(f"{what} needs at least {count} role{'s' if count > 1 else ''}, got {len(given)}")
