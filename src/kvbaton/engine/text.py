"""TextCodec: chat messages with placeholders into segments of token ids, and ids back into text.

    template text   <|im_start|>user⏎          ⏎⏎Solution:⏎            <|im_end|>⏎<|im_start|>assistant⏎
    user text                        (question)              (solver)
    segments        [ own text     ][ share    ][ own text  ][ share  ][ own text                      ]

The chat template is rendered once, with a mark in the place of every piece of user text, and split at the marks.
Control tokens are read as such only where the chat template wrote them. Own text between two shared texts is tokenised
in one go, so a prompt without placeholders has the very ids that transformers gives it; shared text comes as ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from kvbaton.engine.tokens import Piece, PieceTokenizer, TokenIds
from kvbaton.errors import TeamError, Unsupported
from kvbaton.prompt import Prompt, Segment
from kvbaton.templates import Field, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"kvbaton-piece-(\d+)-")
_SKELETONS = 256
"""Rendered templates kept: enough for any team, bounded for a server."""


class _Refused(Exception):
    """The chat template takes no such message; says why."""


class TextCodec:
    """Text to ids and back for one tokenizer. Holds rendered templates, nothing of any run."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces = PieceTokenizer(tokenizer)
        self._skeleton = lru_cache(maxsize=_SKELETONS)(self._render)

    def prompt(self, reader: str, system: Template | None, user: Template, fills: Mapping[str, TokenIds]) -> Prompt:
        """The prompt of one hop.

        ``fills``: token ids by share; an empty text is left out. A system message that the chat template refuses or
        drops stands at the head of the user message instead. Raises TeamError for a share without a text, Unsupported
        where there is no chat template or it does not keep the messages' text.
        """
        segments: list[Segment] = []
        own: TokenIds = ()
        for piece in self._skeleton(system, user):
            if not isinstance(piece, Field):
                own += piece
                continue
            if piece.share not in fills:
                raise TeamError(f"the prompt of {reader!r} has no text for {piece}")
            if fills[piece.share]:
                segments += [Segment(own)] if own else []
                segments.append(Segment(fills[piece.share], piece.share))
                own = ()
        stamp = hashlib.blake2b(f"{system}\0{user}".encode(), digest_size=4).hexdigest()
        return Prompt(reader, (*segments, Segment(own)) if own else tuple(segments), stamp)

    def encode(self, text: str) -> TokenIds:
        """Ids of user text: no BOS, no dummy prefix space; control tokens in it stay text."""
        return self._pieces.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; `encode`'s inverse where the tokenizer keeps every character."""
        return self._pieces.decode(ids)

    def token_id(self, text: str) -> int | None:
        """The one token that is exactly this text, control tokens included; None if it takes several."""
        return self._pieces.token_id(text)

    def stream(self) -> TextStream:
        """A decoder for one answer that comes token by token."""
        return TextStream(self.decode)

    def _render(self, system: Template | None, user: Template) -> tuple[TokenIds | Field, ...]:
        """Ids of own text, and the placeholders between."""
        model = repr(self._tokenizer.name_or_path or "this model")
        if self._tokenizer.chat_template is None:
            raise Unsupported(f"the tokenizer of {model} has no chat template: use an instruction-tuned model")
        try:
            if system is None:
                return self._tokenise(self._split({"user": user}))
            try:
                return self._tokenise(self._split({"system": system, "user": user}))
            except _Refused:
                glue = Template(("\n\n",) if system.parts else ())
                return self._tokenise(self._split({"user": system + glue + user}))
        except _Refused as refusal:
            raise Unsupported(f"the chat template of {model} takes no plain user message: {refusal}") from refusal

    def _split(self, messages: Mapping[str, Template]) -> list[Piece | Field]:
        """The rendered chat of ``{role: content}``, piece by piece."""
        pieces: list[Piece | Field] = []
        chat = []
        for role, template in messages.items():
            content, marked = _mark(template, len(pieces))
            pieces += marked
            chat.append({"role": role, "content": content})
        try:
            rendered = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise _Refused(str(error)) from error
        found = _MARK.split(str(rendered))
        lost = sorted(set(range(len(pieces))) - {int(i) for i in found[1::2]})
        if lost:
            raise _Refused(f"it drops or changes {pieces[lost[0]]}")
        return [pieces[int(part)] if i % 2 else Piece(part, trusted=True) for i, part in enumerate(found)]

    def _tokenise(self, pieces: Sequence[Piece | Field]) -> tuple[TokenIds | Field, ...]:
        out: list[TokenIds | Field] = []
        run: list[Piece] = []
        for piece in (*pieces, None):
            if isinstance(piece, Piece):
                run.append(piece)
                continue
            ids = self._pieces.encode_run(run, at_start=not out)
            out += [ids] if ids else []
            out += [piece] if piece else []
            run = []
        return tuple(out)


def _mark(template: Template, first: int) -> tuple[str, list[Piece | Field]]:
    """A message's content with numbered marks in the place of its pieces, and those pieces.

    White space at either end stays outside the marks, so that a chat template that trims its messages still does.
    """
    parts, lead, trail = list(template.parts), "", ""
    if parts and isinstance(parts[0], str):
        lead, parts[0] = parts[0][:len(parts[0]) - len(parts[0].lstrip())], parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        trail, parts[-1] = parts[-1][len(parts[-1].rstrip()):], parts[-1].rstrip()
    pieces = [Piece(part, trusted=False) if isinstance(part, str) else part for part in parts if part]
    marks = "".join(f"kvbaton-piece-{first + i}-" for i in range(len(pieces)))
    return lead + marks + trail, pieces


class TextStream:
    """Text of an answer as its tokens come; a character cut in two by a token waits for its other half."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._shown = 0

    def feed(self, token: int) -> str:
        """New text, empty while a character is unfinished."""
        self._ids.append(token)
        text = self._fresh()
        if text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def end(self) -> str:
        """What was still waiting."""
        return self._fresh()

    def _fresh(self) -> str:
        """Text behind what was shown; the last tokens shown stay in view, as text may depend on the token before."""
        shown = self._decode(self._ids[self._start:self._shown])
        return self._decode(self._ids[self._start:])[len(shown):]
