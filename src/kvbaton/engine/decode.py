"""How an answer grows behind a prefilled prompt: generated token by token, or forced. Many as one: together.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvbaton.engine.cache import SplicedCache
from kvbaton.engine.capture import Capture, Captures
from kvbaton.engine.hf import HFEngine, Watch
from kvbaton.engine.sampling import Force, Generate

OnToken = Callable[[int], None]


class Answer(Protocol):
    """An answer under way. ``times_s``: seconds since submit at which each token (a final stop token too) was known.

    ``written`` starts where the prompt ends and gets the KV of every token of the answer. ``beside``: logits of the
    other answers that were forced.
    """

    ids: list[int]
    times_s: list[float]
    stopped: bool
    logits: Tensor | None
    beside: tuple[Tensor, ...]
    written: Capture

    def finish(self, on_token: OnToken | None = None) -> None:
        """Run to the end."""
        ...


def begin_answer(engine: HFEngine, decode: Generate | Force, first: Tensor, submit: float, cache: SplicedCache,
                 written: Capture) -> Answer:
    """The answer after its first token: ``first`` ``[vocab]`` are the last prompt row's logits. TTFT ends here.

    ``cache`` holds the prompt and has room for the answer, ``written`` is as long as that room.
    """
    if isinstance(decode, Force):
        return Forced(decode, engine, first, submit, cache, written)
    return Generated(decode, engine, first, submit, cache, written)


def forced_logits(engine: HFEngine, cache: SplicedCache, first: Tensor, start: int, ids: tuple[int, ...]) -> Tensor:
    """Logits ``[m, vocab]`` before each of ``ids`` (before the stop token, if there are none), behind ``start`` tokens.

    ``first`` ``[vocab]`` are those of the last prompt row. The cache's rows from ``start`` on are overwritten.
    """
    if len(ids) < 2:
        return first[None]
    rows = engine.rows(start, start + len(ids) - 1)
    _, hidden = engine.forward(cache, engine.tensor(ids[:-1]), rows, Watch())
    return torch.cat((first[None], engine.logits(hidden)))


class Forced:
    """Teacher forcing: one pass over all given tokens, after one over each of the other answers."""

    def __init__(self, decode: Force, engine: HFEngine, first: Tensor, submit: float, cache: SplicedCache,
                 written: Capture) -> None:
        self._engine, self._cache, self._others, self.written = engine, cache, decode.beside, written
        self.ids, self.stopped = list(decode.ids), False
        self.beside: tuple[Tensor, ...] = ()
        self._first = first
        self.logits: Tensor | None = None
        self.times_s = [time.perf_counter() - submit]

    def finish(self, on_token: OnToken | None = None) -> None:
        start = self.written.span.start
        self.beside = tuple(forced_logits(self._engine, self._cache, self._first, start, ids) for ids in self._others)
        rows = self._engine.rows(start, start + len(self.ids))
        _, hidden = self._engine.forward(self._cache, self._engine.tensor(tuple(self.ids)), rows,
                                         Captures([self.written]))
        self.logits = torch.cat((self._first[None], self._engine.logits(hidden[:-1])))


class Generated:
    """Token by token. Every token of the answer is fed, the last one too: its readers need its KV.

    ``fed``: tokens fed so far. Whoever feeds `next` counts it and pushes its logits, unless the answer is `full`.
    """

    def __init__(self, decode: Generate, engine: HFEngine, first: Tensor, submit: float, cache: SplicedCache,
                 written: Capture) -> None:
        self._decode, self._engine, self._submit = decode, engine, submit
        self.cache, self.written = cache, written
        self._picker = decode.sampler.begin()
        self.ids: list[int] = []
        self.times_s: list[float] = []
        self.stopped, self.fed = False, 0
        self.logits: Tensor | None = None
        self.beside: tuple[Tensor, ...] = ()
        self.push(first)

    @property
    def over(self) -> bool:
        """Nothing is left to feed."""
        return self.fed == len(self.ids)

    @property
    def next(self) -> tuple[int, int]:
        """The token to feed and its position."""
        return self.ids[self.fed], self.written.span.start + self.fed

    @property
    def full(self) -> bool:
        """As many tokens were fed as the limit allows."""
        return self.fed == self._decode.max_new_tokens

    def finish(self, on_token: OnToken | None = None) -> None:
        watch = Captures([self.written])
        while not self.over:
            token, at = self.next
            if on_token is not None:
                on_token(token)
            _, hidden = self._engine.forward(self.cache, self._engine.tensor((token,)), self._engine.rows(at, at + 1),
                                             watch)
            self.fed += 1
            if not self.full:
                self.push(self._engine.logits(hidden)[0])

    def push(self, logits: Tensor) -> None:
        """Pick the next token from ``[vocab]``; a stop token ends the answer and is no part of it."""
        token = self._picker.pick(logits)
        self.times_s.append(time.perf_counter() - self._submit)
        if token in self._engine.eos_ids or token in self._decode.stop_ids:
            self.stopped = True
        else:
            self.ids.append(token)
