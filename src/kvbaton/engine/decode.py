"""How an answer grows behind a prefilled prompt: generated token by token, or forced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvbaton.engine.cache import SplicedCache
from kvbaton.engine.capture import Capture, Captures
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Force, Generate

OnToken = Callable[[int], None]


class Answer(Protocol):
    """An answer under way. ``times_s``: seconds since submit at which each token (a final stop token too) was known."""

    ids: list[int]
    times_s: list[float]
    stopped: bool
    logits: Tensor | None

    def finish(self, cache: SplicedCache, written: Capture, on_token: OnToken | None) -> None:
        """Run to the end; ``written`` starts where the prompt ends and gets the KV of every token of the answer."""
        ...


def begin_answer(engine: HFEngine, decode: Generate | Force, first: Tensor, submit: float) -> Answer:
    """The answer after its first token: ``first`` ``[vocab]`` are the last prompt row's logits. TTFT ends here."""
    if isinstance(decode, Force):
        return _Forced(decode, engine, first, submit)
    return _Generated(decode, engine, first, submit)


class _Forced:
    """Teacher forcing: one pass over all given tokens."""

    def __init__(self, decode: Force, engine: HFEngine, first: Tensor, submit: float) -> None:
        self._engine = engine
        self.ids, self.stopped = list(decode.ids), False
        self.logits: Tensor | None = first[None]
        self.times_s = [time.perf_counter() - submit]

    def finish(self, cache: SplicedCache, written: Capture, on_token: OnToken | None) -> None:
        rows = self._engine.rows(written.span.start, written.span.start + len(self.ids))
        _, hidden = self._engine.forward(cache, self._engine.tensor(tuple(self.ids)), rows, Captures([written]))
        assert self.logits is not None
        self.logits = torch.cat((self.logits, self._engine.logits(hidden[:-1])))


class _Generated:
    """Token by token. Every token of the answer is fed, the last one too: its readers need its KV."""

    def __init__(self, decode: Generate, engine: HFEngine, first: Tensor, submit: float) -> None:
        self._decode, self._engine, self._submit = decode, engine, submit
        self._picker = decode.sampler.begin()
        self.ids: list[int] = []
        self.times_s: list[float] = []
        self.stopped = False
        self.logits: Tensor | None = None
        self._push(first)

    def finish(self, cache: SplicedCache, written: Capture, on_token: OnToken | None) -> None:
        watch, fed = Captures([written]), 0
        while fed < len(self.ids):
            token = self.ids[fed]
            if on_token is not None:
                on_token(token)
            at = written.span.start + fed
            _, hidden = self._engine.forward(cache, self._engine.tensor((token,)), self._engine.rows(at, at + 1), watch)
            fed += 1
            if fed < self._decode.max_new_tokens:
                self._push(self._engine.logits(hidden)[0])

    def _push(self, logits: Tensor) -> None:
        """Pick the next token; a stop token ends the answer and is no part of it."""
        token = self._picker.pick(logits)
        self.times_s.append(time.perf_counter() - self._submit)
        if token in self._engine.eos_ids or token in self._decode.stop_ids:
            self.stopped = True
        else:
            self.ids.append(token)
