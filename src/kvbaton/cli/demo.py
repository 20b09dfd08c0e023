"""`kvbaton demo`: three agents on a question, dense beside shared, on the embedded model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbaton.cli.app import Device, Dtype, Json, Model, app, emit
from kvbaton.cli.compare import measured, shown
from kvbaton.cli.options import EXAMPLES, Set, engine_of, recipes_of, team_of

TRANSCRIPTS = EXAMPLES / "maths-transcripts.jsonl"


@app.command()
def demo(
    question: Annotated[str | None, typer.Option(help="What the agents are asked. Default: a bakery.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names from `kvbaton methods`. dense is added.")]
    = "dense,full-shared,hybrid",
    settings: Set = None, model: Model = "smollm2", dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """See it work: a solver, a critic and a judge answer a question, dense beside shared KV."""
    spec = team_of("maths")
    given = spec.fill({} if question is None else {"question": question})
    recipes = recipes_of(methods, settings)
    engine = engine_of(model, dtype, device)
    if not json:
        typer.echo(f"Question: {given['question']}\n")
    found = measured(engine, spec, recipes, given, TRANSCRIPTS, repeats=2, answers=True)
    emit(found.to_dict(), json, lambda: shown(found))
