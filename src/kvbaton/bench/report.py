"""`kvbaton report`: what results files say, as blocks for a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbaton.bench import plots, speed_table, stats, summary
from kvbaton.bench.page import Block, Picture, Table
from kvbaton.bench.plots import Dot
from kvbaton.bench.result import RunFile
from kvbaton.bench.runner import DENSE
from kvbaton.bench.summary import Summary, handed, scored
from kvbaton.errors import DataError

_EXACT = 1e-6
"""Methods nearer to dense than this, such as the oracle in float32, are in the table but stretch no axis."""
_SHOWN = ("command", "commit", "dirty", "device", "threads", "load", "python", "libraries", "started", "n", "repeats",
          "machine")


def blocks(runs: Sequence[RunFile]) -> list[Block]:
    """A block a run, and a learning curve where runs differ in nothing but what was learned."""
    out = [_KINDS[_kind(run)](run) for run in runs]
    return [*out, *_learning_curves(runs)]


def _kind(run: RunFile) -> str:
    kind = str(run.identity.get("kind"))
    if kind not in _KINDS:
        raise DataError(f"{run.path} holds {kind!r} results, which no report draws: want one of {', '.join(_KINDS)}")
    return kind


def conditions(run: RunFile) -> list[tuple[str, str]]:
    """Everything that a number of this run needs beside it. Values that changed on a restart are all shown."""
    out = [(name, str(value)) for name, value in run.identity.items() if name != "kind"]
    for name in _SHOWN:
        values = dict.fromkeys(_word(c[name]) for c in run.conditions if name in c)
        if values:
            out.append((name, "; then ".join(values)))
    if run.corrupt:
        out.append(("corrupt lines left out", ", ".join(str(line) for line, _ in run.corrupt)))
    return out


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _eval_block(run: RunFile) -> Block:
    kind = str(run.identity["measure"])
    found = summary.summarise(run)
    if not found:
        raise DataError(f"{run.path} holds no question that every method was measured on: let the run finish")
    tables = [Table("Methods", summary.COLUMNS[kind], [_cells(kind, s) for s in found], _NOTES[kind])]
    floor = next((s.kl for s in found if s.method == DENSE), None)
    lead = f"{found[0].questions} questions"
    if floor is not None:
        lead += f"; noise floor (dense with the prefix cache against dense without): {floor.value:.2e} nats a token"
    if kind == "accuracy":
        same = summary.self_agreement(run)
        lead += "; noise floor: " + ("greedy, dense repeats itself" if same is None else
                                     f"two dense repeats choose the same on {same:.0%} of questions")
    if left := summary.skipped(run):
        lead += f"; left out, too long for the context: {', '.join(left)}"
    if refusals := summary.refused(run):
        lead += "; could not run on this model: " + "; ".join(f"{m} ({why})" for m, why in refusals.items())
    if kind == "accuracy":
        tables.append(_outcomes(found))
    if summary.single_stream(run):
        tables.append(_hops_table(run))
    else:
        lead += f"; answers decoded {run.identity['batch']} questions at once: no single-stream times"
    who = run.identity
    title = f"{who['task']}, {who['model']} {who['dtype']}, {kind}, {who['learn']} learned"
    return Block(title, lead, conditions(run), tables, _eval_pictures(run, kind, found))


def _cells(kind: str, s: Summary) -> list[str]:
    """The command line's cells, with every interval."""
    row = summary.cells(kind, s)
    if kind == "fidelity":
        row[2:6] = [summary.written(s.recovered, 3), summary.written(s.agree, 3), summary.written(s.gold_nll, 3),
                    summary.written(s.pgr, 2)]
    else:
        row[1] = summary.written(s.score, 3)
    return row


_NOTES = {
    "fidelity": "Ranges are 95 % bootstrap intervals over questions (10,000 draws). KL to dense: nats a token over the "
                "forced dense answer, mean over hops that can reuse. Recovered: 1 - KL / KL of full-shared. NLL-PGR: 0 "
                "is the question without context, 1 is dense. Dense hops: share that fell back. Speed-up: dense TTFT "
                "over the method's, hop by hop, median.",
    "accuracy": "Ranges are 95 % bootstrap intervals over questions (10,000 draws). Same choice: the decider chose "
                "what the dense decider chose. No answer: the stated format was not met, scored as wrong.",
}


def _outcomes(found: Sequence[Summary]) -> Table:
    kinds = sorted({kind for s in found for kind in s.outcomes or {}})
    rows = [[s.method, *(str((s.outcomes or {}).get(kind, 0)) for kind in kinds)] for s in found]
    return Table("Outcomes", ["method", *kinds], rows)


def _by_hop(run: RunFile, name: str) -> tuple[list[str], dict[str, list[tuple[float, float]]]]:
    """Agents with handed-over text, and the median of a hop field for each method."""
    table = scored(run)
    agents = list(dict.fromkeys(h["agent"] for h in handed(next(iter(table[DENSE].values()))[0])))
    series = {}
    for method, questions in table.items():
        hops = [h for records in questions.values() for r in records for h in handed(r)]
        series[method] = [(float(i), stats.median([h[name] for h in hops if h["agent"] == agent]))
                          for i, agent in enumerate(agents) if any(h["agent"] == agent for h in hops)]
    return agents, series


def _hops_table(run: RunFile) -> Table:
    agents, ttft = _by_hop(run, "ttft_s")
    rows = [[method, *(f"{1e3 * y:.0f}" for _, y in points)] for method, points in ttft.items()]
    return Table("TTFT by hop, ms (median)", ["method", *agents], rows)


def _eval_pictures(run: RunFile, kind: str, found: Sequence[Summary]) -> list[Picture]:
    shown = [s for s in found if kind == "accuracy" or s.method != DENSE]
    if kind == "fidelity":
        quality = [(s, s.kl) for s in shown if s.kl and s.kl.value > _EXACT]
        label, log, smaller = "KL to dense, nats a token", True, True
    else:
        quality = [(s, s.score) for s in shown if s.score]
        label, log, smaller = "score", False, False
    out = []
    if quality:
        by_time = [Dot(s.method, 1 / s.speed_up, q.value, q.low, q.high) for s, q in quality if s.speed_up is not None]
        by_rows = [Dot(s.method, 1 - s.reuse, q.value, q.low, q.high) for s, q in quality]
        if by_time:
            out.append(Picture(plots.pareto(by_time, "TTFT, share of dense", label, "Quality against TTFT", log,
                                            smaller),
                               "Lower left is better." if smaller else "Upper left is better."))
        out.append(Picture(plots.pareto(by_rows, "share of shared entries recomputed", label,
                                        "Quality against recompute", log, smaller),
                           "Dense fallbacks count as recomputed."))
    if summary.single_stream(run):
        agents, ttft = _by_hop(run, "ttft_s")
        milliseconds = {m: [(x, 1e3 * y) for x, y in points] for m, points in ttft.items()}
        out.append(Picture(plots.lines(milliseconds, "hop", "TTFT, ms", "TTFT by hop", ticks=agents), "Medians."))
    out.append(_memory([s.method for s in found], {"learned": [s.learned_bytes for s in found],
                                                   "held for the run": [s.held_bytes for s in found]}))
    return out


def _memory(names: Sequence[str], parts: Mapping[str, Sequence[int]]) -> Picture:
    mebibytes = {part: [b / 2**20 for b in counts] for part, counts in parts.items()}
    return Picture(plots.bars(mebibytes, names, "MiB", "Memory beside the model"), "Largest of any hop.")


def _single_block(run: RunFile) -> Block:
    found = speed_table.lines(run.records)
    if not found:
        raise DataError(f"{run.path} holds no measurement yet: let the run finish")
    table = Table("Points and methods", speed_table.COLUMNS, [speed_table.cells(x) for x in found],
                  "U shared tokens, N agents, R rounds. TTFT: hops that can reuse, all in the clock; median, p10 to "
                  "p90 beside it. Ceiling: bytes over measured bandwidth or FLOPs over measured rate, the larger. "
                  "tok/s: output tokens over the whole run, source hop included. Learn/prefill: learning over the "
                  "dense prefills it ran beside.")
    lead = f"{len(found)} points and methods, interleaved in one process"
    return Block(f"bench single, {run.identity['model']}", lead, conditions(run), [table], _single_pictures(found))


def _single_pictures(found: Sequence[speed_table.SpeedLine]) -> list[Picture]:
    out = []
    for axis, label in (("shared", "shared tokens"), ("agents", "agents"), ("rounds", "rounds")):
        if len({getattr(x, axis) for x in found}) < 2:
            continue
        others = [name for name in ("shared", "agents", "rounds") if name != axis]
        fixed = tuple(getattr(found[0], name) for name in others)
        chosen = [x for x in found if tuple(getattr(x, name) for name in others) == fixed]
        series: dict[str, list[tuple[float, float]]] = {}
        for x in chosen:
            series.setdefault(x.method, []).append((getattr(x, axis), x.ttft_ms))
            if x.method == summary.FULL:
                series.setdefault("ceiling (full-shared)", []).append((getattr(x, axis), x.ceiling_ms))
        out.append(Picture(plots.lines(series, label, "TTFT, ms", f"TTFT against {label}", log_x=True, log_y=True,
                                       dashed=frozenset({"ceiling (full-shared)"})),
                           f"At {', '.join(f'{name} {value}' for name, value in zip(others, fixed, strict=True))}."))
    last = [x for x in found if x.point == found[-1].point]
    out.append(_memory([x.method for x in last], {"learned": [x.learned_bytes for x in last]}))
    return out


def _analysis_block(run: RunFile) -> Block:
    what = str(run.identity["what"])
    if not run.records:
        raise DataError(f"{run.path} holds no measurement yet: let the run finish")
    columns, rows = summary.analysis_cells(run.records)
    table = Table(str(run.identity["title"]), columns, rows, str(run.identity.get("note", "")))
    return Block(f"analyze {what}, {run.identity['model']}", "", conditions(run), [table], _heat_maps(run, what))


def _heat_maps(run: RunFile, what: str) -> list[Picture]:
    if what != "error":
        return []
    layers = [r for r in run.records if str(r["question"]).startswith("layer ")]
    names = list(dict.fromkeys(r["method"] for r in layers))
    columns = list(dict.fromkeys(str(r["question"]).removeprefix("layer ") for r in layers))
    out = []
    for side, word in (("k_error", "Key"), ("v_error", "Value")):
        rows = [[next(float(r[side]) for r in layers if (r["method"], r["question"]) == (name, f"layer {column}"))
                 for column in columns] for name in names]
        out.append(Picture(plots.heat(rows, names, columns, "layer", f"{word} error by layer"),
                           "Relative Frobenius error of shared text against a dense prefill."))
    return out


def _learning_curves(runs: Sequence[RunFile]) -> list[Block]:
    groups: dict[str, list[RunFile]] = {}
    for run in runs:
        if run.identity.get("measure") == "fidelity":
            same = {name: value for name, value in run.identity.items() if name != "learn"}
            groups.setdefault(repr(sorted(same.items())), []).append(run)
    return [_learning_curve(sorted(g, key=lambda r: int(r.identity["learn"]))) for g in groups.values() if len(g) > 1]


def _learning_curve(runs: Sequence[RunFile]) -> Block:
    series: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for s in summary.summarise(run):
            if s.kl is not None and s.method != DENSE:
                series.setdefault(s.method, []).append((float(run.identity["learn"]), s.kl.value))
    learned = [str(run.identity["learn"]) for run in runs]
    rows = [[m, *(f"{dict(points)[float(x)]:.5f}" if float(x) in dict(points) else "–" for x in learned)]
            for m, points in series.items()]
    picture = plots.lines(series, "questions learned from", "KL to dense, nats a token", "Learning curve", log_y=True)
    return Block(f"Learning curve, {runs[0].identity['task']}, {runs[0].identity['model']}",
                 "The same questions after more and more learned ones.", conditions(runs[-1]),
                 [Table("KL to dense by questions learned from", ["method", *learned], rows)], [Picture(picture, "")])


_KINDS: Mapping[str, Callable[[RunFile], Block]] = {
    "eval": _eval_block, "single": _single_block, "analyze": _analysis_block}
