"""`kvbaton eval`: fidelity or accuracy of methods on a task, resumable."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbaton.cli.app import Device, Dtype, Json, Model, Tick, app, emit, human_bytes, progress, table
from kvbaton.cli.options import Set, recipes_of

if TYPE_CHECKING:
    from kvbaton.bench.result import RunFile
    from kvbaton.bench.runner import Evaluation

DataFile = Annotated[Path | None, typer.Option("--data", help="A JSONL file in place of the packaged data.")]
DataFolder = Annotated[Path | None, typer.Option(
    "--data-dir", envvar="KVBATON_DATA", help="A folder with TASK*.jsonl files, looked at before packages.")]
Methods = Annotated[str, typer.Option(help="Comma-separated names from `kvbaton methods`, or all.")]


class StepDisplay(ExitStack):
    """Progress whose number of steps is known once the work has been looked at."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label, self._done = label, 0
        self._tick: Tick | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._tick is None:
            self._tick = self.enter_context(progress(self._label, total))
        for _ in range(done - self._done):
            self._tick(what)
        self._done = done


@app.command(name="eval")
def evaluate(
    task: Annotated[str, typer.Argument(help="gsm8k, humaneval, mmlu, hotpotqa-evidence or hotpotqa-reports.")],
    methods: Methods = "dense,full-shared,kvcmas,hybrid",
    model: Model = "smollm2",
    n: Annotated[int, typer.Option("--n", help="Questions to score.")] = 20,
    learn: Annotated[int, typer.Option(help="Other questions that every method learns from first.")] = 10,
    measure: Annotated[str, typer.Option(help="fidelity (answers forced) or accuracy (generated).")] = "fidelity",
    answer_tokens: Annotated[int, typer.Option(help="Longest answer of an agent.")] = 64,
    temperature: Annotated[float, typer.Option(help="Accuracy only; 0 is greedy.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Questions whose answers are decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Accuracy only: seeds a question.")] = 1,
    seed: Annotated[int, typer.Option(help="Draws the questions; sampling starts from it.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Results file; default runs/TASK-MODEL-MEASURE.jsonl.")] = None,
    data: DataFile = None, data_dir: DataFolder = None, settings: Set = None,
    dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Measure methods on a task. The same command, started again, goes on where it stopped."""
    from kvbaton.bench.accuracy import Accuracy
    from kvbaton.bench.fidelity import Fidelity
    from kvbaton.bench.measures import Measure
    from kvbaton.bench.runner import Evaluation
    from kvbaton.bench.tasks import task as task_of
    from kvbaton.errors import UnknownName

    kinds: dict[str, Measure] = {"fidelity": Fidelity(batch),
                                 "accuracy": Accuracy(answer_tokens, temperature, seed, batch)}
    if measure not in kinds:
        raise UnknownName("measure", measure, kinds)
    recipes = recipes_of(methods, settings)
    spec = Evaluation(task_of(task), recipes, n, learn, seed, repeats, answer_tokens, kinds[measure])
    out = out or Path("runs") / f"{task}-{Path(model).name}-{measure}.jsonl"
    evaluation(spec, model, out, data, data_dir, dtype, device, json)


def evaluation(spec: Evaluation, model: str, out: Path, data: Path | None, data_dir: Path | None, dtype: str | None,
               device: str | None, as_json: bool) -> None:
    """Run ``spec`` and print its table."""
    from kvbaton.bench import data as sets
    from kvbaton.bench.runner import Runner, lessons_of
    from kvbaton.bench.summary import refused
    from kvbaton.engine.models import load

    loaded = sets.load(spec.task.data_set, data, data_dir)
    engine = load(model, dtype, device)
    with StepDisplay(f"eval {spec.task.name}") as step:
        found = Runner(engine, spec, loaded, out, step).run()
    for line, why in found.corrupt:
        typer.echo(f"kvbaton: {out}, line {line} is corrupt and was left out: {why}", err=True)
    for method, why in refused(found).items():
        typer.echo(f"kvbaton: {method} was left out: {why}", err=True)
    kept = sum(file.stat().st_size for file in lessons_of(out).glob("*.safetensors"))
    if kept:
        typer.echo(f"kvbaton: {lessons_of(out)} keeps what the methods learned ({human_bytes(kept)}), for more "
                   "questions later; its *.safetensors files may be deleted", err=True)
    emit(_record(found), as_json, lambda: _table(found))


def _record(found: RunFile) -> dict[str, Any]:
    from dataclasses import asdict

    from kvbaton.bench.summary import summarise

    return {"file": str(found.path), "identity": dict(found.identity), "methods": [asdict(m) for m in summarise(found)]}


def _table(found: RunFile) -> Any:
    from kvbaton.bench.summary import COLUMNS, cells, summarise

    kind = str(found.identity["measure"])
    rows = [cells(kind, m) for m in summarise(found)]
    caption = f"Ranges: 95 % bootstrap over questions. All intervals and conditions: kvbaton report {found.path}"
    return table(f"{found.identity['task']}, {found.identity['model']}, {kind}", COLUMNS[kind], rows,
                 right=tuple(COLUMNS[kind][1:]), caption=caption)
