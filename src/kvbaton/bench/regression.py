"""Two runs of one measurement, compared question by question: differences with intervals, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbaton.bench import stats
from kvbaton.bench.page import Block, Table
from kvbaton.bench.result import Record, RunFile
from kvbaton.bench.stats import Interval
from kvbaton.bench.summary import mean_over_hops, per_question, scored, single_stream, written
from kvbaton.errors import UsageError

WORSE, BETTER, SAME = "regression", "improvement", "no difference shown"


@dataclass(frozen=True)
class Quantity:
    """Something compared. ``smaller``: less is better. ``slack``: share of the old value within which it is noise."""

    name: str
    value: Callable[[Record], float]
    digits: int
    smaller: bool
    slack: float


_TTFT = Quantity("TTFT, s", mean_over_hops("ttft_s"), 4, True, 0.10)
QUANTITIES: Mapping[str, tuple[Quantity, ...]] = {
    "fidelity": (Quantity("KL to dense", mean_over_hops("kl"), 5, True, 0.02),
                 Quantity("gold NLL", lambda r: float(r["gold_nll"]), 4, True, 0.02), _TTFT),
    "accuracy": (Quantity("score", lambda r: float(r["score"]), 3, False, 0.0), _TTFT),
}
_MAY_DIFFER = ("fingerprint", "model", "dtype")


@dataclass(frozen=True)
class Change:
    """One quantity of one method: new minus old."""

    method: str
    quantity: str
    old: float
    difference: Interval
    verdict: str
    written: str


def compare(old: RunFile, new: RunFile) -> list[Change]:
    """Every method and quantity that both runs have, over the questions that both have. Raises UsageError if unlike."""
    for name in sorted({*old.identity, *new.identity} - set(_MAY_DIFFER)):
        if old.identity.get(name) != new.identity.get(name):
            raise UsageError(f"{old.path} and {new.path} cannot be compared: {name} is {old.identity.get(name)!r} "
                             f"and {new.identity.get(name)!r}")
    if str(old.identity.get("measure")) not in QUANTITIES:
        raise UsageError(f"only eval runs are compared, {old.path} is of kind {old.identity.get('kind')!r}")
    before, after = scored(old), scored(new)
    out = []
    for method in (m for m in before if m in after):
        common = before[method].keys() & after[method].keys()
        if not common:
            raise UsageError(f"{old.path} and {new.path} share no question for {method}")
        sides = [{q: side[method][q] for q in common} for side in (before, after)]
        out += [_change(method, quantity, *sides) for quantity in _quantities(old)]
    if not out:
        raise UsageError(f"{old.path} and {new.path} share no method")
    return out


def _quantities(run: RunFile) -> list[Quantity]:
    """What is compared; no times where answers were decoded in batches."""
    return [q for q in QUANTITIES[str(run.identity["measure"])] if q is not _TTFT or single_stream(run)]


def _change(method: str, quantity: Quantity, old: Mapping[str, list[Record]],
            new: Mapping[str, list[Record]]) -> Change:
    a, b = per_question(old, quantity.value), per_question(new, quantity.value)
    difference = stats.paired_difference(b, a)
    base = sum(a) / len(a)
    slack = quantity.slack * abs(base)
    low, high = (difference.low, difference.high) if quantity.smaller else (-difference.high, -difference.low)
    verdict = WORSE if low > slack else BETTER if high < -slack else SAME
    return Change(method, quantity.name, base, difference, verdict, written(difference, quantity.digits))


def block(old: RunFile, new: RunFile) -> Block:
    """The comparison as a part of a report."""
    changes = compare(old, new)
    bad = [c for c in changes if c.verdict == WORSE]
    lead = f"{len(bad)} regressions" if bad else "No regression shown"
    rows = [[c.method, c.quantity, f"{c.old:.5g}", c.written, c.verdict] for c in changes]
    notes = "; ".join(f"{q.name} {q.slack:.0%}" for q in _quantities(old))
    table = Table("New minus old", ["method", "quantity", "old", "difference (95 %)", "verdict"], rows,
                  f"Paired over questions. A verdict needs the whole interval beyond a share of the old: {notes}.")
    commits = [f"{c.get('commit')}{' (dirty)' if c.get('dirty') else ''}, {c.get('device')}" for c in
               (old.conditions[-1], new.conditions[-1])]
    return Block(f"{new.path.stem} against {old.path.stem}", lead,
                 [("old", commits[0]), ("new", commits[1]), ("questions", str(changes[0].difference.n))], [table])
