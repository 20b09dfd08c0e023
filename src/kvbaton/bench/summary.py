"""One line a method from a results file, with intervals over questions. Only hops that could reuse something count.

    recovered   1 - divergence / divergence of full-shared         PGR   (floor - NLL) / (floor - NLL of dense)
    speed-up    dense TTFT / method's TTFT, same hop, same run; the median over hops
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.bench import stats
from kvbaton.bench.result import Record, RunFile
from kvbaton.bench.runner import ANSWERS, DENSE, digest
from kvbaton.bench.stats import Interval

FULL = "full-shared"
"""The method that `recovered` is measured against."""


@dataclass(frozen=True)
class Summary:
    """A method's results. Fields that the measurement does not give are None; times are None where hops were batched.

    ``gate_dense``: share of hops with handed-over text that ran dense; ``reuse``: effective reuse ratio of those hops.
    """

    method: str
    questions: int
    ttft_ms: float | None
    speed_up: float | None
    reuse: float
    gate_dense: float
    learned_bytes: int
    held_bytes: int
    kl: Interval | None = None
    agree: Interval | None = None
    recovered: Interval | None = None
    gold_nll: Interval | None = None
    pgr: Interval | None = None
    score: Interval | None = None
    difference: Interval | None = None
    sign_p: float | None = None
    same_choice: float | None = None
    refused: int | None = None
    outcomes: Mapping[str, int] | None = None


def scored(run: RunFile) -> dict[str, dict[str, list[Record]]]:
    """Records by method and question (repeats together), for questions that every method has; answers left out.

    A method that was run again with other hyper-parameters counts with its latest ones only.
    """
    table: dict[str, dict[str, list[Record]]] = {}
    recipes = {name: digest(text) for c in run.conditions for name, text in c.get("recipes", {}).items()}
    for record in run.records:
        latest = record.get("recipe") == recipes.get(record["method"], record.get("recipe"))
        if latest and not record["question"].startswith(ANSWERS):
            table.setdefault(record["method"], {}).setdefault(record["question"], []).append(record)
    common = set.intersection(*(set(q) for q in table.values())) if table else set()
    return {m: {q: r for q, r in questions.items() if q in common} for m, questions in table.items()}


def handed(record: Record) -> list[Record]:
    """Hops in which something could be reused."""
    return [hop for hop in record["hops"] if hop["handed"]]


def per_question(records: Mapping[str, list[Record]], value: Callable[[Record], float]) -> list[float]:
    """One number a question, in a fixed order: the mean over its repeats."""
    return [sum(map(value, records[q])) / len(records[q]) for q in sorted(records)]


def mean_over_hops(name: str) -> Callable[[Record], float]:
    """A record's mean of a hop field over the hops that could reuse something."""
    def value(record: Record) -> float:
        hops = handed(record)
        return sum(float(hop[name]) for hop in hops) / len(hops) if hops else math.nan
    return value


def summarise(run: RunFile) -> list[Summary]:
    """A summary a method, in the order in which they were first measured."""
    table = scored(run)
    if not table or not next(iter(table.values())):
        return []
    return [_summary(method, table, run) for method in table]


def single_stream(run: RunFile) -> bool:
    """Whether its times are those of one hop at a time: they are left out where answers were decoded in batches."""
    return int(run.identity.get("batch", 1)) == 1


def _summary(method: str, table: Mapping[str, Mapping[str, list[Record]]], run: RunFile) -> Summary:
    records = table[method]
    hops = [hop for q in sorted(records) for record in records[q] for hop in handed(record)]
    dense = [hop for q in sorted(records) for record in table[DENSE][q] for hop in handed(record)]
    ttft_ms = speed_up = None
    if single_stream(run):
        ttft_ms = 1e3 * stats.median([h["ttft_s"] for h in hops])
        speed_up = stats.median([d["ttft_s"] / h["ttft_s"] for d, h in zip(dense, hops, strict=False)])
    common: dict[str, Any] = {
        "method": method, "questions": len(records), "ttft_ms": ttft_ms, "speed_up": speed_up,
        "reuse": sum(h["reuse"] for h in hops) / len(hops),
        "gate_dense": sum(h["dense"] for h in hops) / len(hops),
        "learned_bytes": max(h["learned_bytes"] for h in hops), "held_bytes": max(h["held_bytes"] for h in hops),
    }
    special = _fidelity(method, table) if run.identity["measure"] == "fidelity" else _accuracy(records, table[DENSE])
    return Summary(**common, **special)


def _fidelity(method: str, table: Mapping[str, Mapping[str, list[Record]]]) -> dict[str, Any]:
    records = table[method]
    kl = per_question(records, mean_over_hops("kl"))
    nll = per_question(records, lambda r: float(r["gold_nll"]))
    floor = per_question(table[DENSE], lambda r: float(r["floor_nll"]))
    best = per_question(table[DENSE], lambda r: float(r["gold_nll"]))
    recovered = None
    if FULL in table and method != FULL:
        left = stats.ratio_of_means(kl, per_question(table[FULL], mean_over_hops("kl")))
        recovered = Interval(1 - left.value, 1 - left.high, 1 - left.low, left.n)
    return {"kl": stats.mean_interval(kl), "agree": stats.mean_interval(per_question(records, mean_over_hops("agree"))),
            "recovered": recovered, "gold_nll": stats.mean_interval(nll), "pgr": stats.gain_ratio(nll, best, floor)}


def _accuracy(records: Mapping[str, list[Record]], dense: Mapping[str, list[Record]]) -> dict[str, Any]:
    score, best = (per_question(r, lambda x: float(x["score"])) for r in (records, dense))
    flat = [[r for q in sorted(side) for r in side[q]] for side in (records, dense)]
    choices = [[r["choice"] for r in side] for side in flat]
    outcomes = Counter(r["outcome"] for r in flat[0])
    return {"score": stats.mean_interval(score), "difference": stats.paired_difference(score, best),
            "sign_p": stats.sign_test(score, best), "same_choice": stats.agreement(*choices),
            "refused": sum(r["choice"] is None for r in flat[0]), "outcomes": dict(outcomes)}


COLUMNS: Mapping[str, list[str]] = {
    "fidelity": ["method", "KL to dense", "recovered", "top-1", "gold NLL", "NLL-PGR", "reuse", "dense hops", "TTFT ms",
                 "speed-up", "learned MiB"],
    "accuracy": ["method", "score", "minus dense", "sign p", "same choice", "no answer", "reuse", "dense hops",
                 "TTFT ms", "speed-up", "learned MiB"],
}


def written(interval: Interval | None, digits: int) -> str:
    """``0.012 (0.010 to 0.015)``; a dash where there is none."""
    if interval is None or math.isnan(interval.value):
        return "–"
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"


def plain(interval: Interval | None, digits: int) -> str:
    """The value alone; a dash where there is none."""
    return "–" if interval is None or math.isnan(interval.value) else f"{interval.value:.{digits}f}"


def cells(kind: str, s: Summary) -> list[str]:
    """A summary as the cells of `COLUMNS`."""
    times = ["–" if s.ttft_ms is None else f"{s.ttft_ms:.0f}", "–" if s.speed_up is None else f"{s.speed_up:.2f}×"]
    tail = [f"{s.reuse:.3f}", f"{s.gate_dense:.2f}", *times, f"{s.learned_bytes / 2**20:.1f}"]
    if kind == "fidelity":
        return [s.method, written(s.kl, 5), plain(s.recovered, 3), plain(s.agree, 3), plain(s.gold_nll, 3),
                plain(s.pgr, 2), *tail]
    return [s.method, plain(s.score, 3), written(s.difference, 3), f"{s.sign_p:.3f}", f"{s.same_choice:.2f}",
            str(s.refused), *tail]


def analysis_cells(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of what `analyze` wrote: whatever numbers its records carry."""
    numbers = [name for name in records[0] if name not in ("kind", "question", "method", "repeat")]
    rows = [[str(r["question"]), str(r["method"]), *(_number(r[name]) for name in numbers)] for r in records]
    return ["of", "method", *numbers], rows


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def self_agreement(run: RunFile) -> float | None:
    """Noise floor of accuracy: share of questions on which two dense repeats choose the same; None with one repeat."""
    pairs = [(a["choice"], b["choice"]) for records in scored(run).get(DENSE, {}).values()
             for a, b in itertools.pairwise(records)]
    return stats.agreement(*map(list, zip(*pairs, strict=True))) if pairs else None


def refused(run: RunFile) -> dict[str, str]:
    """Methods that could not run on this model, and why."""
    return {r["method"]: r["refused"] for r in run.records if "refused" in r}


def skipped(run: RunFile) -> Sequence[str]:
    """Questions that no method was measured on, because a prompt exceeds the context."""
    return [r["question"].removeprefix(ANSWERS) for r in run.records if r.get("skipped")]
