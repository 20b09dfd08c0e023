"""`kvbaton profile droidspeak`: find the block of layers that a model should recompute."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbaton.cli.app import Device, Dtype, Json, Model, app, emit, progress, table
from kvbaton.cli.evaluate import DataFile, DataFolder

if TYPE_CHECKING:
    from kvbaton.bench.profile import Profile


@app.command()
def profile(
    method: Annotated[str, typer.Argument(help="droidspeak: the one method that is profiled offline.")] = "droidspeak",
    model: Model = "smollm2",
    task: Annotated[str, typer.Option(help="Where the calibration prompts come from.")] = "gsm8k",
    n: Annotated[int, typer.Option("--n", help="Calibration questions; the first of the draw, as `eval --learn`.")] = 4,
    budgets: Annotated[str, typer.Option(help="Shares of layers to find blocks for.")] = "0.1,0.2",
    answer_tokens: Annotated[int, typer.Option(help="Longest answer of an agent.")] = 32,
    seed: Annotated[int, typer.Option(help="Draws the questions.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Profile file; default runs/profile-MODEL.json.")] = None,
    data: DataFile = None, data_dir: DataFolder = None, dtype: Dtype = None, device: Device = None, json: Json = False,
) -> None:
    """Score every block of layers on calibration prompts; print the Pareto front and the settings for each budget."""
    from kvbaton.bench import data as sets
    from kvbaton.bench.profile import blocks_of, calibration, profile_droidspeak, width_of
    from kvbaton.bench.tasks import task as task_of
    from kvbaton.engine.models import load
    from kvbaton.errors import UnknownName, UsageError

    if method != "droidspeak":
        raise UnknownName("profile", method, ["droidspeak"])
    try:
        shares = [float(share) for share in budgets.split(",")]
    except ValueError:
        raise UsageError(f"--budgets wants numbers such as 0.1,0.2, got {budgets!r}") from None
    chosen = task_of(task)
    rows, _ = sets.split(sets.load(chosen.data_set, data, data_dir).rows, n, 1, seed)
    engine = load(model, dtype, device)
    widths = {width_of(share, engine.geometry.layers) for share in shares}
    steps = n + len(blocks_of(engine.geometry.layers, widths)) + 1
    with progress("profile droidspeak", steps) as tick:
        chains = calibration(engine, chosen, rows, answer_tokens, lambda done: tick(f"dense answers {done}"))
        found = profile_droidspeak(engine, chains, widths, lambda block: tick(str(block or "no block")))
    out = out or Path("runs") / f"profile-{Path(model).name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found.save(out)
    emit({"file": str(out), **asdict(found)}, json, lambda: _table(found, shares, out))


def _table(found: Profile, shares: list[float], out: Path) -> Any:
    rows = [[f"{b.first}-{b.last}", str(b.width), f"{b.width / found.layers:.0%}", f"{b.divergence:.5f}",
             f"{1 - b.divergence / found.nothing:.0%}"] for b in found.pareto()]
    settings = [f"{share:g}: --set droidspeak:selector.first={best.first} --set droidspeak:selector.last={best.last}"
                for share in shares for best in [found.best(share)]]
    caption = "\n".join([f"without any block: {found.nothing:.5f}; all blocks in {out}", *settings])
    return table(f"droidspeak on {found.model}: no narrower block beats these",
                 ["layers", "width", "budget", "divergence", "recovered"], rows,
                 right=("width", "budget", "divergence", "recovered"), caption=caption)
