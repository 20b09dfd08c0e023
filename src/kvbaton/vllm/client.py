"""openai_client: a team's engine that is a server. Prompts go as ids with shared spans marked, answers come as ids.

    Team(agents, engine=openai_client("http://127.0.0.1:8000/v1", "smollm2"), method="hybrid")

A server without KVBaton answers too: it ignores the marks, and every hop is dense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbaton.engine.result import Decision, Entries, HopResult
from kvbaton.engine.sampling import Force, Generate, Greedy, Sampled
from kvbaton.engine.text import TextCodec
from kvbaton.errors import MissingExtra, Unsupported, UsageError
from kvbaton.memory import ModelIdentity
from kvbaton.prompt import Prompt, agent_of
from kvbaton.recipes import Recipe, names, recipe
from kvbaton.references import RunStore
from kvbaton.vllm.options import PARAMS_KEY

if TYPE_CHECKING:
    from openai import OpenAI

OnToken = Callable[[int], None]


def openai_client(base_url: str, model: str, *, tokenizer: str | None = None, group: str = "default",
                  api_key: str = "none", timeout_s: float = 600.0) -> RemoteEngine:
    """An engine behind an OpenAI-compatible server.

    ``tokenizer``: a packaged model's name, a folder or a hub id; default ``model``. ``group``: who may share KV with
    this client; a secret name keeps others out. Raises MissingExtra without the ``openai`` package.
    """
    try:
        from openai import OpenAI
    except ImportError:
        raise MissingExtra("the OpenAI SDK", "pip install 'kvbaton[serve]'") from None
    return RemoteEngine(OpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=0), model,
                        _codec(tokenizer or model), group)


@dataclass(frozen=True)
class RemoteEngine:
    """What a team needs to know about a server. `Team` opens its session."""

    client: OpenAI
    model: str
    text: TextCodec
    group: str

    @property
    def identity(self) -> ModelIdentity:
        return ModelIdentity(self.model, "remote", "remote")

    def open_session(self, method: Recipe) -> RemoteSession:
        """Raises Unsupported for a recipe that no name stands for: a server knows methods by name."""
        if method.name not in names() or recipe(method.name) != method:
            raise Unsupported(f"the recipe {method.name!r} was changed or is not registered: a server runs methods by "
                              "name. Start it with `kvbaton serve --method NAME --set part.field=value`")
        return RemoteSession(self, method)


@dataclass(frozen=True)
class RemoteSession:
    """Hops of one method on a server. What is learned stays there, with the group."""

    engine: RemoteEngine
    recipe: Recipe

    def start_run(self) -> RunStore:
        """The server keeps the text; nothing is held here."""
        return RunStore()

    def close(self) -> None:
        self.engine.client.close()

    def hop(self, prompt: Prompt, decode: Generate | Force, run: RunStore, writes: str | None = None,
            on_token: OnToken | None = None) -> HopResult:
        """One agent call over HTTP.

        Counts are in tokens, as for a model of one layer. Times are the server's, queueing included, the network not;
        tokens after the first are spaced evenly, a server reports their mean. Raises UsageError where the server
        cannot be reached or refuses the request.
        """
        if isinstance(decode, Force):
            raise Unsupported("a server gives no logits of a forced answer: use a local engine to measure divergence")
        answer = self._ask(prompt, decode, writes)
        choice = answer["choices"][0]
        ids = tuple(choice.get("token_ids") or ())
        stopped = choice["finish_reason"] == "stop"
        if stopped and ids and choice.get("stop_reason") in (None, ids[-1]):
            ids = ids[:-1]
        for token in ids if on_token is not None else ():
            assert on_token is not None
            on_token(token)
        return _result(prompt, answer, ids, stopped, self.engine.text.decode(ids))

    def _ask(self, prompt: Prompt, decode: Generate, writes: str | None) -> dict[str, Any]:
        from openai import APIConnectionError, APIStatusError

        spans = [[span.start, span.end, segment.share] for _, segment, span, _ in prompt.shared()]
        wish = {"group": self.engine.group, "method": self.recipe.name, "agent": prompt.role, "spans": spans,
                "output": writes or prompt.reader, "save": writes is not None or bool(spans)}
        extra = {"kv_transfer_params": {PARAMS_KEY: wish}, "return_token_ids": True, "add_special_tokens": False,
                 "stop_token_ids": sorted(decode.stop_ids), **_top_k(decode)}
        try:
            answer = self.engine.client.completions.create(
                model=self.engine.model, prompt=list(prompt.token_ids), max_tokens=decode.max_new_tokens,
                extra_body=extra, **_sampling(decode))
        except APIConnectionError as error:
            raise UsageError(f"no server at {self.engine.client.base_url}: {error}. Start one with "
                             f"`kvbaton serve {self.engine.model}`") from error
        except APIStatusError as error:
            raise UsageError(f"{self.engine.client.base_url} refused the request: {error}") from error
        raw: dict[str, Any] = answer.model_dump()
        refusal = ((raw.get("kv_transfer_params") or {}).get(PARAMS_KEY) or {}).get("error")
        if refusal:
            raise UsageError(f"the server ran the request exactly: {refusal}")
        return raw


def _result(prompt: Prompt, answer: dict[str, Any], ids: tuple[int, ...], stopped: bool, text: str) -> HopResult:
    said = (answer.get("kv_transfer_params") or {}).get(PARAMS_KEY) or {}
    segments = said.get("segments", [])
    usage = answer.get("usage") or {}
    cached = said.get("cached_tokens", (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    moved = {action: sum(s["loaded"] for s in segments if s["action"] == action) for action in ("reuse", "correct")}
    entries = Entries(reused=moved["reuse"], corrected=moved["correct"], cached=cached,
                      recomputed=len(prompt) - sum(moved.values()) - cached)
    decisions = tuple(Decision(s["share"], agent_of(s["source"]) if s["source"] else None, s["tokens"], s["action"],
                               s["reason"], s["predicted"]) for s in segments)
    taken = sum(s["tokens"] for s in segments if s["action"] != "recompute")
    return HopResult(
        reader=prompt.reader, prompt_tokens=len(prompt), layers=1,
        shared_tokens=sum(len(segment) for _, segment, _, _ in prompt.shared()), output_ids=ids, stopped=stopped,
        text=text, token_times_s=_times(answer, len(ids) + stopped), plan_s=0.0, decisions=decisions, entries=entries,
        extra_entries=0, rows_per_layer=(max(0, taken - sum(moved.values())),), moved_bytes=0, boundary_bytes=0,
        held_bytes=0, learned_bytes=0, learn_s=0.0, dense=bool(said.get("exact", True)))


def _times(answer: dict[str, Any], tokens: int) -> tuple[float, ...]:
    """Seconds since the server took the request, one a token. Raises UsageError if it reports no times."""
    metrics = answer.get("metrics") or {}
    if metrics.get("time_to_first_token_ms") is None:
        raise UsageError("the server reports no request times: start it with `kvbaton serve`, or with "
                         "--enable-per-request-metrics")
    first = (metrics.get("queue_time_ms") or 0.0) + metrics["time_to_first_token_ms"]
    gap = metrics.get("mean_itl_ms") or 0.0
    return tuple((first + i * gap) / 1000 for i in range(max(1, tokens)))


def _sampling(decode: Generate) -> dict[str, Any]:
    how = decode.sampler
    if isinstance(how, Greedy):
        return {"temperature": 0.0}
    if isinstance(how, Sampled):
        return {"temperature": how.temperature, "top_p": how.top_p, "seed": how.seed}
    raise Unsupported(f"a server cannot sample with {type(how).__name__}: use Greedy() or Sampled(...)")


def _top_k(decode: Generate) -> dict[str, Any]:
    how = decode.sampler
    return {"top_k": how.top_k} if isinstance(how, Sampled) and how.top_k is not None else {}


def _codec(name: str) -> TextCodec:
    from transformers import AutoTokenizer

    from kvbaton.engine.models import PACKAGED, dequantise

    packaged = PACKAGED.get(name)
    folder = name if packaged is None else packaged.cache if packaged.cached else packaged.folder(dequantise)
    try:
        return TextCodec(AutoTokenizer.from_pretrained(str(folder)))
    except (OSError, ValueError) as error:
        raise UsageError(f"no tokenizer for {name!r}: {error}. Give tokenizer= a folder or a hub id") from error
