"""One line a (point, method) from the records of `bench single`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.bench import stats
from kvbaton.bench.result import Record
from kvbaton.bench.runner import DENSE


@dataclass(frozen=True)
class SpeedLine:
    """Medians over the reuse hops of all repeats; ``source_ms``: the run's first hop. Rates are over whole runs.

    ``ceiling_ms``: what this machine's measured bandwidth and arithmetic would allow for the same work; ``mbu``,
    ``mfu``: shares of them. ``learn_share``: learning over the dense prefill it ran beside.
    """

    point: str
    shared: int
    agents: int
    rounds: int
    method: str
    repeats: int
    ttft_ms: float
    ttft_p10_ms: float
    ttft_p90_ms: float
    source_ms: float
    tpot_ms: float | None
    output_tokens_per_s: float
    speed_up: float | None
    reuse: float
    ceiling_ms: float
    mbu: float
    mfu: float
    peak_process_bytes: int
    peak_torch_bytes: int | None
    learned_bytes: int
    learn_share: float
    gate_said_no: int


def lines(records: Sequence[Record]) -> list[SpeedLine]:
    """Every (point, method) in the order measured."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["question"], record["method"]), []).append(record)
    return [_line(point, method, found, groups.get((point, DENSE))) for (point, method), found in groups.items()]


def _hops(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [hop for record in records for hop in record["hops"] if hop["handed"]]


def _line(point: str, method: str, records: list[Record], dense: list[Record] | None) -> SpeedLine:
    hops, place, cost = _hops(records), records[0]["point"], records[0]["learn"]
    ttft_ms = [1e3 * hop["ttft_s"] for hop in hops]
    source_ms = [1e3 * record["hops"][0]["ttft_s"] for record in records]
    tpot = [1e3 * hop["tpot_s"] for hop in hops if hop["tpot_s"] is not None]
    torch_peaks = [r["peak_torch_bytes"] for r in records if r["peak_torch_bytes"] is not None]

    def middle(name: str) -> float:
        return stats.median([hop[name] for hop in hops])
    return SpeedLine(
        point=point, shared=place["shared"], agents=place["agents"], rounds=place["rounds"], method=method,
        repeats=len(records), ttft_ms=stats.median(ttft_ms), ttft_p10_ms=stats.quantile(ttft_ms, 0.1),
        ttft_p90_ms=stats.quantile(ttft_ms, 0.9), source_ms=stats.median(source_ms),
        tpot_ms=stats.median(tpot) if tpot else None,
        output_tokens_per_s=stats.median([r["output_tokens_per_s"] for r in records]),
        speed_up=stats.median([1e3 * h["ttft_s"] for h in _hops(dense)]) / stats.median(ttft_ms) if dense else None,
        reuse=middle("reuse"), ceiling_ms=1e3 * middle("ceiling_s"), mbu=middle("mbu"), mfu=middle("mfu"),
        peak_process_bytes=max(r["peak_process_bytes"] for r in records),
        peak_torch_bytes=max(torch_peaks) if torch_peaks else None, learned_bytes=cost["learned_bytes"],
        learn_share=cost["learn_s"] / cost["prefill_s"], gate_said_no=sum(hop["gate_said_no"] for hop in hops))


COLUMNS = ["point", "method", "TTFT ms", "speed-up", "ceiling ms", "MBU", "MFU", "TPOT ms", "tok/s", "reuse",
           "peak MiB", "learned MiB", "learn/prefill"]


def cells(line: SpeedLine) -> list[str]:
    """A line as the cells of `COLUMNS`."""
    peak = line.peak_process_bytes if line.peak_torch_bytes is None else line.peak_torch_bytes
    return [line.point, line.method, f"{line.ttft_ms:.1f} ({line.ttft_p10_ms:.1f} to {line.ttft_p90_ms:.1f})",
            "–" if line.speed_up is None else f"{line.speed_up:.2f}×", f"{line.ceiling_ms:.1f}", f"{line.mbu:.2f}",
            f"{line.mfu:.2f}", "–" if line.tpot_ms is None else f"{line.tpot_ms:.1f}",
            f"{line.output_tokens_per_s:.1f}", f"{line.reuse:.3f}", f"{peak / 2**20:.0f}",
            f"{line.learned_bytes / 2**20:.1f}", f"{line.learn_share:.2f}"]
