"""Models by shape, with random weights: speed and memory can be measured where no weights are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kvbaton.engine.hf import HFEngine
from kvbaton.errors import UnknownName


def _llama(**shape: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rms_norm_eps": 1e-5, **shape}


def _qwen2(**shape: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", "rms_norm_eps": 1e-6, **shape}


SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": _llama(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
                   num_key_value_heads=2, vocab_size=512, max_position_embeddings=16384, tie_word_embeddings=True),
    "smollm2-135m": _llama(num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
                           num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192,
                           rope_parameters={"rope_type": "default", "rope_theta": 1e5}, tie_word_embeddings=True),
    "qwen2.5-0.5b": _qwen2(num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
                           num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768,
                           rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True),
    "llama-3.2-1b": _llama(num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                           num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
                           rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(num_hidden_layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
                         num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False),
    "llama-3.1-8b": _llama(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                           num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
                           rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=False),
}


def build(shape: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> HFEngine:
    """An engine of that shape with seeded random weights, made where they are used. Raises UnknownName.

    Weights are scaled by fan-in, so that activations stay finite through any depth.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape not in SHAPES:
        raise UnknownName("shape", shape, SHAPES)
    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.generation_config.eos_token_id = None
    return HFEngine(model.eval().requires_grad_(False), None, name=f"shape:{shape}")


def _fill(name: str, weight: nn.Parameter, generator: torch.Generator) -> None:
    if "norm" in name:
        weight.fill_(1.0)
    elif weight.ndim == 1:
        weight.zero_()
    else:
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
