"""Learner: one worker thread that takes in exact pairs while the answer is being decoded."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.prompt import Edge


class Learner:
    """Off the TTFT path: pairs are handed over once the first token is known and are learned in order.

    `drain` waits for all of them, so that what was learned is seen by the next plan, and raises what failed.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvbaton-learn")
        self._pending: list[Future[float]] = []

    def submit(self, edge: Edge, source: KV, target: KV) -> None:
        """Queue one exact pair; both KVs must not be written to until `drain` returns."""
        self._pending.append(self._pool.submit(self._learn, edge, source, target))

    def drain(self) -> float:
        """Wait for everything that was queued; returns the seconds that learning took."""
        pending, self._pending = self._pending, []
        return sum(future.result() for future in pending)

    def close(self) -> None:
        """Finish what is queued and stop the thread."""
        self._pool.shutdown(wait=True)

    @torch.no_grad()
    def _learn(self, edge: Edge, source: KV, target: KV) -> float:
        begin = time.perf_counter()
        self._memory.learn(edge, source, target)
        return time.perf_counter() - begin
