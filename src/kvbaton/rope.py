"""Rope: rotates stored keys to where they are used, with the model's own frequencies.

    stored (unrotated) k  --rotate at the target position-->  key as the model would have written it
    key in a model's cache --unrotate at its position-->      stored k

A key is rotated **once**, from its unrotated form. Two rotations in bfloat16 lose more than one, and 64 chained ones
lose 6 % of the key.

Attention scaling (YaRN): the model multiplies cos and sin by a factor, so its queries and its fresh keys both carry
it. `angles` carries the factor too: `rotate` multiplies a stored key by it exactly once, `unrotate` divides it out
exactly once. A moved key therefore gives the same attention logits as the model's own key.

Pairing is half-split: channel i turns with channel i + rot/2. Channels at and above ``rot`` (partial rotary) pass.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvbaton.errors import InvariantError, Unsupported

Angles: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin ``[T, rot/2]`` float32, both times the attention scaling."""

KINDS = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose frequencies depend on nothing but the model."""

_REASONS = {
    "dynamic": "dynamic NTK changes its frequencies with the prompt length: a stored key has no position-free form",
    "longrope": "longrope switches its frequencies at a prompt length: a stored key has no position-free form",
}


@dataclass(frozen=True, eq=False)
class Band:
    """Frequencies that a group of layers shares: ``inv_freq`` ``[rot/2]`` float32 and the attention scaling."""

    inv_freq: Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class Rope:
    """A model's rotation. ``layer_bands[l]`` is the index into ``bands`` of layer l."""

    bands: tuple[Band, ...]
    layer_bands: tuple[int, ...]
    head_dim: int
    _cache: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)
    pairing: ClassVar[str] = "half-split"

    def __post_init__(self) -> None:
        for band in self.bands:
            if band.inv_freq.ndim != 1 or 2 * band.inv_freq.numel() > self.head_dim:
                raise InvariantError(f"inverse frequencies of shape {tuple(band.inv_freq.shape)} "
                                     f"do not fit head dim {self.head_dim}")

    @classmethod
    def from_module(cls, module: Any, config: Any, layers: int) -> Rope:
        """Read the rotation off a model's rotary module and config, and check it against the model's own code.

        Raises Unsupported with the reason where stored keys could not be moved right.
        """
        _refuse(module, config)
        kinds = getattr(module, "rope_type", "default")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            types: list[str | None] = [None]
            layer_bands = (0,) * layers
        else:
            names = list(getattr(config, "layer_types", None) or ())[:layers]
            types = [*sorted(set(names))]
            if len(names) < layers or any(not hasattr(module, f"{name}_inv_freq") for name in types):
                raise Unsupported(f"{type(module).__name__} has neither inv_freq nor one <layer type>_inv_freq a layer")
            layer_bands = tuple(types.index(name) for name in names)
        bands = []
        for name in types:
            prefix = f"{name}_" if name else ""
            _refuse_kind(kinds[name] if isinstance(kinds, dict) else kinds)
            frequencies = getattr(module, f"{prefix}inv_freq").detach().to(torch.float32).clone()
            bands.append(Band(frequencies, float(getattr(module, f"{prefix}attention_scaling", 1.0))))
        rope = cls(tuple(bands), layer_bands, int(head_dim))
        for band, name in zip(bands, types, strict=True):
            _compare(band, module, name)
        return rope

    def rotary_dim(self, layer: int = 0) -> int:
        """Channels that turn in that layer; the others pass."""
        return 2 * self.bands[self.layer_bands[layer]].inv_freq.numel()

    def angles(self, positions: Tensor, layer: int) -> Angles:
        """cos and sin ``[T, rot/2]`` of ``positions`` ``[T]`` int64, computed once a layer type for a positions tensor.

        Kept as long as that very tensor lives: hold one tensor for a whole pass, and do not write to it.
        """
        index = self.layer_bands[layer]
        if positions not in self._cache:
            self._cache[positions] = {}
        held: dict[int, Angles] = self._cache[positions]
        if index not in held:
            held[index] = _angles(self.bands[index], positions)
        return held[index]

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` ``[..., T, D]`` turned by ``cos``, ``sin`` ``[T, rot/2]``: float32 inside, ``x.dtype`` outside."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        Rope.rotate_into(out, x, cos, sin)
        return out

    def turn(self, x: Tensor, positions: int, layer: int) -> Tensor:
        """``x`` ``[..., T, D]``, all keys turned by the same number of positions; their scaling stays as it is."""
        band = self.bands[self.layer_bands[layer]]
        cos, sin = _angles(band, torch.tensor([positions], device=x.device))
        return self.rotate(x, cos / band.scaling, sin / band.scaling)

    @staticmethod
    def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """`rotate` into ``out`` of the shape of ``x``, strided or not. ``out`` and ``x`` share no memory."""
        half = cos.shape[-1]
        x1, x2 = x[..., :half], x[..., half:2 * half]
        if x.dtype == out.dtype == torch.float32:
            torch.mul(x1, cos, out=out[..., :half]).addcmul_(x2, sin, value=-1)
            torch.mul(x2, cos, out=out[..., half:2 * half]).addcmul_(x1, sin)
        else:
            x1, x2 = x1.float(), x2.float()
            turned = torch.mul(x1, cos).addcmul_(x2, sin, value=-1)
            out[..., :half].copy_(turned)
            torch.mul(x2, cos, out=turned).addcmul_(x1, sin)
            out[..., half:2 * half].copy_(turned)
        if 2 * half < x.shape[-1]:
            out[..., 2 * half:].copy_(x[..., 2 * half:])

    @staticmethod
    def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The inverse of `rotate`, attention scaling divided out."""
        squared = cos * cos + sin * sin
        return Rope.rotate(x, cos / squared, -sin / squared)

    def fingerprint(self) -> str:
        """Equal for two models if, and only if, stored keys mean the same to both."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.pairing, self.head_dim, self.layer_bands)).encode())
        for band in self.bands:
            digest.update(band.inv_freq.cpu().numpy().tobytes() + repr(band.scaling).encode())
        return digest.hexdigest()


def _angles(band: Band, positions: Tensor) -> Angles:
    turns = positions[:, None].float() * band.inv_freq.to(positions.device)
    return turns.cos() * band.scaling, turns.sin() * band.scaling


def _refuse(module: Any, config: Any) -> None:
    """Raise Unsupported for position schemes that the config names."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    if any("mrope_section" in p for p in nested):
        raise Unsupported("M-RoPE (mrope_section): keys turn with three position streams, moving them is not supported")
    if getattr(config, "kv_lora_rank", None) or getattr(config, "qk_rope_head_dim", None):
        raise Unsupported("MLA (kv_lora_rank): the cache holds latents, not keys; moving them is not supported")
    if getattr(config, "alibi", False):
        raise Unsupported("ALiBi: the model has no rotary keys to move")
    if module is None:
        raise Unsupported("the model has no rotary module (absolute positions or ALiBi?): its keys cannot be moved")
    if getattr(config, "rope_interleave", False) or getattr(config, "rope_interleaved", False):
        raise Unsupported("interleaved RoPE pairing: only half-split pairing is supported")
    if not all(getattr(config, "no_rope_layers", None) or (1,)):
        raise Unsupported("layers without RoPE (no_rope_layers): mixed position schemes are not supported")


def _refuse_kind(kind: str) -> None:
    if kind not in KINDS:
        reason = _REASONS.get(kind, f"supported kinds: {', '.join(KINDS)}")
        raise Unsupported(f"RoPE kind {kind!r}: {reason}")


def _compare(band: Band, module: Any, layer_type: str | None) -> None:
    """Turn a random key with our code and with the function the model's own attention calls; refuse if they differ."""
    apply = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    where = f"{type(module).__module__}.{type(module).__qualname__}"
    if apply is None:
        raise Unsupported(f"no apply_rotary_pos_emb beside {where}: cannot tell how the model pairs channels")
    device, half = band.inv_freq.device, band.inv_freq.numel()
    positions = torch.tensor([0, 1, 7, 130], device=device)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 2, len(positions), 2 * half, generator=generator).to(device)
    cos, sin = module(key, positions[None], layer_type) if layer_type else module(key, positions[None])
    theirs = apply(key, key, cos, sin)[1]
    if _close(Rope.rotate(key, *_angles(band, positions)), theirs):
        return
    if _close(_interleaved(Rope.rotate, key, *_angles(band, positions)), theirs):
        raise Unsupported(f"interleaved RoPE pairing in {where}: only half-split pairing is supported")
    raise Unsupported(f"{where} turns keys in a way this path does not reproduce")


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs.float(), rtol=1e-4, atol=1e-4)


def _interleaved(rotate: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` with channel 2i paired with 2i + 1, to name that case in a refusal."""
    split = rotate(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin)
    return torch.stack(split.chunk(2, -1), -1).flatten(-2)
