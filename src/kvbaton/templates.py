"""Template: a prompt with placeholders, and where each of them stands.

    "{question}\\n\\nA colleague wrote:\\n{solver}"     an input, then an agent's output of this round
    "You said {solver@-1}, in braces: {{so}}"         the output of the round before; doubled braces are braces
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from kvbaton.errors import TeamError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""What an agent or an input may be called."""
PREVIOUS = "@-1"

_TOKEN = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")


@dataclass(frozen=True, order=True)
class Field:
    """A placeholder. ``previous``: it reads the round before. ``at``: character offset in its template."""

    name: str
    previous: bool = False
    at: int = field(default=0, compare=False)

    @property
    def share(self) -> str:
        """What the segment that fills it is called: ``solver`` or ``solver@-1``."""
        return self.name + PREVIOUS if self.previous else self.name

    def __str__(self) -> str:
        return f"{{{self.share}}}"


@dataclass(frozen=True)
class Template:
    """Literal text and placeholders, in order; no two literals stand side by side and none is empty."""

    parts: tuple[str | Field, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read a template. Raises TeamError with line and column where the braces make no sense."""
        parts: list[str | Field] = []
        literal, end = "", 0
        for match in _TOKEN.finditer(text):
            literal += text[end:match.start()]
            end = match.end()
            if match[0] in ("{{", "}}"):
                literal += match[0][0]
                continue
            parts += [literal] if literal else []
            literal = ""
            parts.append(_placeholder(text, match))
        literal += text[end:]
        return cls((*parts, literal) if literal else tuple(parts))

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        return tuple(part for part in self.parts if isinstance(part, Field))

    def where(self, wanted: Field) -> str:
        """Line and column of a placeholder, counted from 1."""
        return _where(str(self), wanted.at)

    def __add__(self, other: Template) -> Template:
        return Template.parse(str(self) + str(other))

    def __str__(self) -> str:
        """The text it was read from, character for character."""
        return "".join(str(part) if isinstance(part, Field) else part.replace("{", "{{").replace("}", "}}")
                       for part in self.parts)


def _placeholder(text: str, match: re.Match[str]) -> Field:
    body = match[0].strip("{}")
    name, mark, back = body.partition("@")
    if match[0] in ("{", "}"):
        raise TeamError(f"{_where(text, match.start())}: a lone {match[0]!r}: write {match[0] * 2!r} for a brace")
    if mark and mark + back != PREVIOUS:
        raise TeamError(f"{_where(text, match.start())}: {match[0]} asks for {mark + back!r}: only the round before, "
                        f"{{{name}{PREVIOUS}}}, can be read")
    if not NAME.fullmatch(name):
        raise TeamError(f"{_where(text, match.start())}: {match[0]!r} is no placeholder: write {{name}} with letters, "
                        "digits, '_' and '-', and double the braces of any other text")
    return Field(name, bool(mark), match.start())


def _where(text: str, at: int) -> str:
    line_start = text.rfind("\n", 0, at) + 1
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - line_start + 1}"
