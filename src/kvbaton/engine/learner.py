"""Learner: one worker thread that learns while answers are being decoded."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec

import torch

P = ParamSpec("P")


class Learner:
    """Off the TTFT path: jobs run one after another, in the order in which they were handed over.

    What a failed job means is the job's own affair: one that must not disturb anybody catches its errors itself. The
    first error that a job lets out is raised by the next `drain`.
    """

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: PyTorch's own inside a job; None: as many as its host gives every thread."""
        limit = None if threads is None else partial(torch.set_num_threads, threads)
        self._pool = ThreadPoolExecutor(1, "kvbaton-learn", limit)
        self._seconds = 0.0
        self._problem: Exception | None = None

    def submit(self, job: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue one job; tensors that it reads must not be written to until `drain` returns."""
        self._pool.submit(self._run, job, *args, **kwargs)

    def drain(self) -> float:
        """Wait for everything that was queued; returns the seconds that the jobs took since the last call."""
        self._pool.submit(lambda: None).result()
        seconds, self._seconds = self._seconds, 0.0
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return seconds

    def close(self) -> None:
        """Finish what is queued and stop the thread."""
        self._pool.shutdown(wait=True)

    @torch.no_grad()
    def _run(self, job: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        begin = time.perf_counter()
        try:
            job(*args, **kwargs)
        except Exception as problem:
            self._problem = self._problem or problem
        self._seconds += time.perf_counter() - begin
