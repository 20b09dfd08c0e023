"""Rotation against transformers' own code, its algebra, and what it refuses."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.errors import Unsupported
from kvbaton.rope import Band, Rope

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES = {
    "llama": ("llama", "Llama", {}),
    "llama linear": ("llama", "Llama", {"rope_parameters": LINEAR}),
    "llama llama3": ("llama", "Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", "Llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2 yarn": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
    "mistral": ("mistral", "Mistral", {"sliding_window": 16}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 32}),
    "gemma3": ("gemma3", "Gemma3", {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi": ("phi", "Phi", {}),
    "stablelm": ("stablelm", "StableLm", {}),
}


def build(family: str) -> tuple[Any, Any, Any]:
    """``(modelling module, rotary module, config)`` of a tiny model."""
    name, prefix, changes = FAMILIES[family]
    modelling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    config_class = getattr(configuration, f"{prefix}TextConfig", None) or getattr(configuration, f"{prefix}Config")
    config = config_class(**{**SMALL, **changes})
    return modelling, getattr(modelling, f"{prefix}RotaryEmbedding")(config), config


def theirs(modelling: Any, module: Any, config: Any, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    """``x`` ``[H, T, D]`` as the model's own attention turns it (the rotary slice; the tail passes)."""
    kinds = (config.layer_types[layer],) if hasattr(module, "layer_types") else ()
    cos, sin = module(x[None], positions[None], *kinds)
    width = cos.shape[-1]
    turned = modelling.apply_rotary_pos_emb(x[None, ..., :width], x[None, ..., :width], cos, sin)[1][0]
    return torch.cat((turned, x[..., width:]), -1)


def tiny(head_dim: int = 16, rot: int = 16, scaling: float = 1.0, theta: float = 100.0) -> Rope:
    frequencies = theta ** (-torch.arange(0, rot, 2).float() / rot)
    return Rope((Band(frequencies, scaling),), (0, 0), head_dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_models_own_rotation(family: str) -> None:
    modelling, module, config = build(family)
    rope = Rope.from_module(module, config, 4)
    positions = torch.tensor([0, 1, 5, 99, 2047, 4096, 7000])
    x = torch.randn(2, len(positions), rope.head_dim)
    for layer in range(4):
        cos, sin = rope.angles(positions, layer)
        expected = theirs(modelling, module, config, layer, x, positions)
        torch.testing.assert_close(Rope.rotate(x, cos, sin), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(Rope.unrotate(expected, cos, sin), x, rtol=1e-5, atol=2e-5)


def test_partial_rotary_passes_the_tail() -> None:
    _, module, config = build("phi")
    rope = Rope.from_module(module, config, 4)
    assert rope.rotary_dim() == 8 < rope.head_dim == 16
    x = torch.randn(2, 3, 16)
    out = Rope.rotate(x, *rope.angles(torch.arange(3), 0))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.equal(out[..., :8], x[..., :8])


def test_gemma3_has_one_band_a_layer_type() -> None:
    _, module, config = build("gemma3")
    rope = Rope.from_module(module, config, 4)
    assert len(rope.bands) == 2
    assert rope.layer_bands[0] != rope.layer_bands[1]
    positions = torch.tensor([3, 4])
    assert not torch.equal(rope.angles(positions, 0)[0], rope.angles(positions, 1)[0])


def test_yarn_scaling_is_applied_once_so_logits_are_the_models_own() -> None:
    modelling, module, config = build("llama yarn")
    rope = Rope.from_module(module, config, 4)
    assert rope.bands[0].scaling > 1.1
    key, query = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    old, new, asked = torch.arange(5), torch.arange(4000, 4005), torch.arange(4100, 4105)
    written = theirs(modelling, module, config, 0, key, old)
    moved = Rope.rotate(Rope.unrotate(written, *rope.angles(old, 0)), *rope.angles(new, 0))
    turned_query = theirs(modelling, module, config, 0, query, asked)
    own = turned_query @ theirs(modelling, module, config, 0, key, new).mT
    torch.testing.assert_close(turned_query @ moved.mT, own, rtol=1e-4, atol=1e-4)


def test_llama3_shift_of_4096_uses_the_scaled_frequencies() -> None:
    modelling, module, config = build("llama llama3")
    rope = Rope.from_module(module, config, 4)
    key, old, new = torch.randn(2, 8, 16), torch.arange(8), torch.arange(4096, 4104)
    written, wanted = (theirs(modelling, module, config, 0, key, at) for at in (old, new))
    moved = Rope.rotate(Rope.unrotate(written, *rope.angles(old, 0)), *rope.angles(new, 0))
    assert ((moved - wanted).norm() / wanted.norm()).item() < 2e-5
    plain = Rope.from_module(build("llama")[1], build("llama")[2], 4)
    wrong = Rope.rotate(key, *plain.angles(new, 0))
    assert ((wrong - wanted).norm() / wanted.norm()).item() > 0.1


def test_64_uses_from_the_origin_stay_at_the_storage_floor() -> None:
    rope, key = tiny(64, 64, theta=10000.0), torch.randn(2, 32, 64)
    stored = key.bfloat16()
    floor = ((stored.float() - key).norm() / key.norm()).item()
    for hop in range(64):
        at = torch.arange(32) + 37 * hop
        used = Rope.rotate(stored, *rope.angles(at, 0))
        exact = Rope.rotate(key, *rope.angles(at, 0))
        assert ((used.float() - exact).norm() / exact.norm()).item() < 2 * floor


@settings(max_examples=40, deadline=None)
@given(a=st.integers(0, 3000), b=st.integers(0, 3000), seed=st.integers(0, 99), rot=st.sampled_from([4, 10, 16]))
def test_algebra(a: int, b: int, seed: int, rot: int) -> None:
    rope = tiny(rot=rot)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed))
    at = [rope.angles(torch.full((3,), p), 0) for p in (a, b, a + b)]
    once, twice = Rope.rotate(x, *at[2]), Rope.rotate(Rope.rotate(x, *at[0]), *at[1])
    torch.testing.assert_close(twice, once, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(once.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(Rope.unrotate(once, *at[2]), x, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(scaling=st.floats(0.5, 2.0), position=st.integers(0, 5000))
def test_unrotate_divides_the_scaling_out(scaling: float, position: int) -> None:
    rope, x = tiny(scaling=scaling), torch.randn(1, 1, 16)
    angles = rope.angles(torch.tensor([position]), 0)
    turned = Rope.rotate(x, *angles)
    torch.testing.assert_close(turned.norm(), x.norm() * scaling)
    torch.testing.assert_close(Rope.unrotate(turned, *angles), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotate_into_a_strided_destination(dtype: torch.dtype) -> None:
    rope = tiny(rot=12, scaling=1.2)
    x, angles = torch.randn(2, 5, 16).to(dtype), rope.angles(torch.arange(5), 0)
    cache = torch.full((5, 4, 20), 7.0, dtype=dtype)
    Rope.rotate_into(cache[:, 1:3, 2:18].transpose(0, 1), x, *angles)
    half = angles[0].shape[-1]
    x1, x2, tail = x[..., :half].float(), x[..., half:2 * half].float(), x[..., 2 * half:].float()
    plain = torch.cat((x1 * angles[0] - x2 * angles[1], x2 * angles[0] + x1 * angles[1], tail), -1).to(dtype)
    torch.testing.assert_close(cache[:, 1:3, 2:18].transpose(0, 1), plain)
    assert torch.equal(Rope.rotate(x, *angles), cache[:, 1:3, 2:18].transpose(0, 1))
    assert (cache[:, 0] == 7).all()
    assert (cache[..., 18:] == 7).all()


def test_angles_are_computed_once_for_a_positions_tensor() -> None:
    rope, positions = tiny(), torch.arange(4)
    assert rope.angles(positions, 0)[0] is rope.angles(positions, 1)[0]
    assert rope.angles(positions.clone(), 0)[0] is not rope.angles(positions, 0)[0]
    del positions
    assert len(rope._cache) == 0


def test_fingerprint_tells_ropes_apart() -> None:
    prints = [Rope.from_module(*build(family)[1:], 4).fingerprint() for family in FAMILIES if family[:5] == "llama"]
    assert len(set(prints)) == 4
    assert tiny().fingerprint() == tiny().fingerprint() != tiny(scaling=1.5).fingerprint()


@pytest.mark.parametrize(("rope_parameters", "named"), [
    ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "dynamic NTK"),
    ({"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0] * 8,
      "long_factor": [2.0] * 8, "original_max_position_embeddings": 1024}, "longrope"),
])
def test_refuses_kinds_that_follow_the_prompt_length(rope_parameters: dict[str, Any], named: str) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**SMALL, rope_parameters=rope_parameters)
    with pytest.raises(Unsupported, match=named):
        Rope.from_module(LlamaRotaryEmbedding(config), config, 4)


@pytest.mark.parametrize(("change", "named"), [
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "M-RoPE"),
    ({"kv_lora_rank": 512}, "MLA"),
    ({"qk_rope_head_dim": 64}, "MLA"),
    ({"alibi": True}, "ALiBi"),
    ({"rope_interleave": True}, "interleaved"),
    ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
])
def test_refuses_by_name(change: dict[str, Any], named: str) -> None:
    _, module, config = build("llama")
    for key, value in change.items():
        object.__setattr__(config, key, value)
    with pytest.raises(Unsupported, match=named):
        Rope.from_module(module, config, 4)


def test_refuses_a_model_without_rotary() -> None:
    with pytest.raises(Unsupported, match="no rotary module"):
        Rope.from_module(None, build("llama")[2], 4)


def test_refuses_interleaved_pairing_from_the_models_own_code() -> None:
    from transformers.models.cohere.configuration_cohere import CohereConfig
    from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding

    config = CohereConfig(**SMALL)
    with pytest.raises(Unsupported, match="interleaved"):
        Rope.from_module(CohereRotaryEmbedding(config), config, 4)


def test_refuses_what_it_cannot_check() -> None:
    module = torch.nn.Module()
    module.inv_freq = torch.ones(8)
    with pytest.raises(Unsupported, match="apply_rotary_pos_emb"):
        Rope.from_module(module, build("llama")[2], 4)
