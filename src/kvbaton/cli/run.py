"""`kvbaton run`: one team, one question, one method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbaton.cli.app import Device, Dtype, Json, app, emit
from kvbaton.cli.options import Input, Set, TeamFile, TeamModel, engine_of, filled, recipes_of, team_of

if TYPE_CHECKING:
    from kvbaton.engine.hf import HFEngine
    from kvbaton.engine.session import Session
    from kvbaton.recipes import Recipe
    from kvbaton.team import OnText

MemoryFile = Annotated[Path | None, typer.Option(
    "--memory", help="What was learned before is read from this file if it is there, and written back afterwards.")]


@app.command()
def run(
    team: TeamFile, inputs: Input = None,
    method: Annotated[str | None, typer.Option(help="A name from `kvbaton methods`. Default: the team file's.")] = None,
    settings: Set = None, memory: MemoryFile = None, model: TeamModel = None, dtype: Dtype = None,
    device: Device = None, json: Json = False,
) -> None:
    """Let a team answer; print every agent's text as it comes, then what was reused."""
    spec = team_of(team)
    given = filled(spec, inputs)
    (recipe,) = recipes_of(method or spec.method, settings)
    engine = engine_of(model or spec.model, dtype, device)
    with _session(engine, recipe, memory) as session, spec.build(session=session) as members:
        done = members.run(given, on_token=None if json else _printer())
        session.close()
        if memory is not None:
            session.memory.save(memory, engine.identity)
    emit(done.to_dict(), json, lambda: "\n\n" + done.report())


def _session(engine: HFEngine, recipe: Recipe, memory: Path | None) -> Session:
    from kvbaton.engine.session import Session
    from kvbaton.memory import Memory

    known = None
    if memory is not None and memory.exists():
        known = Memory.load(memory, recipe.corrector, engine.geometry, engine.identity)
    return Session(engine, recipe, memory=known)


def _printer() -> OnText:
    """Prints pieces of answers under their agent's name."""
    speaking = ""

    def show(agent: str, text: str) -> None:
        nonlocal speaking
        if agent != speaking:
            typer.echo(f"\n\n[{agent}]" if speaking else f"[{agent}]")
            speaking = agent
        typer.echo(text, nl=False)

    return show
