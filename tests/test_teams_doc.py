"""docs/teams.md is run: its code on a tiny model, its team file through the checker."""

from __future__ import annotations

import re
from pathlib import Path

import kvbaton
from kvbaton.teamfile import parse_team
from test_team import engine

PAGE = (Path(__file__).parent.parent / "docs/teams.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_runs(monkeypatch, capsys):
    monkeypatch.setattr(kvbaton, "load", lambda name: engine(), raising=False)
    monkeypatch.setattr("kvbaton.team.recipe", lambda name: kvbaton.recipe("full-shared"))
    scope: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, scope)
    assert "full-shared on tiny" in capsys.readouterr().out
    assert [len(agents) for agents in scope["team"].graph.schedule] == [2, 2, 3]


def test_the_team_file_is_sound():
    text, = blocks("yaml")
    assert [agent.name for agent in parse_team(text).graph.order] == ["solver", "critic"]
