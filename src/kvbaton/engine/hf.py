"""HFEngine: the one packed pass over an unmodified Hugging Face decoder.

Each decoder layer is called as it is, with two things of ours in its arguments: rotary tables that do nothing, so that
queries and keys arrive unrotated, and a `PackedPass` in place of cache and mask. The pass writes fresh rows into the
spliced cache at their slots, rotates once, and attends with the exact mask. Families need no code of their own.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvbaton.correctors.base import LayerKV
from kvbaton.engine.attention import AttentionCall, QueryRows, attend, attention_mass
from kvbaton.engine.cache import SplicedCache
from kvbaton.engine.text import TextCodec
from kvbaton.errors import Unsupported
from kvbaton.kv import Geometry
from kvbaton.memory import ModelIdentity
from kvbaton.rope import Rope

_ATTENTION = "kvbaton"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Watch:
    """Sees a pass layer by layer. The default sees nothing and changes nothing."""

    def enter(self, layer: int, rows: QueryRows, hidden: Tensor) -> tuple[QueryRows, Tensor]:
        """Before a layer: the rows that go in and their hidden states ``[A, hidden]``."""
        return rows, hidden

    def leave(self, layer: int, view: PackedPass) -> None:
        """After a layer: fresh keys and values are in ``view``, valid until the next layer."""


class Pass(ABC):
    """What one pass hands to every layer, as its cache and as its mask."""

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """Positions ``[A]`` of the rows that are active."""

    @abstractmethod
    def enter(self, layer: int, hidden: Tensor) -> Tensor:
        """Before a layer: the hidden states ``[A, hidden]`` that go in, of those that came out of the one before."""

    @abstractmethod
    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> LayerKV:
        """transformers' cache call: take unrotated fresh rows ``[1, H, A, D]``, give back the layer's whole cache."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Unrotated queries ``[1, Hq, A, D]`` over what `update` gave; ``[1, A, Hq, D]``, as transformers wants it."""

    def leave(self, layer: int) -> None:  # noqa: B027  a pass need not look back
        """After a layer."""


@dataclass
class PackedPass(Pass):
    """Rows of one hop over its cache. Owned by `HFEngine.forward`."""

    rope: Rope
    cache: SplicedCache
    rows: QueryRows
    watch: Watch
    layer: int = 0
    fresh: LayerKV | None = None
    _query: Tensor | None = None
    _call: AttentionCall | None = None

    @property
    def positions(self) -> Tensor:
        return self.rows.positions

    def enter(self, layer: int, hidden: Tensor) -> Tensor:
        self.rows, hidden = self.watch.enter(layer, self.rows, hidden)
        return hidden

    def leave(self, layer: int) -> None:
        self.watch.leave(layer, self)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> LayerKV:
        self.layer, self.fresh = layer_idx, (key[0], value[0])
        k, v = self.cache.k[layer_idx], self.cache.v[layer_idx]
        cos, sin = self.rope.angles(self.rows.positions, layer_idx)
        if self.rows.contiguous:
            at = slice(self.rows.first, self.rows.last + 1)
            self.rope.rotate_into(k[:, at], key[0], cos, sin)
            v[:, at] = value[0]
        else:
            k.index_copy_(1, self.rows.positions, self.rope.rotate(key[0], cos, sin))
            v.index_copy_(1, self.rows.positions, value[0])
        return k[None], v[None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        self._query = self.rope.rotate(query[0], *self.rope.angles(self.rows.positions, self.layer))
        self._call = call
        return attend(self._query, key[0], value[0], self.rows, call).transpose(0, 1)[None]

    def attention(self, queries: int) -> Tensor:
        """Attention mass of the last ``queries`` rows on every slot in this layer, ``[slots]`` float32."""
        assert self._query is not None, "attention() is asked after the layer ran"
        assert self._call is not None
        return attention_mass(self._query, self.cache.k[self.layer], self.rows, self._call, queries)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
               scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
               **kwargs: Any) -> tuple[Tensor, None]:
    """Our entry in transformers' attention registry; calls that are not ours go on to its own SDPA."""
    if not isinstance(attention_mask, Pass):
        if softcap is not None:
            raise Unsupported("soft-capped attention outside KVBaton: call model.set_attn_implementation('eager')")
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling,
                                                          **kwargs)
        return out
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise Unsupported(f"attention with {name} ({type(module).__name__}) is not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attention_mask.attend(query, key, value, AttentionCall(scale, sliding_window, softcap)), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


class HFEngine:
    """A Hugging Face decoder and its tokenizer, ready for packed passes.

    The model's attention is switched to ours for good; its own ``generate`` still works. Raises Unsupported where the
    packed pass does not reproduce the model's own logits.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        base = getattr(model, "model", None)
        if base is None or not all(hasattr(base, part) for part in ("layers", "norm", "rotary_emb")):
            raise Unsupported(f"{type(model).__name__} has no model.layers, model.norm and model.rotary_emb")
        config = model.config.get_text_config()
        dtype = model.get_input_embeddings().weight.dtype
        if dtype not in _DTYPES:
            raise Unsupported(f"{type(model).__name__} is in {str(dtype).removeprefix('torch.')}: KV is moved and "
                              "corrected in float32, bfloat16 or float16 only")
        self.model = model.eval()
        self.layers = list(base.layers)
        self._embed, self._norm, self._head = model.get_input_embeddings(), base.norm, model.get_output_embeddings()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.device = self._embed.weight.device
        self.rope = Rope.from_module(base.rotary_emb, config, len(self.layers))
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.geometry = Geometry(len(self.layers), kv_heads, self.rope.head_dim, self._embed.weight.dtype)
        self.context_tokens = int(config.max_position_embeddings)
        self.text = None if tokenizer is None else TextCodec(tokenizer)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.identity = ModelIdentity(name or getattr(config, "name_or_path", "") or config.model_type,
                                      _fingerprint(model), self.rope.fingerprint())
        rotary = self.rope.rotary_dim()
        self._no_rotation = (torch.ones(1, 1, rotary, dtype=self.geometry.dtype, device=self.device),
                             torch.zeros(1, 1, rotary, dtype=self.geometry.dtype, device=self.device))
        self._adopt()

    def new_cache(self, capacity: int) -> SplicedCache:
        return SplicedCache(self.geometry, capacity, self.device)

    @torch.no_grad()
    def forward(self, cache: SplicedCache, token_ids: Tensor, rows: QueryRows,
                watch: Watch) -> tuple[QueryRows, Tensor]:
        """Run the rows (``token_ids`` ``[A]`` at ``rows.positions``) through every layer over ``cache``.

        Returns the rows still active at the end and their hidden states ``[A', hidden]`` before the final norm.
        """
        view = PackedPass(self.rope, cache, rows, watch)
        hidden = self.run(view, token_ids)
        return view.rows, hidden

    @torch.no_grad()
    def run(self, view: Pass, token_ids: Tensor) -> Tensor:
        """Run the rows of ``view`` (``token_ids`` ``[A]``) through every layer; the last hidden states."""
        hidden: Tensor = self._embed(token_ids[None])[0]
        for index, layer in enumerate(self.layers):
            hidden = view.enter(index, hidden)
            out = layer(hidden[None], attention_mask=view, cache=view, use_cache=True,
                        position_ids=view.positions[None], position_embeddings=self._no_rotation)
            hidden = (out[0] if isinstance(out, tuple) else out)[0]
            view.leave(index)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[A, vocab]`` float32 from the last hidden states ``[A, hidden]``."""
        logits: Tensor = self._head(self._norm(hidden)).float()
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def rows(self, start: int, end: int) -> QueryRows:
        """All rows of ``[start, end)``."""
        return QueryRows(torch.arange(start, end, device=self.device))

    def tensor(self, token_ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device)

    def _adopt(self) -> None:
        """Switch the model to our attention, after checking that the packed pass gives its own logits."""
        probe = torch.randint(0, self._embed.num_embeddings, (1, 12), generator=torch.Generator().manual_seed(0))
        ids = probe[0].to(self.device)
        with torch.no_grad():
            theirs = self.model(ids[None], use_cache=False).logits[0].float()
        self.model.set_attn_implementation(_ATTENTION)
        _, hidden = self.forward(self.new_cache(len(ids)), ids, self.rows(0, len(ids)), Watch())
        ours = self.logits(hidden)
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
        bound = {torch.float32: 1e-4, torch.float16: 0.05}.get(self.geometry.dtype, 0.1)
        if not error <= bound:
            raise Unsupported(f"{type(self.model).__name__}: the packed pass differs from the model's own logits "
                              f"(relative error {error:.2g}); this family is not supported")


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = own if isinstance(own, list) else [own]
    return frozenset(int(i) for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None)


def _fingerprint(model: Any) -> str:
    """Hash of the config's shape and the first numbers of every weight: tells models apart, reads little."""
    digest = hashlib.blake2b(digest_size=16)
    shape = {key: value for key, value in model.config.get_text_config().to_dict().items()
             if not key.startswith("_") and key not in ("transformers_version", "name_or_path", "dtype")}
    digest.update(json.dumps(shape, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().flatten()[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()
