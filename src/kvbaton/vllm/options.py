"""What a server and a request ask of KVBaton, checked: unknown names and bad values are refused, never dropped.

    server     --kv-transfer-config '{"kv_connector": "KVBaton", "kv_connector_extra_config": {"method": "hybrid"}}'
    request    "kv_transfer_params": {"kvbaton": {"group": "team-7", "agent": "critic", "spans": [[9, 74, "question"]]}}

Approximate KV is for requests that ask for it. With ``apply: "all"`` the operator asks for everybody, so that clients
need not know of KVBaton; ``"kvbaton": {"method": "dense"}`` then opts a request out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import torch

from kvbaton.errors import UnknownName, Unsupported, UsageError
from kvbaton.gates import Residual
from kvbaton.overrides import override_all
from kvbaton.prompt import Span
from kvbaton.recipes import Mask, PrivateText, Recipe, recipe
from kvbaton.selectors.base import Fixed, ReusedRows

PARAMS_KEY = "kvbaton"
_APPLY = ("asked", "all")


@dataclass(frozen=True)
class Method:
    """A recipe by name with its overrides: what requests must agree on to share KV and learned state."""

    name: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, *self.settings))

    def recipe(self) -> Recipe:
        """The recipe. Raises UnknownName, UsageError, or Unsupported if no paged engine can run it."""
        return _recipe(self)


@lru_cache(maxsize=256)
def _recipe(method: Method) -> Recipe:
    made = override_all(recipe(method.name), method.settings)
    refused = f"method {str(method)!r} cannot run inside vLLM:"
    reason = _unfit(made)
    if reason is not None:
        raise Unsupported(f"{refused} {reason}. "
                          "Methods without a sparse selector can: hybrid, affine, shift, kvcmas, full-shared")
    if isinstance(made.gate, Residual) and made.gate.target is not None:
        raise Unsupported(f"{refused} target_divergence (gate.target) needs measured divergences, and a server runs no "
                          "request twice to measure any: every edge would stay dense. Leave it out; the gate then "
                          "reuses where the correction holds. gate.foreign and gate.dense_share make it stricter, "
                          "`kvbaton eval` measures what it costs")
    return made


def _unfit(made: Recipe) -> str | None:
    """Why a paged engine cannot run this recipe: it computes whole chunks of rows, in every layer."""
    if made.reference.encodes_alone:
        return "it encodes texts alone, which needs requests of its own"
    if made.corrector.needs_truth:
        return "it needs a dense pass for every request"
    if made.private is not PrivateText.EXACT or made.mask is not Mask.EXACT:
        return "private text is always computed, under the exact mask"
    if made.selector.needs or made.selector.entry is not None:
        return "its selector looks into layers of the forward pass"
    rows = torch.arange(40)
    try:
        leading_rows(made, ReusedRows(rows + 7, rows, torch.zeros_like(rows), layers=4))
    except Unsupported as error:
        return str(error)
    return None


def leading_rows(made: Recipe, reused: ReusedRows) -> list[int]:
    """Rows ``[0, n)`` of each segment of ``reused`` that the recipe's selector computes, by segment number.

    ``reused`` holds every row that may be reused. Raises Unsupported if the rows are not the first ones of their
    segment, or change from layer to layer.
    """
    count = int(reused.segments.max()) + 1 if len(reused) else 0
    leads = [int(reused.offsets[reused.segments == number].min()) for number in range(count)]
    if not count:
        return leads
    selection = made.selector.begin(reused)
    if not isinstance(selection, Fixed):
        raise Unsupported(f"the selector of {made.name!r} changes rows from layer to layer: vLLM computes a row in all")
    rows = selection.rows
    for number in range(count):
        chosen = reused.offsets[rows][reused.segments[rows] == number]
        if chosen.numel():
            first, last = leads[number], int(chosen.max())
            if int(chosen.min()) != first or chosen.numel() != last + 1 - first:
                raise Unsupported(f"the selector of {made.name!r} picks scattered rows: vLLM computes leading rows")
            leads[number] = last + 1
    return leads


@dataclass(frozen=True)
class ServerOptions:
    """``kv_connector_extra_config``.

    ``store_bytes``: KV of shared text kept for reuse, over all workers; the text used longest ago goes first.
    ``memory_bytes``: learned state per group and method, None: no limit; the edge used longest ago goes first.
    ``max_lanes``: groups x methods kept at a time, the idle one used longest ago goes first. ``window``: shortest
    text, in tokens, that is found by content. ``role_tokens``: an agent that gives no name is known by its first
    tokens. ``state_dir``: learned state is read from and saved to this folder.
    """

    method: str = "hybrid"
    set: tuple[str, ...] = ()
    apply: str = "asked"
    group: str = "default"
    store_bytes: int = 2 * 2**30
    memory_bytes: int | None = 2 * 2**30
    max_lanes: int = 64
    window: int = 16
    role_tokens: int = 32
    state_dir: str | None = None
    log_requests: bool = True

    def __post_init__(self) -> None:
        if self.apply not in _APPLY:
            raise UsageError(f"apply is one of {', '.join(_APPLY)}, got {self.apply!r}")
        if self.window < 4 or self.role_tokens < 1 or self.max_lanes < 1 or self.store_bytes < 0:
            raise UsageError("at least 4 tokens for window, 1 for role_tokens, 1 lane for max_lanes, 0 for store_bytes")
        Method(self.method, tuple(self.set)).recipe()

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> ServerOptions:
        return cls(**{**_checked("option of the KVBaton connector", cls, raw), "set": _strings(raw.get("set", ()))})


@dataclass(frozen=True)
class Mark:
    """A span of the prompt that the client says is shared text, and whose."""

    span: Span
    share: str


@dataclass(frozen=True)
class RequestOptions:
    """``kv_transfer_params["kvbaton"]``.

    ``agent`` and ``output``: the role that reads, and the share its answer becomes (the agent's name by default).
    ``marks``: shared spans; None: found by content. ``reuse`` and ``save`` False: take nothing, leave nothing.
    """

    group: str
    method: Method
    agent: str | None = None
    output: str | None = None
    marks: tuple[Mark, ...] | None = None
    reuse: bool = True
    save: bool = True
    asked: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, params: Mapping[str, Any] | None, server: ServerOptions) -> RequestOptions | None:
        """A request's options; None: it gets exact KV and leaves none. Raises UsageError on a bad value."""
        raw = (params or {}).get(PARAMS_KEY)
        if raw is None and server.apply == "asked":
            return None
        base = cls(server.group, Method(server.method, server.set), asked=raw is not None)
        return base if raw is None else base._with(raw)

    def _with(self, raw: Any) -> RequestOptions:
        if not isinstance(raw, Mapping):
            raise UsageError(f"kv_transfer_params[{PARAMS_KEY!r}] is an object, got {type(raw).__name__}")
        known = {"group", "method", "set", "budget", "target_divergence", "agent", "output", "spans", "reuse", "save"}
        for name in raw:
            if name not in known:
                raise UnknownName(f"field of kv_transfer_params[{PARAMS_KEY!r}]", str(name), known)
        settings = list(_strings(raw.get("set", ())))
        if "budget" in raw:
            settings.append(f"selector.share={raw['budget']}")
        if "target_divergence" in raw:
            settings.append(f"gate.target={raw['target_divergence']}")
        method = Method(raw.get("method", self.method.name), self._settings(raw, settings))
        made = replace(self, group=_text(raw, "group", self.group), method=method,
                       agent=_text(raw, "agent", self.agent), output=_text(raw, "output", self.output),
                       reuse=_flag(raw, "reuse"), save=_flag(raw, "save"),
                       marks=_marks(raw["spans"]) if "spans" in raw else None)
        method.recipe()
        return made

    def _settings(self, raw: Mapping[str, Any], own: list[str]) -> tuple[str, ...]:
        """The server's settings hold for its own method only; the request's come after them."""
        same = raw.get("method", self.method.name) == self.method.name
        return (*(self.method.settings if same else ()), *own)

    def check_length(self, tokens: int) -> None:
        """Raise UsageError if a mark lies outside a prompt of that many tokens."""
        for mark in self.marks or ():
            if mark.span.end > tokens:
                raise UsageError(f"span {mark.share!r} ends at {mark.span.end}, the prompt has {tokens} tokens")


def _checked(what: str, cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(cls)}
    for name in raw:
        if name not in known:
            raise UnknownName(what, str(name), known)
    return dict(raw)


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"set is a list of 'part.field=value' texts, got {value!r}")
    return tuple(value)


def _text(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    value = raw.get(name, default)
    if value is not default and (not isinstance(value, str) or not 0 < len(value) <= 200):
        raise UsageError(f"{name} is a text of 1 to 200 characters, got {value!r}")
    return value


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, True)
    if not isinstance(value, bool):
        raise UsageError(f"{name} is true or false, got {value!r}")
    return value


def _marks(value: Any) -> tuple[Mark, ...]:
    made: list[Mark] = []
    for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [None]:
        if (not isinstance(item, Sequence) or len(item) != 3 or not all(type(n) is int for n in item[:2])
                or not 0 <= item[0] < item[1] or not isinstance(item[2], str) or not 0 < len(item[2]) <= 200):
            raise UsageError(f"spans is a list of [start, end, share] with 0 <= start < end, got {value!r}")
        if made and item[0] < made[-1].span.end:
            raise UsageError(f"spans overlap or are out of order at {item!r}")
        made.append(Mark(Span(item[0], item[1]), item[2]))
    return tuple(made)
