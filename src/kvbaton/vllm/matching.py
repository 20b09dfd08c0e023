"""Finding known text inside a prompt, by content.

    known texts    #1  [ a b c d e f g h ]        #2  [ p q r s ]
    prompt         [ x x x  a b c d e f g h  y y  p q r s  z ]
    matches                 #1 [0, 8)             #2 [0, 4)

Every window of ``window`` tokens of a known text is indexed by a polynomial hash with a secret base, and a hit is
believed only after its tokens were compared one by one: a collision, crafted or not, can cost time but never reuse.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CANDIDATES = 8
"""Places tried per window: text that repeats itself must not make a lookup quadratic."""


@dataclass(frozen=True)
class Match:
    """``prompt[start:end]`` equals the tokens ``[offset, offset + end - start)`` of text ``text``."""

    start: int
    end: int
    text: int
    offset: int

    def __len__(self) -> int:
        return self.end - self.start


class TextIndex:
    """Known texts by content. A text shorter than ``window`` tokens is never found."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._texts: dict[int, tuple[int, ...]] = {}
        self._places: dict[int, list[tuple[int, int]]] = {}
        base = secrets.randbits(64) | 1
        self._powers = np.array([pow(base, i, 2**64) for i in range(window)], dtype=np.uint64)

    def add(self, text: int, tokens: Sequence[int]) -> None:
        self._texts[text] = tuple(tokens)
        for offset, code in enumerate(self._hashes(tokens)):
            self._places.setdefault(int(code), []).append((text, offset))

    def remove(self, text: int) -> None:
        tokens = self._texts.pop(text)
        for code in {int(code) for code in self._hashes(tokens)}:
            left = [place for place in self._places[code] if place[0] != text]
            if left:
                self._places[code] = left
            else:
                del self._places[code]

    def find(self, prompt: Sequence[int]) -> list[Match]:
        """Disjoint matches from left to right; at each place the longest, and of those the oldest text."""
        tokens = tuple(prompt)
        codes = self._hashes(tokens)
        found: list[Match] = []
        at = 0
        while at < len(codes):
            best = self._longest(tokens, at, self._places.get(int(codes[at]), ()))
            if best is None:
                at += 1
            else:
                found.append(best)
                at = best.end
        return found

    def _longest(self, prompt: tuple[int, ...], at: int, places: Sequence[tuple[int, int]]) -> Match | None:
        best: Match | None = None
        for text, offset in places[:_CANDIDATES]:
            length = _common(prompt, at, self._texts[text], offset)
            if length >= self.window and (best is None or length > len(best)):
                best = Match(at, at + length, text, offset)
        return best

    def _hashes(self, tokens: Sequence[int]) -> NDArray[np.uint64]:
        if len(tokens) < self.window:
            return np.empty(0, dtype=np.uint64)
        ids = np.asarray(tokens, dtype=np.int64).astype(np.uint64) + np.uint64(1)
        windows = np.lib.stride_tricks.sliding_window_view(ids, self.window)
        codes: NDArray[np.uint64] = (windows * self._powers).sum(axis=1, dtype=np.uint64)
        return codes


def _common(a: tuple[int, ...], i: int, b: tuple[int, ...], j: int) -> int:
    """Length of the common run of ``a[i:]`` and ``b[j:]``."""
    limit = min(len(a) - i, len(b) - j)
    if a[i:i + limit] == b[j:j + limit]:
        return limit
    return next(n for n in range(limit) if a[i + n] != b[j + n])
