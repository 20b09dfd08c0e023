"""`kvbaton compare`: methods beside each other on one team and one question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbaton.cli.app import Device, Dtype, Json, app, emit, human_bytes, progress, table
from kvbaton.cli.options import Input, Set, TeamFile, TeamModel, engine_of, filled, recipes_of, team_of

if TYPE_CHECKING:
    from kvbaton.bench.comparison import Comparison, HopRow, MethodRow
    from kvbaton.engine.hf import HFEngine
    from kvbaton.recipes import Recipe
    from kvbaton.teamfile import TeamSpec

WarmupFile = Annotated[Path | None, typer.Option(
    "--warmup-questions", help="Questions (one a line) or transcripts (JSON lines) that methods learn from first.")]
NUMBERS = ("reused", "corrected", "recomputed", "cached", "reuse", "TTFT ms", "speed-up", "KL", "top-1", "KV held",
           "learned")


@app.command()
def compare(
    team: TeamFile, inputs: Input = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names from `kvbaton methods`, or all. dense is added."),
                       ] = "dense,full-shared,kvcmas,hybrid",
    settings: Set = None, warmup_questions: WarmupFile = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each method, interleaved; medians are shown.")] = 3,
    answers: Annotated[bool, typer.Option(help="Let every method answer by itself, too.")] = True,
    model: TeamModel = None, dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Run one question with several methods on equal texts: reuse, first-token time, divergence, memory, answers."""
    spec = team_of(team)
    given = filled(spec, inputs)
    recipes = recipes_of(methods, settings)
    engine = engine_of(model or spec.model, dtype, device)
    found = measured(engine, spec, recipes, given, warmup_questions, repeat, answers)
    emit(found.to_dict(), json, lambda: shown(found))
    found.require_reuse()


def measured(engine: HFEngine, spec: TeamSpec, recipes: tuple[Recipe, ...], inputs: dict[str, str],
             warmup: Path | None, repeats: int, answers: bool) -> Comparison:
    """Run the comparison under a progress display."""
    from kvbaton.bench.compare import Compare
    from kvbaton.bench.warmup import read_warmup

    questions = read_warmup(warmup, spec.graph, inputs) if warmup else []
    trial = Compare(engine, lambda session: spec.build(session=session), recipes, inputs, questions, repeats, answers)
    with progress("compare", trial.steps) as tick:
        return trial.run(tick)


def shown(found: Comparison) -> list[Any]:
    """Tables: a hop each, all later hops together, the answers."""
    ran = [row for row in found.methods if not row.refused]
    hops = [_hop_table(ran, i) for i in range(len(ran[0].hops))]
    refused = [f"{row.recipe.name} cannot run here: {row.refused}" for row in found.methods if row.refused]
    return [*hops, _summary(found, ran), *refused, *_answers(ran)]


def _hop_table(ran: Sequence[MethodRow], index: int) -> Any:
    turn = ran[0].hops[index].turn
    reads = ", ".join(f"{segment.share} {len(segment)}" for segment in turn.prompt.segments if segment.share)
    about = f"{turn.agent}{f', round {turn.round}' if turn.round > 1 else ''}: {len(turn.prompt)} prompt tokens"
    return table(f"{about} ({reads or 'nothing shared'}); KV entries are tokens x layers",
                 ["method", "reused", "corrected", "recomputed", "cached", "TTFT ms", "speed-up", "KL", "top-1",
                  "KV held", "learned", "why recomputed"],
                 [_hop_cells(row.recipe.name, row.hops[index]) for row in ran], right=NUMBERS)


def _hop_cells(method: str, row: HopRow) -> list[str]:
    hop = row.turn.hop
    entries = (hop.entries.reused, hop.entries.corrected, hop.entries.recomputed, hop.entries.cached)
    why = "" if method == "dense" else "; ".join(row.turn.notes)
    return [method, *map(str, entries), f"{row.ttft_s * 1000:.0f}", f"{row.speed_up:.1f} x", _number(row.kl, ".4f"),
            _number(row.agree, ".0%"), human_bytes(hop.held_bytes), human_bytes(hop.learned_bytes), why]


def _summary(found: Comparison, ran: Sequence[MethodRow]) -> Any:
    rows = [[row.recipe.name, f"{row.books.effective:.0%}", f"{row.ttft_s * 1000:.0f}", f"{found.speed_up(row):.1f} x",
             _number(row.kl, ".4f"), _number(row.agree, ".0%"), human_bytes(row.books.learned_bytes)] for row in ran]
    where = found.conditions
    commit = f"commit {where['commit']}{' (dirty)' if where['dirty'] else ''}"
    caption = f"""\
reuse: share of shared KV entries not recomputed. TTFT: submit to first token. speed-up: dense TTFT / TTFT.
KL: nats a token, KL(dense || method) on the dense answer. dense beside itself is the noise floor of the arithmetic.
{found.model}, {found.dtype}, {where["device"]}, {where["threads"]} threads, {commit};
{found.warmup} warm-up questions, {found.repeats} interleaved repeats, medians."""
    return table("All hops after the first, mean", ["method", "reuse", "TTFT ms", "speed-up", "KL", "top-1", "learned"],
                 rows, right=NUMBERS, caption=caption)


def _answers(ran: Sequence[MethodRow]) -> list[Any]:
    """Each agent's own answers, method by method; equal ones once."""
    from rich.text import Text

    out = []
    answered = [row for row in ran if row.answers is not None]
    for index, turn in enumerate(answered[0].answers.turns if answered and answered[0].answers else ()):
        said: dict[str, list[str]] = {}
        for row in answered:
            if row.answers is not None:
                said.setdefault(row.answers.turns[index].text.strip(), []).append(row.recipe.name)
        for text, names in said.items():
            out.append(Text.assemble((f"{turn.agent}, {', '.join(names)}: ", "bold"), text or "(nothing)", "\n"))
    return out


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
