"""The proof table of the README, drawn from the results of record: nothing in it is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbaton.bench import speed_table
from kvbaton.bench.page import Table, markdown_table
from kvbaton.bench.result import RunFile, read
from kvbaton.bench.runner import DENSE
from kvbaton.bench.summary import Summary, summarise

LEAST = 8
"""A run over fewer questions is a sketch, not a proof."""
FOLDER = "docs/results"
"""Where the results of record lie, seen from the README."""
BEGIN, END = "<!-- proof -->", "<!-- /proof -->"
_METHODS = ("full-shared", "cacheblend", "relaycaching", "prophetkv", "kvcmas", "affine", "hybrid", "hybrid-attended")
"""Columns: the strongest rivals and ours, because a README's proof must be read at once; reports have all."""
_LEGEND = ("KL to dense prefill over its own answers, nats a token (share of shared entries recomputed, fallbacks "
           "included); score (paired difference to dense, 95 %); TTFT, times sooner than dense. All methods: "
           f"[report]({FOLDER}/report.md).")


@dataclass(frozen=True)
class _Row:
    """One results file: what was measured, a cell by method, and the conditions that differ between files."""

    name: str
    cells: Mapping[str, str]
    conditions: str


def runs(folder: Path) -> list[RunFile]:
    """Every results file of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.jsonl"))]


def proof(found: Sequence[RunFile]) -> str:
    """Fidelity, scores and speed, a line a results file, with their conditions; empty if there are none."""
    rows = [row for kind, make in {"fidelity": _fidelity, "accuracy": _accuracy, "single": _speed}.items()
            for run in found if run.identity.get("measure", run.identity["kind"]) == kind and (row := make(run)).cells]
    methods = [method for method in _METHODS if any(method in row.cells for row in rows)]
    if not methods:
        return ""
    table = Table("", ["", *(f"`{method}`" for method in methods), "conditions"],
                  [[row.name, *(row.cells.get(method, "–") for method in methods), row.conditions] for row in rows])
    devices = ", ".join(dict.fromkeys(made["device"] for run in found for made in run.conditions))
    return (f"{_LEGEND} Measured on {devices}; commands, commits and libraries are in the head of each file.\n\n"
            f"{markdown_table(table)}")


def _fidelity(run: RunFile) -> _Row:
    return _row(run, "KL", {s.method: f"{s.kl.value:.4f} ({1 - s.reuse:.0%})" for s in _enough(run)
                            if s.kl is not None and s.method != DENSE})


def _accuracy(run: RunFile) -> _Row:
    scored = {s.method: (s.score, s.difference) for s in _enough(run) if s.score is not None}
    dense, _ = scored.pop(DENSE, (None, None))
    return _row(run, "score" if dense is None else f"score, dense {dense.value:.0%}", {
        method: f"{score.value:.0%} ({change.low:+.0%} to {change.high:+.0%})"
        for method, (score, change) in scored.items() if change is not None})


def _speed(run: RunFile) -> _Row:
    """All lengths of a method in one cell: they are one curve."""
    curves: dict[str, dict[int, str]] = {}
    for line in speed_table.lines(run.records):
        if line.speed_up is not None and line.method != DENSE:
            curves.setdefault(line.method, {})[line.shared] = f"{line.speed_up:.1f}"
    lengths = sorted({length for curve in curves.values() for length in curve})
    return _row(run, f"TTFT at {', '.join(map(str, lengths))} tokens", {
        method: ", ".join(curve.get(length, "–") for length in lengths) for method, curve in curves.items()})


def _enough(run: RunFile) -> list[Summary]:
    return [s for s in summarise(run) if s.questions >= LEAST]


def _row(run: RunFile, what: str, cells: Mapping[str, str]) -> _Row:
    """The line of a run; its name leads to the file."""
    who, last = run.identity, run.conditions[-1]
    evaluated = {r["question"] for r in run.records if "recipe" in r}
    size = f"n {len(evaluated)}" if who["kind"] == "eval" else f"{last['repeats']} repeats"
    threads = "1 thread" if last["threads"] == 1 else f"{last['threads']} threads"
    dirty = ", partly from a dirty tree" if any(made["dirty"] for made in run.conditions) else ""
    return _Row(f"[{who.get('task', 'teams')}, {who['model']}]({FOLDER}/{run.path.name}): {what}", cells,
                f"{size}, {who['learn']} learned, {who['dtype']}, {threads}, seed {who['seed']}{dirty}")


def splice(readme: str, table: str) -> str:
    """``readme`` with the table between its two marks; unchanged without marks or without a table."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end and table else readme
