"""The study's texts and roles: which agent holds a text first, which agents read it next, and what they are told."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbaton.bench import data
from kvbaton.bench.script import own
from kvbaton.engine.text import TextCodec
from kvbaton.prompt import Prompt
from kvbaton.templates import Template

Ids = tuple[int, ...]

MATHS = {
    "tutor": "You are a careful maths tutor. Work through the problem one step at a time.",
    "critic": "You check other people's reasoning. Point out every slip you can find and say how to mend it.",
    "editor": "You are an editor who rewrites text for a school newspaper in short plain sentences.",
    "judge": "You are the head of a jury. Weigh what you are given and announce one final verdict.",
}
CODE = {
    "architect": "You are a software architect. Before any code is written you describe its structure.",
    "coder": "You write short, correct Python. Answer with code only.",
    "tester": "You are a tester. List the inputs on which a function is likely to fail.",
    "writer": "You write the manual of a Python library for beginners.",
}
READING = {
    "librarian": "You are a librarian. You sort documents and note what each of them is about.",
    "detective": "You answer questions from documents and name the sentence that proves it.",
    "teacher": "You are a teacher who makes questions for an exam out of a given text.",
    "sceptic": "You doubt everything that you read. Say what in a text is not supported by anything.",
}


@dataclass(frozen=True)
class Task:
    """``source`` holds the shared text ``share`` first; each of ``readers`` then reads it. ``ask``: user templates.

    ``written``: the source generates the shared text as its answer to its prompt instead of reading it.
    """

    name: str
    roles: Mapping[str, str]
    source: str
    readers: tuple[str, ...]
    share: str
    ask: Mapping[str, str]
    texts: Callable[[Path], Sequence[Mapping[str, str]]]
    written: bool = False
    max_tokens: int = 400
    private: frozenset[str] = frozenset()

    def prompt(self, codec: TextCodec, reader: str, fills: Mapping[str, Ids]) -> Prompt:
        user = Template.parse(self.ask.get(reader, self.ask["*"]))
        prompt = codec.prompt(reader, Template.parse(self.roles[reader]), user, fills)
        return own(prompt, self.private)

    def fills(self, codec: TextCodec, text: Mapping[str, str]) -> dict[str, Ids]:
        return {name: tuple(codec.encode(value))[:self.max_tokens] for name, value in text.items()}


def _shuffled(rows: Sequence[Any]) -> list[Any]:
    rows = list(rows)
    random.Random(7).shuffle(rows)
    return rows


def _find(folder: Path, name: str) -> tuple[Mapping[str, Any], ...]:
    return data.load(name, folder=folder if folder.is_dir() else None).rows


def _gsm8k(folder: Path) -> list[dict[str, str]]:
    return [{"question": row["question"]} for row in _shuffled(_find(folder, "gsm8k"))]


def _humaneval(folder: Path) -> list[dict[str, str]]:
    return [{"task": row["prompt"]} for row in _shuffled(_find(folder, "humaneval"))]


def _paragraphs(count: int) -> Callable[[Path], list[dict[str, str]]]:
    def texts(folder: Path) -> list[dict[str, str]]:
        rows = _shuffled(_find(folder, "hotpotqa"))
        parts = [(row["question"], row["paragraphs"][i:i + count]) for row in rows
                 for i in range(0, max(1, min(len(row["paragraphs"]), 2 * count) - count + 1), count)]
        return [{"documents": "\n\n".join(f"{p['title']}: {p['text']}" for p in chosen), "question": question}
                for question, chosen in _shuffled(parts)]
    return texts


def _long(folder: Path) -> list[dict[str, str]]:
    """All paragraphs of six questions after each other: cut to length by ``max_tokens``."""
    rows = _shuffled(_find(folder, "hotpotqa"))
    whole = ["\n\n".join(f"{p['title']}: {p['text']}" for p in row["paragraphs"]) for row in rows]
    return [{"documents": "\n\n".join(whole[6 * i:6 * i + 6]), "question": rows[6 * i]["question"]}
            for i in range(len(rows) // 6)]


_READ = {"*": "{documents}\n\nThe question is: {question}\nDo your part."}
TASKS = {task.name: task for task in (
    Task("gsm8k", MATHS, "tutor", ("critic", "editor", "judge"), "question", {"*": "{question}\n\nDo your part now."},
         _gsm8k),
    Task("humaneval", CODE, "architect", ("coder", "tester", "writer"), "task", {"*": "{task}\n\nDo your part now."},
         _humaneval),
    Task("hotpotqa", READING, "librarian", ("detective", "teacher", "sceptic"), "documents", _READ, _paragraphs(2),
         private=frozenset({"question"})),
    Task("peer", MATHS, "tutor", ("critic", "editor", "judge"), "tutor",
         {"tutor": "{question}", "*": "{question}\n\nA colleague wrote:\n{tutor}\n\nDo your part now."}, _gsm8k,
         written=True, private=frozenset({"question"})),
    *(Task(f"long-{tokens}", READING, "librarian", ("detective", "teacher", "sceptic"), "documents", _READ, _long,
           max_tokens=tokens, private=frozenset({"question"})) for tokens in (1000, 3000, 6000)),
)}
