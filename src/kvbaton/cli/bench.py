"""`kvbaton bench`: speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbaton.cli.app import Device, Dtype, Json, app, emit, table
from kvbaton.cli.evaluate import Methods, StepDisplay
from kvbaton.cli.options import Set, recipes_of

if TYPE_CHECKING:
    from kvbaton.engine.hf import HFEngine

bench = typer.Typer(name="bench", help="Speed and memory.", no_args_is_help=True)
app.add_typer(bench)


def _numbers(text: str, option: str) -> list[int]:
    from kvbaton.errors import UsageError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} wants whole numbers separated by commas, got {text!r}") from None


def _engine(model: str | None, shape: str | None, dtype: str | None, device: str | None) -> HFEngine:
    from kvbaton.errors import UsageError

    if model and shape:
        raise UsageError("give --model or --shape, not both")
    if shape is None:
        from kvbaton.engine.models import load

        return load(model or "smollm2", dtype, device)
    import torch

    from kvbaton.bench.shapes import build
    from kvbaton.engine.models import DTYPES
    from kvbaton.errors import UnknownName

    if dtype is not None and dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return build(shape, getattr(torch, dtype or "bfloat16"), place)


@bench.command()
def single(
    methods: Methods = "dense,full-shared,kvcmas,hybrid",
    shared: Annotated[str, typer.Option(help="Shared lengths in tokens, comma-separated.")] = "512,2048",
    agents: Annotated[str, typer.Option(help="Agents a team, comma-separated.")] = "2",
    rounds: Annotated[str, typer.Option(help="Rounds a run, comma-separated.")] = "1",
    private: Annotated[int, typer.Option(help="Tokens of an agent's own text behind the shared one.")] = 100,
    output: Annotated[int, typer.Option(help="Tokens of every answer.")] = 16,
    vary: Annotated[list[str] | None, typer.Option(
        metavar="part.field=a,b", help="Vary a field of the methods that have it: budget, pool, rank …")] = None,
    repeats: Annotated[int, typer.Option(help="Timed teams a point and method.")] = 5,
    learn: Annotated[int, typer.Option(help="Dense teams that a method learns from first.")] = 10,
    model: Annotated[str | None, typer.Option(help="As in `kvbaton models`; default smollm2.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of a shape: llama-3.1-8b, qwen2.5-0.5b …")] = None,
    seed: Annotated[int, typer.Option(help="Of the texts and of random weights.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Results file; default runs/single-MODEL.jsonl.")] = None,
    settings: Set = None, dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Time to first token, tokens a second and memory of one stream of teams; methods interleaved."""
    from dataclasses import asdict

    from kvbaton.bench.ceiling import measure_machine
    from kvbaton.bench.conditions import conditions
    from kvbaton.bench.result import Journal, read
    from kvbaton.bench.single import Point, Speed, measure
    from kvbaton.bench.speed_table import COLUMNS, cells, lines
    from kvbaton.bench.variants import vary as varied

    recipes = recipes_of(methods, settings)
    for variation in vary or []:
        recipes = varied(recipes, variation)
    points = tuple(Point(s, n, r, private=private, output=output) for s in _numbers(shared, "--shared")
                   for n in _numbers(agents, "--agents") for r in _numbers(rounds, "--rounds"))
    speed = Speed(points, recipes, repeats, learn, seed)
    engine = _engine(model, shape, dtype, device)
    name = engine.identity.name
    out = out or Path("runs") / f"single-{name.replace('shape:', '').replace('/', '-')}.jsonl"
    machine = measure_machine(engine.device, engine.geometry.dtype)
    identity = {"kind": "single", "model": name, "fingerprint": engine.identity.fingerprint, "learn": learn,
                "seed": seed, "private": private, "output": output,
                "dtype": str(engine.geometry.dtype).removeprefix("torch.")}
    made = {**conditions(str(engine.device)), "machine": asdict(machine), "n": repeats, "repeats": repeats,
            "recipes": {r.name: repr(r) for r in recipes}}
    with Journal.open(out, identity, made) as journal, StepDisplay("bench single") as step:
        step(0, speed.records, "learning")
        for i, record in enumerate(measure(engine, speed, machine, journal.done), 1):
            journal.append(record)
            step(i, speed.records, f"{record['question']}, {record['method']}")
    found = lines(read(out).records)
    rates = f"measured here: {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GFLOP/s"
    whole = {"file": str(out), "identity": identity, "conditions": made, "lines": [asdict(x) for x in found]}
    emit(whole, json, lambda: table(
        f"bench single, {name}", COLUMNS, [cells(x) for x in found], right=tuple(COLUMNS[2:]),
        caption="U shared tokens, N agents, R rounds. TTFT of hops that can reuse, medians; p10 to p90 beside it. "
                f"Ceiling from rates {rates}. {out}"))
