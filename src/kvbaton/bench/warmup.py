"""Questions that methods learn from before they are measured, with or without the answers agents gave to them.

    questions.txt      one question a line; every agent's dense answer is generated
    transcripts.jsonl  {"question": ..., "solver": ..., "critic": ..., "judge": ...}: answers are read, much sooner done

Lines that are empty or start with # are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbaton.agents import Graph
from kvbaton.bench.chain import Turn
from kvbaton.errors import DataError, UnknownName
from kvbaton.team import Team


@dataclass(frozen=True)
class WarmUp:
    """Inputs of one run and, if they are known, the text of every agent's answer."""

    inputs: Mapping[str, str]
    answers: Mapping[str, str] = field(default_factory=dict)

    def chain(self, team: Team, end_id: int) -> list[Turn]:
        """The run's prompts with the ids that answer them. Generates the answers with ``team`` if none are known.

        An agent that says nothing is forced to end its turn by ``end_id``; nobody reads that.
        """
        if not self.answers:
            return [Turn(turn.prompt, turn.hop.output_ids, turn.agent) if turn.hop.output_ids
                    else Turn(turn.prompt, (end_id,)) for turn in team.run(self.inputs).turns]
        fills = {name: team.text.encode(text) for name, text in {**self.inputs, **self.answers}.items()}
        return [Turn(team.text.prompt(agent.name, *agent.templates, fills), fills[agent.name], agent.name)
                for agent in team.graph.order]


def read_warmup(path: str | Path, graph: Graph, given: Mapping[str, str]) -> list[WarmUp]:
    """The warm-up runs of a file. ``given`` fills inputs that a line does not.

    A plain line is the input "question", or the team's only one. Raises DataError, naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the warm-up questions: {error}") from error
    found = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                found.append(_parse(line, graph, given))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}") from error
    if not found:
        raise DataError(f"{path} holds no warm-up question")
    return found


def _parse(line: str, graph: Graph, given: Mapping[str, str]) -> WarmUp:
    """ValueError says what is wrong with the line."""
    texts = _texts(line, graph)
    known = (*graph.inputs, *graph.names)
    for name, text in texts.items():
        if name not in known:
            raise ValueError(str(UnknownName("input or agent", name, known)))
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name!r} must be a text that is not empty")
    inputs = {**given, **{name: text for name, text in texts.items() if name in graph.inputs}}
    answers = {name: text for name, text in texts.items() if name in graph.names}
    _whole(inputs, graph.inputs, "input")
    if answers:
        _whole(answers, graph.names, "answer")
        if graph.rounds > 1:
            raise ValueError("answers can only be given to a team of one round: leave them out")
    return WarmUp(inputs, answers)


def _texts(line: str, graph: Graph) -> dict[str, Any]:
    if line.startswith("{"):
        texts: dict[str, Any] = json.loads(line)
        return texts
    if "question" not in graph.inputs and len(graph.inputs) > 1:
        raise ValueError(f"which input is this? Write JSON with the keys {', '.join(graph.inputs)}")
    return {"question" if "question" in graph.inputs else graph.inputs[0]: line}


def _whole(texts: Mapping[str, str], names: Sequence[str], what: str) -> None:
    if missing := [name for name in names if name not in texts]:
        raise ValueError(f"the {what} {missing[0]!r} is missing")
