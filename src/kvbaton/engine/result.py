"""What one hop did: raw times, what was reused and why. The books must balance or the record is refused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbaton.errors import InvariantError


@dataclass(frozen=True)
class Decision:
    """What happened to one reusable segment, and why. ``share`` is None for the agent's own text."""

    share: str | None
    source: str | None
    tokens: int
    action: str
    reason: str
    predicted: float | None = None


@dataclass(frozen=True)
class Entries:
    """KV entries (token x layer) of a prompt, by where they came from.

    ``cached``: the agent's own role prompt, from the exact prefix cache. ``corrected``: of rows that a corrector went
    over; not layer 0, which is exact after moving and counts as reused, like the rows that a corrector leaves alone.
    """

    reused: int
    corrected: int
    recomputed: int
    cached: int

    @property
    def total(self) -> int:
        return self.reused + self.corrected + self.recomputed + self.cached


@dataclass(frozen=True)
class HopResult:
    """One agent call.

    Times are seconds since submit; ``ttft_s`` ends when the first token is known, planning, matching, correction,
    isolated encodes and gates included. ``extra_entries``: entries computed beyond the prompt's own rows (isolated
    encodes, query passes), already inside the times. ``rows_per_layer``: reused rows recomputed, layer by layer.
    ``boundary_bytes``: hidden states kept for methods that enter above layer 0, inside ``held_bytes``.
    ``learn_s``: learning, off the TTFT path. ``moved_bytes``: KV moved, rotated or corrected into this hop's cache.
    ``logits`` ``[m, vocab]`` float32 for a forced answer of m tokens, else None; ``beside``: those of `Force.beside`.
    ``divergence``: KL(dense || reuse), nats a token, where this hop was audited: of a dense hop, what reuse would have
    cost. ``decisions`` hold what was predicted.
    """

    reader: str
    prompt_tokens: int
    layers: int
    shared_tokens: int
    output_ids: tuple[int, ...]
    stopped: bool
    text: str
    token_times_s: tuple[float, ...]
    plan_s: float
    decisions: tuple[Decision, ...]
    entries: Entries
    extra_entries: int
    rows_per_layer: tuple[int, ...]
    moved_bytes: int
    held_bytes: int
    boundary_bytes: int
    learned_bytes: int
    learn_s: float
    dense: bool
    logits: Tensor | None = None
    beside: tuple[Tensor, ...] = ()
    divergence: float | None = None

    def __post_init__(self) -> None:
        if self.entries.total != self.prompt_tokens * self.layers:
            raise InvariantError(
                f"hop of {self.reader!r}: {self.entries} sum to {self.entries.total}, "
                f"not to {self.prompt_tokens} tokens x {self.layers} layers")

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Seconds an output token after the first; None with fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def effective_reuse_ratio(self) -> float:
        """Share of the reusable entries (token x layer) that were not recomputed; 0 where nothing is reusable."""
        reusable = self.reusable_tokens * self.layers
        return (self.entries.reused + self.entries.corrected) / reusable if reusable else 0.0

    @property
    def reusable_tokens(self) -> int:
        """Shared tokens, and the agent's own where a method reuses them too."""
        return self.shared_tokens + sum(d.tokens for d in self.decisions if d.share is None and d.action != "recompute")
