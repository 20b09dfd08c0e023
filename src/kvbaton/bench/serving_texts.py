"""Texts of the serving benchmark: token ids, the same ones for the same seed.

What a gate decides depends on what it reads. Passages of a data set are text of one kind, as an edge of a real team
sees; random ids teach a correction nothing about the answers to them, and a gate that looks sends them dense.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvbaton.bench import data
from kvbaton.errors import UnknownName, UsageError

KINDS = ("random", "gsm8k", "hotpotqa")
MOST_PASSAGES = 1000


class Source(Protocol):
    """Where ids come from."""

    def draw(self, rng: random.Random, tokens: int) -> list[int]: ...


@dataclass(frozen=True)
class RandomIds:
    """Ids of the half-open range ``[low, high)``, each as likely as the other."""

    low: int = 100
    high: int = 30000

    def draw(self, rng: random.Random, tokens: int) -> list[int]:
        return [rng.randrange(self.low, self.high) for _ in range(tokens)]


@dataclass(frozen=True)
class Passages:
    """Tokenised passages, put one behind the other in random order and cut to length."""

    passages: Sequence[Sequence[int]]

    def draw(self, rng: random.Random, tokens: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < tokens:
            ids += rng.choice(self.passages)
        return ids[:tokens]


@dataclass(frozen=True)
class Texts:
    """An agent's own text, its template, is the same in every cell of a ``seed``; what is shared is new every time."""

    source: Source
    seed: int
    cell: str

    def own(self, agent: int, where: str, tokens: int) -> list[int]:
        """The agent's own text ``where`` in its prompt."""
        return self.source.draw(random.Random(f"{self.seed} {agent} {where}"), tokens)

    def new(self, what: str, tokens: int) -> list[int]:
        """The same ids for the same ``what`` of this cell."""
        return self.source.draw(random.Random(f"{self.seed} {self.cell} {what}"), tokens)


def passages_of(name: str, folder: Path | None = None) -> list[str]:
    """Passages of data set ``name``: questions with their answers (gsm8k), paragraphs (hotpotqa).

    Raises UnknownName, and what `data.load` raises where the set is not to be had.
    """
    if name not in KINDS[1:]:
        raise UnknownName("kind of text", name, KINDS)
    rows = data.load(name, folder=folder).rows
    found = ([f"{row['question']}\n{row['answer']}" for row in rows] if name == "gsm8k" else
             [part["text"] for row in rows for part in row["paragraphs"]])
    return found[:MOST_PASSAGES]


def tokenise(base_url: str, model: str, passages: Sequence[str]) -> Passages:
    """Passages by the server's own tokenizer (vLLM's ``/tokenize``). Raises UsageError if it has none."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/tokenize"
    return Passages([_ids(url, model, f"{text}\n\n") for text in passages])


def _ids(url: str, model: str, text: str) -> list[int]:
    body = json.dumps({"model": model, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [int(token) for token in json.load(answer)["tokens"]]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"no tokens from {url}: {error}. Draw random ids instead: --texts random") from error
