"""PieceTokenizer: ids of text that comes in pieces, as if the tokenizer had seen where each piece stands.

Two traps of encoding pieces one by one, and what is done about them:
  control tokens   ``<|im_end|>`` in user text must stay text: text is encoded in two halves around its first character
  dummy prefix     tokenizers of the SentencePiece kind put a space before every text they encode: a piece is encoded
                   behind other text, whose ids are then taken off
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvbaton.errors import Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = tuple[int, ...]

_ANCHORS = ("\ue000", "\n", "\u2603")
"""Text that hardly ever merges with what stands behind it."""
_NEVER = re.compile(r"(?!)")


class Piece(NamedTuple):
    """Text. ``trusted``: the chat template wrote it, so the control tokens in it count."""

    text: str
    trusted: bool


class PieceTokenizer:
    """Encodes and decodes pieces of a prompt. Never adds BOS or EOS: the chat template writes what it wants."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template or "")
        control = {i: token for i, token in tokenizer.added_tokens_decoder.items() if len(token.content.strip()) > 1
                   and (token.special or token.content in template)}
        self._control_ids = frozenset(control) - {tokenizer.unk_token_id}
        longest_first = sorted(control.values(), key=lambda token: -len(token.content))
        self._control = _any_of([r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
                                 for token in longest_first])
        self._control_start = _any_of([f"(?={re.escape(token.content)})" for token in longest_first])
        self._dummy_prefix = any(self._encode(probe) != self._behind(probe, _ANCHORS) for probe in ("a", "1", "Hello"))
        self._anchor = self._encode("a")

    def encode(self, text: str) -> TokenIds:
        """Ids of user text that continues other text: no control token, no dummy prefix."""
        return self._plain(text, None)

    def encode_run(self, run: Sequence[Piece], at_start: bool) -> TokenIds:
        """Ids of pieces that follow each other; plain text between two control tokens is tokenised in one go.

        ``at_start``: the run opens the prompt, where a tokenizer's dummy prefix belongs.
        """
        ids: TokenIds = ()
        plain, before = "", "" if at_start else None
        for text, trusted in run:
            end = 0
            for control in self._control.finditer(text) if trusted else ():
                ids += self._plain(plain + text[end:control.start()], before)
                ids += self._encode(control[0])
                plain, before, end = "", control[0], control.end()
            plain += text[end:]
        return ids + self._plain(plain, before)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; `encode`'s inverse where the tokenizer keeps every character."""
        if not self._dummy_prefix:
            return self._decode(ids)
        return self._decode((*self._anchor, *ids)).removeprefix(self._decode(self._anchor))

    def token_id(self, text: str) -> int | None:
        """The one token that is exactly this text, control tokens included; None if it takes several."""
        ids = self.encode_run([Piece(text, trusted=True)], at_start=False)
        return ids[0] if len(ids) == 1 else None

    def _plain(self, text: str, before: str | None) -> TokenIds:
        """Ids of text whose control tokens stay text.

        ``before``: what the text stands behind: a control token, "" at the prompt's start, None for other text.
        """
        cuts = [match.start() + 1 for match in self._control_start.finditer(text)]
        ids: TokenIds = ()
        for start, end in pairwise([0, *cuts, len(text)]):
            ids += self._seam(text[start:end], None if start else before)
        if not self._control_ids.isdisjoint(ids):
            raise Unsupported(f"this tokenizer reads a control token even in the plain text {text[:80]!r}")
        return ids

    def _seam(self, text: str, before: str | None) -> TokenIds:
        if not text or before == "" or not self._dummy_prefix:
            return self._encode(text)
        return self._behind(text, _ANCHORS if before is None else (before,))

    def _behind(self, text: str, anchors: Sequence[str]) -> TokenIds:
        """Ids of ``text`` right behind the first anchor that does not merge with it."""
        for anchor in anchors:
            head, ids = self._encode(anchor), self._encode(anchor + text)
            if head and ids[:len(head)] == head:
                return ids[len(head):]
        raise Unsupported(f"this tokenizer merges {text[:20]!r} with whatever stands before it")

    def _encode(self, text: str) -> TokenIds:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns)) if patterns else _NEVER
