"""The proof table of the README, drawn from the results of record: nothing in it is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbaton.bench import speed_table
from kvbaton.bench.page import Table, markdown_table
from kvbaton.bench.result import RunFile, read
from kvbaton.bench.runner import DENSE
from kvbaton.bench.summary import FULL, Summary, summarise

LEAST = 8
"""A run over fewer questions is a sketch, not a proof."""
FOLDER = "docs/results"
"""Where the results of record lie, seen from the README."""
BEGIN, END = "<!-- proof -->", "<!-- /proof -->"
_ORDER = (DENSE, "full-shared", "cacheblend", "relaycaching", "prophetkv", "kvcmas", "affine", "hybrid",
          "hybrid-attended")
"""Rows of the table: the strongest rivals and ours, because a README's proof must be read at once; reports have all."""


def runs(folder: Path) -> list[RunFile]:
    """Every results file of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.jsonl"))]


def proof(found: Sequence[RunFile]) -> str:
    """A table of fidelity and speed by method with its conditions; empty if there are no results."""
    columns: dict[str, dict[str, str]] = {}
    notes = []
    for run in found:
        kind = run.identity.get("measure", run.identity.get("kind"))
        made = {"fidelity": _fidelity, "accuracy": _accuracy, "single": _speed}.get(str(kind), lambda _: {})(run)
        columns |= made
        if made:
            notes.append(_note(run))
    methods = [m for m in _ORDER if any(m in column for column in columns.values())]
    if not methods:
        return ""
    rows = [[f"`{m}`", *(column.get(m, "–") for column in columns.values())] for m in methods]
    text = ("KL to dense prefill, nats a token (share of `full-shared`'s taken away, share of shared entries "
            "recomputed, fallbacks included); score (paired difference to dense, 95 %); TTFT speed-up.")
    conditions = f"Conditions (each file's header has its commands). {'; '.join(notes)}."
    return "\n\n".join([text, markdown_table(Table("", ["method", *columns], rows)), conditions])


def _fidelity(run: RunFile) -> dict[str, dict[str, str]]:
    cells = {}
    for s in _enough(run):
        if s.kl is not None and s.method != DENSE:
            gain = "" if s.recovered is None or s.method == FULL else f"{s.recovered.value:.0%} off, "
            cells[s.method] = f"{s.kl.value:.4f} ({gain}{1 - s.reuse:.0%} recomputed)"
    return _column(run, "", cells)


def _accuracy(run: RunFile) -> dict[str, dict[str, str]]:
    cells = {}
    for s in _enough(run):
        if s.score is not None:
            change = "" if s.difference is None or s.method == DENSE else \
                f" ({s.difference.value:+.0%}, {s.difference.low:+.0%} to {s.difference.high:+.0%})"
            cells[s.method] = f"{s.score.value:.0%}{change}"
    return _column(run, " score", cells)


def _enough(run: RunFile) -> list[Summary]:
    return [s for s in summarise(run) if s.questions >= LEAST]


def _column(run: RunFile, what: str, cells: dict[str, str]) -> dict[str, dict[str, str]]:
    """The column of an evaluation under its title; none without cells."""
    who = run.identity
    return {f"{who['task']}{what}, {who['model']} {who['dtype']}, {who['learn']} learned": cells} if cells else {}


def _speed(run: RunFile) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for line in speed_table.lines(run.records):
        if line.speed_up is not None and line.method != DENSE:
            table.setdefault(f"TTFT at {line.shared}", {})[line.method] = f"{line.speed_up:.1f}×"
    return table


def _note(run: RunFile) -> str:
    """What the columns of a run do not say. The file that it links to has the commands in its header lines."""
    who, last = run.identity, run.conditions[-1]
    size = f"n {len({r['question'] for r in run.records if 'recipe' in r})}" if who["kind"] == "eval" else \
        f"TTFT, {who['model']} {who['dtype']}, {last['repeats']} repeats, {who['learn']} learned"
    sittings = dict.fromkeys(made["commit"] + (" (dirty)" if made["dirty"] else "") for made in run.conditions)
    return (f"[{run.path.stem}]({FOLDER}/{run.path.name}): {size}, seed {who['seed']}, {last['device']}, "
            f"{last['threads']} thread{'s' if last['threads'] != 1 else ''}, commit {', '.join(sittings)}")


def splice(readme: str, table: str) -> str:
    """``readme`` with the table between its two marks; unchanged without marks or without a table."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end and table else readme
