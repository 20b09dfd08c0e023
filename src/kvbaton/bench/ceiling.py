"""The ceiling beside every speed: what this machine's own bandwidth and arithmetic would allow.

    bytes of a hop   weights read once + reused KV read and written once + the whole KV read by attention
    FLOPs of a hop   2 x weights x computed rows + attention of those rows over all keys
    ceiling          the larger of bytes / bandwidth and FLOPs / FLOP rate, both measured here
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvbaton.engine.hf import HFEngine


@dataclass(frozen=True)
class Machine:
    """Measured rates of one device: bytes copied (read and written) and multiply-add FLOPs a second."""

    bytes_per_s: float
    flops_per_s: float


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best(call: Callable[[], object], device: torch.device, tries: int) -> float:
    best = float("inf")
    for _ in range(tries):
        synchronise(device)
        begin = time.perf_counter()
        call()
        synchronise(device)
        best = min(best, time.perf_counter() - begin)
    return best


def measure_machine(device: torch.device, dtype: torch.dtype, tries: int = 5) -> Machine:
    """Best of ``tries`` of a large copy and of a square matrix product in ``dtype``."""
    cuda = device.type == "cuda"
    source = torch.ones((1 << 30) if cuda else (1 << 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source), device, tries)
    side = 8192 if cuda else 1024
    a = torch.randn(side, side, device=device).to(dtype)
    product_s = _best(lambda: a @ a, device, tries)
    return Machine(2 * source.nbytes / copy_s, 2 * side**3 / product_s)


@dataclass(frozen=True)
class Work:
    """What a prefill cannot avoid."""

    bytes: float
    flops: float

    def ceiling_s(self, machine: Machine) -> float:
        return max(self.bytes / machine.bytes_per_s, self.flops / machine.flops_per_s)

    def bandwidth_utilisation(self, machine: Machine, seconds: float) -> float:
        """MBU: share of the measured bandwidth that ``seconds`` for this work amounts to."""
        return self.bytes / (seconds * machine.bytes_per_s)

    def flop_utilisation(self, machine: Machine, seconds: float) -> float:
        """MFU: share of the measured FLOP rate."""
        return self.flops / (seconds * machine.flops_per_s)


def prefill_work(engine: HFEngine, prompt_tokens: int, computed_tokens: float, moved_bytes: int) -> Work:
    """Work of a prefill that computes ``computed_tokens`` rows (mean over layers) of a prompt, moving ``moved_bytes``.

    The rows are taken to stand at the prompt's end, where they see the most keys, except in a dense prefill.
    """
    config = engine.model.config.get_text_config()
    weights = sum(p.numel() for layer in engine.layers for p in layer.parameters())
    head = config.vocab_size * config.hidden_size
    itemsize = engine.geometry.dtype.itemsize
    width = config.num_attention_heads * engine.geometry.head_dim
    keys = prompt_tokens - computed_tokens / 2
    flops = 2 * weights * computed_tokens + 2 * head + 4 * engine.geometry.layers * width * computed_tokens * keys
    return Work((weights + head) * itemsize + 2 * moved_bytes + engine.geometry.nbytes(prompt_tokens), flops)
