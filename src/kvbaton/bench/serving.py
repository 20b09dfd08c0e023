"""`kvbaton bench serving`: agent teams with dependent hops against a real server.

A hop is sent when the answer before it has arrived; teams arrive by a trace and overlap. Times are the client's own,
queueing and network included. The baseline is the same server with vLLM's exact prefix cache on and no KVBaton
parameters in the request.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbaton.bench.serving_texts import RandomIds, Source, Texts
from kvbaton.bench.serving_trace import HopShape, TeamShape
from kvbaton.bench.stats import quantile
from kvbaton.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import httpx

BASELINE = "dense"
QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Server:
    """A server under test, and where the texts that it is asked about come from."""

    base_url: str
    model: str
    source: Source = field(default_factory=RandomIds)
    timeout_s: float = 900.0


@dataclass
class HopTimes:
    """One hop as the client saw it: seconds since the cell's start, tokens by where their KV came from."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1) if len(self.token_s) > 1 else None


@dataclass
class TeamTimes:
    """One team: when it arrived, and its hops."""

    arrival_s: float
    hops: list[HopTimes] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.hops[-1].token_s[-1]

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrival_s


@dataclass(frozen=True)
class Cell:
    """One method under one trace. Cells of one ``group`` share what was learned; their texts differ by ``name``."""

    method: str
    trace: Sequence[TeamShape]
    name: str
    group: str

    def request(self, texts: Texts, team: int, number: int, hop: HopShape,
                answers: Sequence[list[int]]) -> tuple[list[int], dict[str, Any] | None]:
        """Prompt ids and KVBaton parameters of one hop."""
        ids, spans = texts.own(number, "in front", hop.role), []
        parts = [("text", texts.new(f"shared {team}", self.trace[team].shared)),
                 *((f"agent {i}", answer) for i, answer in enumerate(answers))]
        for share, part in parts:
            spans.append([len(ids), len(ids) + len(part), share])
            ids = ids + part
        ids = ids + texts.own(number, "behind", hop.private)
        if self.method == BASELINE:
            return ids, None
        return ids, {"group": self.group, "method": self.method, "agent": f"agent {number}", "spans": spans}


async def play(server: Server, cell: Cell, seed: int) -> list[TeamTimes]:
    """Run a cell to its end. Raises UsageError if the server cannot be reached or refuses a request."""
    try:
        import httpx
    except ImportError:
        raise MissingExtra("httpx", "pip install 'kvbaton[serve]'") from None
    texts = Texts(server.source, seed, cell.name)
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=server.timeout_s, limits=limits) as client:
            start = time.perf_counter()
            return list(await asyncio.gather(*(_team(client, server, cell, texts, number, start)
                                               for number in range(len(cell.trace)))))
    except httpx.HTTPError as error:
        raise UsageError(f"{server.base_url}: {type(error).__name__} {error}. Is the server up? "
                         f"`kvbaton serve {server.model}` starts one") from error


async def _team(client: httpx.AsyncClient, server: Server, cell: Cell, texts: Texts, number: int,
                start: float) -> TeamTimes:
    team = cell.trace[number]
    answers: list[list[int]] = []
    await asyncio.sleep(max(0.0, start + team.arrival_s - time.perf_counter()))
    times = TeamTimes(team.arrival_s)
    for position, hop in enumerate(team.hops):
        ids, wish = cell.request(texts, number, position, hop, answers)
        answer, seen = await _hop(client, server, ids, wish, hop.output, start)
        answers.append(answer)
        times.hops.append(seen)
    return times


async def _hop(client: httpx.AsyncClient, server: Server, ids: list[int], wish: dict[str, Any] | None, output: int,
               start: float) -> tuple[list[int], HopTimes]:
    body: dict[str, Any] = {
        "model": server.model, "prompt": ids, "max_tokens": output, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    if wish is not None:
        body["kv_transfer_params"] = {"kvbaton": wish}
    seen = HopTimes(time.perf_counter() - start)
    answer: list[int] = []
    async with client.stream("POST", "/completions", json=body) as response:
        if response.status_code != 200:
            raise UsageError(f"the server refused a request: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise UsageError(f"the server broke off: {chunk['error']}")
            for choice in chunk["choices"]:
                fresh = choice.get("token_ids") or ()
                answer += fresh
                seen.token_s += [time.perf_counter() - start] * len(fresh)
            usage = chunk.get("usage")
            if usage:
                seen.prompt_tokens = usage["prompt_tokens"]
                seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not answer:
        raise UsageError("the server returned no token ids: it must be vLLM 0.32, started by `kvbaton serve`")
    return answer, seen


def gauge(metrics: str, name: str) -> float:
    """The value of a Prometheus gauge or counter in ``metrics``, summed over its labels; 0 if it is not there."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for value in found)


def summarise(cell: Cell, teams: Sequence[TeamTimes], ttft_slo_s: float) -> dict[str, Any]:
    """Numbers of one cell. ``goodput``: teams a second whose every hop met ``ttft_slo_s``; first hops have no source,
    so the TTFT of hops behind them stands beside that of all."""
    hops = [hop for team in teams for hop in team.hops]
    later = [hop for team in teams for hop in team.hops[1:]]
    span = max(team.end_s for team in teams) - min(team.arrival_s for team in teams)
    offered = (len(teams) - 1) / (cell.trace[-1].arrival_s or 1e-9) if len(teams) > 1 else 0.0
    good = sum(all(hop.ttft_s <= ttft_slo_s for hop in team.hops) for team in teams)
    out: dict[str, Any] = {"teams": len(teams), "offered_per_s": offered, "achieved_per_s": len(teams) / span}
    for name, values in (("ttft_s", [hop.ttft_s for hop in hops]), ("later_ttft_s", [hop.ttft_s for hop in later]),
                         ("tpot_s", [hop.tpot_s for hop in hops if hop.tpot_s is not None]),
                         ("task_s", [team.latency_s for team in teams])):
        for q in QUANTILES if values else ():
            out[f"{name}_p{q * 100:.0f}"] = quantile(values, q)
    prompt, cached = sum(hop.prompt_tokens for hop in hops), sum(hop.cached_tokens for hop in hops)
    return {**out, "goodput_per_s": good / span, "computed_tokens": prompt - cached, "reused_tokens": cached,
            "saturated": bool(len(teams) > 1 and len(teams) / span < 0.75 * offered)}
