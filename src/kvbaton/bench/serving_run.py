"""The grid of `kvbaton bench serving`: warm-up, then methods interleaved over rates and repeats, on one server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvbaton.bench.serving import BASELINE, Cell, Server, gauge, play, summarise
from kvbaton.bench.serving_trace import TeamShape, faster
from kvbaton.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """``trace`` at 1 team a second; every rate of ``qps`` plays it faster or slower. ``warm_up``: unmeasured teams a
    method, one after another, from which it learns. ``group``: prefix of the sharing groups; an earlier run's, on a
    server that is still up, goes on with what that one's methods have learned. None: new groups."""

    trace: Sequence[TeamShape]
    methods: Sequence[str]
    qps: Sequence[float]
    repeats: int = 1
    warm_up: int = 2
    seed: int = 0
    ttft_slo_s: float = 5.0
    group: str | None = None

    @property
    def cells(self) -> int:
        return len(self.methods) * len(self.qps) * self.repeats


def measure(server: Server, grid: Grid, done: Container[tuple[str, str, int]] = ()) -> Iterator[dict[str, Any]]:
    """One record a (rate, method, repeat) that is not in ``done``. Raises UsageError if a reuse method found nothing
    that it might have reused.

    The order of methods turns by one with every repeat and rate, so that no method always runs first.
    """
    run = grid.group or f"bench-{time.time():.0f}"
    for method in grid.methods:
        _warm_up(server, grid, method, run)
    turn = 0
    for repeat in range(grid.repeats):
        for qps in grid.qps:
            turn += 1
            for method in (*grid.methods[turn % len(grid.methods):], *grid.methods[:turn % len(grid.methods)]):
                key = (f"{qps:g} teams/s", method, repeat)
                if key not in done:
                    yield {"question": key[0], "method": method, "repeat": repeat,
                           **_one(server, grid, method, qps, f"{qps:g}-{repeat}", run)}


def _warm_up(server: Server, grid: Grid, method: str, run: str) -> None:
    for number in range(grid.warm_up):
        team = grid.trace[number % len(grid.trace)]
        first = TeamShape(0.0, team.shared, team.hops)
        asyncio.run(play(server, Cell(method, [first], f"warm-up {number} {method}", _group(run, method)), grid.seed))


def _one(server: Server, grid: Grid, method: str, qps: float, name: str, run: str) -> dict[str, Any]:
    cell = Cell(method, faster(grid.trace, qps), f"{name} {method}", _group(run, method))
    before = _metrics(server)
    teams = asyncio.run(play(server, cell, grid.seed))
    after = _metrics(server)
    grown = {name: int(gauge(after, f"vllm:kvbaton_{name}_total") - gauge(before, f"vllm:kvbaton_{name}_total"))
             for name in ("tokens_moved", "segments_reused", "segments_found")}
    if method != BASELINE and not grown["segments_found"]:
        raise UsageError(f"{method!r} found nothing to reuse on this server: the numbers would be the baseline's. "
                         "Was it started by `kvbaton serve`?")
    return {**summarise(cell, teams, grid.ttft_slo_s), "moved_tokens": grown["tokens_moved"],
            "found_segments": grown["segments_found"], "reused_segments": grown["segments_reused"],
            "store_mib": gauge(after, "vllm:kvbaton_store_bytes") / 2**20,
            "learned_mib": gauge(after, "vllm:kvbaton_learned_bytes") / 2**20}


def _group(run: str, method: str) -> str:
    return f"{run}-{method}"


def _metrics(server: Server) -> str:
    root = server.base_url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{root}/metrics", timeout=30) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise UsageError(f"no metrics at {root}/metrics: {error}") from error


@contextmanager
def started(command: Sequence[str], base_url: str, ready_s: float = 600.0) -> Iterator[None]:
    """A server of our own, from its start until it is ready, and its end. Its output goes to stderr."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        _wait(process, base_url, ready_s)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], base_url: str, ready_s: float) -> None:
    end = time.monotonic() + ready_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UsageError(f"the server ended with code {process.returncode} before it was ready: see its messages")
        try:
            with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise UsageError(f"the server was not ready after {ready_s:.0f} s")

