"""What the words of the command line mean: models, methods with settings, teams, inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbaton.cli.app import working
from kvbaton.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from kvbaton.engine.hf import HFEngine
    from kvbaton.recipes import Recipe
    from kvbaton.teamfile import TeamSpec

EXAMPLES = Path(__file__).parent.parent / "examples"

SHIPPED = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))

TeamFile = Annotated[str, typer.Argument(
    metavar="TEAM", show_default=False,
    help=f"A team file (YAML), or the name of a shipped one: {', '.join(SHIPPED)}.")]
Input = Annotated[list[str] | None, typer.Option(
    "--input", "-i", metavar="NAME=TEXT", help="An input of the team; NAME=@FILE reads it from a file. Repeatable.")]
TeamModel = Annotated[str | None, typer.Option(
    "--model", help="A name from `kvbaton models`, a local folder or a Hugging Face id. Default: the team file's.")]
Set = Annotated[list[str] | None, typer.Option(
    "--set", metavar="[METHOD:]PART.FIELD=VALUE",
    help="Change a setting of every method that has it, or of the one named. Repeatable. "
         "`kvbaton methods --markdown` lists the settings.")]


def team_of(word: str) -> TeamSpec:
    """The team file of that path or shipped name."""
    from kvbaton.teamfile import load_team

    shipped = EXAMPLES / f"{word}.yaml"
    if not Path(word).exists() and shipped.exists():
        return load_team(shipped)
    if not Path(word).exists() and Path(word).suffix not in (".yaml", ".yml"):
        raise UnknownName("team (nor is it a file)", word, SHIPPED)
    return load_team(word)


def inputs_of(words: Sequence[str] | None) -> dict[str, str]:
    """``NAME=TEXT`` and ``NAME=@FILE`` as a mapping."""
    inputs = {}
    for word in words or ():
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UsageError(f"cannot read the input {word!r}: write NAME=TEXT or NAME=@FILE")
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"cannot read the input {name!r} from {text[1:]!r}: {error}") from error
        inputs[name] = text
    return inputs


def filled(spec: TeamSpec, words: Sequence[str] | None) -> dict[str, str]:
    """The team's inputs from ``--input`` and its own defaults. Checked before a model is loaded."""
    given = spec.fill(inputs_of(words))
    for name in given:
        if name not in spec.graph.inputs:
            raise UnknownName("input", name, spec.graph.inputs)
    if missing := [name for name in spec.graph.inputs if name not in given]:
        raise UsageError(f"the team needs {', '.join(missing)}: give --input {missing[0]}=TEXT")
    return given


def recipes_of(names: str, settings: Sequence[str] | None = None) -> tuple[Recipe, ...]:
    """The methods of a comma-separated list ("all": every one) with ``--set`` applied to those that have the field.

    Raises UnknownName for a method nobody registered and for a setting that none of them has.
    """
    from kvbaton import recipes

    wanted = recipes.names() if names.strip() == "all" else [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UsageError("give one method at least, for example --methods full-shared")
    chosen = {name: recipes.recipe(name) for name in wanted}
    for setting in settings or ():
        _apply(setting, chosen)
    return tuple(chosen.values())


def _apply(setting: str, chosen: dict[str, Recipe]) -> None:
    """Change ``setting`` in every recipe of ``chosen`` that has it, or in the one it names."""
    from kvbaton.overrides import override

    head, colon, rest = setting.partition(":")
    only = head if colon and "=" not in head else None
    if only is not None and only not in chosen:
        raise UnknownName("method in --set", only, chosen)
    unknown: list[UnknownName] = []
    targets = [only] if only else list(chosen)
    for name in targets:
        try:
            chosen[name] = override(chosen[name], rest if only else setting)
        except UnknownName as error:
            unknown.append(error)
    if len(unknown) == len(targets):
        raise max(unknown, key=lambda error: error.nearest is not None)


def engine_of(model: str, dtype: str | None, device: str | None) -> HFEngine:
    """Load a model; says on stderr what it is doing, as it takes seconds."""
    with working(f"loading {model}"):
        from kvbaton.engine.models import load

        return load(model, dtype=dtype, device=device)
