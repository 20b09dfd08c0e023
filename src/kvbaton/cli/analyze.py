"""`kvbaton analyze`: rank, error, coverage, sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvbaton.cli.app import Device, Dtype, Json, Model, Tick, app, emit, progress, table
from kvbaton.cli.evaluate import DataFile, DataFolder, Methods, evaluation
from kvbaton.cli.options import Set, recipes_of

if TYPE_CHECKING:
    from kvbaton.bench.chain import Chain
    from kvbaton.bench.result import Record
    from kvbaton.engine.hf import HFEngine

    Work: TypeAlias = Callable[[HFEngine, list[Chain], list[Chain], Tick], Iterator[Record]]

analyze = typer.Typer(name="analyze", help="What reuse does to keys and values.", no_args_is_help=True)
app.add_typer(analyze)

Task = Annotated[str, typer.Option(help="The task whose teams are looked at.")]
Count = Annotated[int, typer.Option("--n", help="Questions to look at.")]
Learn = Annotated[int, typer.Option(help="Other questions that a method learns from first.")]
Tokens = Annotated[int, typer.Option(help="Longest answer of an agent.")]
Seed = Annotated[int, typer.Option(help="Draws the questions.")]
Out = Annotated[Path | None, typer.Option(help="Results file; default runs/WHAT-TASK-MODEL.jsonl.")]


@dataclass(frozen=True)
class _Analysis:
    """What is looked at. ``steps``: ticks of ``work``; ``note``: goes with the table."""

    what: str
    title: str
    note: str
    steps: int
    work: Work


@dataclass(frozen=True)
class _Place:
    """The options that every analysis has."""

    task: str
    model: str
    n: int
    learn: int
    answer_tokens: int
    seed: int
    out: Path | None
    data: Path | None
    data_dir: Path | None
    dtype: str | None
    device: str | None
    json: bool


@analyze.command()
def rank(
    task: Task = "gsm8k", model: Model = "smollm2", n: Count = 5, answer_tokens: Tokens = 64, seed: Seed = 0,
    out: Out = None, data: DataFile = None, data_dir: DataFolder = None, dtype: Dtype = None, device: Device = None,
    json: Json = False,
) -> None:
    """Effective rank (90 % of energy) of texts' KV and of their offsets, layer by layer."""
    from kvbaton.bench import analyze as work

    _run(_Analysis(
        "rank", "Effective rank by layer",
        "Least rank that keeps 90 % of the squared singular values of [tokens, heads x dim]; means over texts. "
        "offset: true KV minus the first owner's.", n, lambda engine, chains, _, tick: work.rank(engine, chains, tick),
    ), _Place(task, model, n, 0, answer_tokens, seed, out, data, data_dir, dtype, device, json))


@analyze.command()
def error(
    methods: Annotated[str, typer.Option(help="Methods beside chained, origin and isolated; empty: none.")] = "",
    task: Task = "gsm8k", model: Model = "smollm2", n: Count = 5, learn: Learn = 5, answer_tokens: Tokens = 64,
    seed: Seed = 0, out: Out = None, data: DataFile = None, data_dir: DataFolder = None, settings: Set = None,
    dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Error of reused keys and values against dense, by layer and by agent along the chain."""
    from kvbaton.bench import analyze as work

    recipes = (*work.starting_points(), *(recipes_of(methods, settings) if methods.strip() else ()))
    _run(_Analysis(
        "error", "Relative error of reused text",
        "Frobenius norm of the difference over that of dense. chained, origin, isolated: reuse without correction from "
        "each starting point. Gates are set to always.", len(recipes),
        lambda engine, chains, before, tick: work.error(engine, recipes, chains, before, tick),
    ), _Place(task, model, n, learn, answer_tokens, seed, out, data, data_dir, dtype, device, json))


@analyze.command()
def coverage(
    methods: Methods = "cacheblend,relaycaching,random",
    task: Task = "gsm8k", model: Model = "smollm2", n: Count = 3, learn: Learn = 5, answer_tokens: Tokens = 64,
    seed: Seed = 0, out: Out = None, data: DataFile = None, data_dir: DataFolder = None, settings: Set = None,
    dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Share of full-shared error that each method removes, beside random rows at the same budget."""
    from kvbaton.bench import analyze as work

    recipes = tuple(r for r in recipes_of(methods, settings) if r.name not in ("dense", "full-shared"))
    _run(_Analysis(
        "coverage", "Error removed",
        "removed: share of full-shared's squared KV error; random: random rows at the same budget (share of entries "
        "recomputed).", len(recipes),
        lambda engine, chains, before, tick: work.cover(engine, recipes, chains, before, seed, tick),
    ), _Place(task, model, n, learn, answer_tokens, seed, out, data, data_dir, dtype, device, json))


@analyze.command()
def sweep(
    field: Annotated[str, typer.Argument(metavar="part.field=a,b,c", help="A field and its values.")],
    methods: Methods = "dense,full-shared,kvcmas",
    task: Task = "gsm8k", model: Model = "smollm2", n: Count = 10, learn: Learn = 10, answer_tokens: Tokens = 64,
    seed: Seed = 0, out: Out = None, data: DataFile = None, data_dir: DataFolder = None, settings: Set = None,
    dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Fidelity and cost while one field of the methods that have it takes several values."""
    from kvbaton.bench.fidelity import Fidelity
    from kvbaton.bench.runner import Evaluation
    from kvbaton.bench.tasks import task as task_of
    from kvbaton.bench.variants import vary

    recipes = vary(recipes_of(methods, settings), field)
    spec = Evaluation(task_of(task), recipes, n, learn, seed, 1, answer_tokens, Fidelity())
    out = out or Path("runs") / f"sweep-{task}-{Path(model).name}.jsonl"
    evaluation(spec, model, out, data, data_dir, dtype, device, json)


def _run(analysis: _Analysis, place: _Place) -> None:
    """Chains of the task, one pass of the analysis over them, records into a results file."""
    from kvbaton.bench import data as sets
    from kvbaton.bench.conditions import conditions
    from kvbaton.bench.profile import calibration
    from kvbaton.bench.result import Journal, read
    from kvbaton.bench.summary import analysis_cells
    from kvbaton.bench.tasks import task as task_of
    from kvbaton.engine.models import load

    task = task_of(place.task)
    loaded = sets.load(task.data_set, place.data, place.data_dir)
    rows = [row for i, row in enumerate(loaded.rows) if task.question(row, i) is not None]
    parts = sets.split(rows, place.learn, place.n, place.seed)
    engine = load(place.model, place.dtype, place.device)
    identity = {
        "kind": "analyze", "what": analysis.what, "title": analysis.title, "note": analysis.note, "task": place.task,
        "data": loaded.source, "data_sha256": loaded.sha256, "model": engine.identity.name,
        "fingerprint": engine.identity.fingerprint, "dtype": str(engine.geometry.dtype).removeprefix("torch."),
        "n": place.n, "learn": place.learn, "seed": place.seed, "answer_tokens": place.answer_tokens}
    out = place.out or Path("runs") / f"{analysis.what}-{place.task}-{Path(place.model).name}.jsonl"
    with progress(f"analyze {analysis.what}", place.learn + place.n + analysis.steps) as tick:
        before, chains = (calibration(engine, task, part, place.answer_tokens, lambda i: tick(f"dense answers {i}"))
                          for part in parts)
        with Journal.open(out, identity, conditions(str(engine.device))) as journal:
            for record in analysis.work(engine, chains, before, tick):
                journal.append(record)
    records = read(out).records
    columns, cells = analysis_cells(records)
    emit({"file": str(out), "identity": identity, "records": list(records)}, place.json,
         lambda: table(analysis.title, columns, cells, right=tuple(columns[2:]), caption=f"{analysis.note} {out}"))
