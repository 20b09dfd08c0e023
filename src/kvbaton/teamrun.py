"""What a team's run left behind: one Turn a hop, in the order they ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvbaton.engine.result import HopResult
from kvbaton.errors import UnknownName
from kvbaton.prompt import Prompt


@dataclass(frozen=True)
class Turn:
    """One agent's hop. ``round`` counts from 1; ``prompt`` is what the agent read, as segments of token ids."""

    agent: str
    round: int
    prompt: Prompt
    hop: HopResult

    @property
    def text(self) -> str:
        return self.hop.text

    @property
    def ttft_s(self) -> float:
        return self.hop.ttft_s

    @property
    def reuse(self) -> float:
        """Effective reuse ratio: share of shared entries (token x layer) that were not recomputed."""
        return self.hop.effective_reuse_ratio

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know: why text was recomputed, and that nothing was said."""
        why: dict[str, list[str]] = {}
        for decision in self.hop.decisions:
            if decision.action == "recompute":
                why.setdefault(decision.reason, []).append(decision.share or "own text")
        recomputed = (f"{', '.join(shares)} recomputed: {reason}" for reason, shares in why.items())
        return (*recomputed, *(() if self.hop.output_ids else ("said nothing: its readers go without",)))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the logits, as plain JSON values."""
        return {
            "agent": self.agent, "round": self.round,
            "segments": [{"share": s.share, "tokens": len(s), "key": s.key} for s in self.prompt.segments],
            "ttft_s": self.ttft_s, "tpot_s": self.hop.tpot_s, "effective_reuse_ratio": self.reuse,
            "notes": list(self.notes), **asdict(replace(self.hop, logits=None, beside=())),
        }


@dataclass(frozen=True)
class TeamRun:
    """All turns of one run. ``run["judge"]`` is the judge's last turn."""

    model: str
    method: str
    inputs: Mapping[str, str]
    turns: tuple[Turn, ...]

    def __getitem__(self, agent: str) -> Turn:
        """The agent's turn of the last round. Raises UnknownName."""
        for turn in reversed(self.turns):
            if turn.agent == agent:
                return turn
        raise UnknownName("agent", agent, {turn.agent for turn in self.turns})

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns)

    def __len__(self) -> int:
        return len(self.turns)

    def report(self) -> str:
        """A plain-text table, one line a turn."""
        head = ("agent", "round", "prompt", "shared", "reuse", "TTFT ms", "answer", "notes")
        rows = [head, *(_row(turn) for turn in self.turns)]
        return f"{self.method} on {self.model}\n{_table(rows)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: every turn with its raw times, decisions and text."""
        return {"model": self.model, "method": self.method, "inputs": dict(self.inputs),
                "turns": [turn.to_dict() for turn in self.turns]}


def _row(turn: Turn) -> tuple[str, ...]:
    hop = turn.hop
    return (turn.agent, str(turn.round), str(hop.prompt_tokens), str(hop.shared_tokens), f"{turn.reuse:.0%}",
            f"{turn.ttft_s * 1000:.0f}", str(len(hop.output_ids)), "; ".join(turn.notes))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first and the last to the left, the numbers between to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = ("  ".join(cell.ljust(width) if i in (0, last) else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
