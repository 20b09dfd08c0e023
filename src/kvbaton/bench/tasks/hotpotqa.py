"""HotpotQA with its paragraphs, in the two tracks of KVShareArena (own wording).

    Retrieved Evidence   keeper1 … keeper10 hold one paragraph each ──┐ the reader gets all ten paragraphs
    Agent Reports        reporter1 … 10 write about one paragraph each ──┐ the reader gets the ten reports

Every text is born behind another role prompt and apart from the others; only the reader's hop is scored.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from kvbaton.agents import Agent
from kvbaton.bench.data import Row
from kvbaton.bench.tasks.base import FINAL, REFUSED, Question, Score, final_line

_READER = ("You answer questions from the texts that you are given. "
           f"Reply with one line that starts with \"{FINAL}\" and holds a few words only.")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def words(text: str) -> list[str]:
    """Words in the customary form of question answering: lower case, no punctuation, no articles."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", plain).split()


def word_f1(said: str, gold: str) -> float:
    """Harmonic mean of word precision and recall."""
    a, b = words(said), words(gold)
    if not a or not b:
        return float(a == b)
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b))


@dataclass(frozen=True)
class _HotpotQA:
    """Questions and score, common to both tracks. Rows with another number of paragraphs are left out."""

    paragraphs: int = 10
    data_set: ClassVar[str] = "hotpotqa"
    decider: ClassVar[str] = "reader"

    def floor(self) -> Agent:
        return Agent("reader", system=_READER, prompt="Question: {question}\n\nAnswer it.")

    def question(self, row: Row, index: int) -> Question | None:
        if len(row["paragraphs"]) != self.paragraphs:
            return None
        inputs = {f"text{i}": f"{p['title']}: {p['text']}" for i, p in enumerate(row["paragraphs"], 1)}
        inputs["question"] = row["question"]
        return Question(row["id"] or str(index), inputs, f"{FINAL} {row['answer']}", row)

    def score(self, question: Question, text: str) -> Score:
        said = final_line(text, r"(\S.*?)")
        if said is None:
            return REFUSED
        value = word_f1(said, question.row["answer"])
        return Score(value, " ".join(words(said)), "right" if value == 1 else "part" if value else "wrong")

    def _reader(self, shares: list[str]) -> Agent:
        texts = "".join(f"Text {i}:\n{{{share}}}\n\n" for i, share in enumerate(shares, 1))
        return Agent("reader", system=_READER, prompt=f"{texts}Question: {{question}}\n\nAnswer it from the texts.")


@dataclass(frozen=True)
class RetrievedEvidence(_HotpotQA):
    """The paragraphs themselves are shared; each was read before by a keeper of its own."""

    name: ClassVar[str] = "hotpotqa-evidence"

    def agents(self) -> tuple[Agent, ...]:
        system = "You keep an archive. You read each text carefully so that it can be found later."
        shares = [f"text{i}" for i in range(1, self.paragraphs + 1)]
        keepers = tuple(Agent(f"keeper{i}", system=system, prompt=f"File this text.\n\n{{{share}}}\n\nSay when done.",
                              max_new_tokens=1) for i, share in enumerate(shares, 1))
        return (*keepers, self._reader(shares))


@dataclass(frozen=True)
class AgentReports(_HotpotQA):
    """Each paragraph is reported on, question unseen; the reports' decode-time KV is what the reader starts from."""

    name: ClassVar[str] = "hotpotqa-reports"

    def agents(self) -> tuple[Agent, ...]:
        system = ("You report what a text says: names, dates, places and how they hang together, in three short "
                  "sentences.")
        reporters = tuple(
            Agent(f"reporter{i}", system=system, prompt=f"Here is a text.\n\n{{text{i}}}\n\nReport on it.")
            for i in range(1, self.paragraphs + 1))
        return (*reporters, self._reader([a.name for a in reporters]))
