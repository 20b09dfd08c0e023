"""Results files made up for tests, without any model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvbaton.bench.result import RunFile

IDENTITY = {"kind": "eval", "task": "gsm8k", "measure": "fidelity", "data": "toy", "data_sha256": "0", "model": "tiny",
            "fingerprint": "f", "dtype": "float32", "learn": 1, "seed": 0, "answer_tokens": 8}
CONDITIONS = {"command": "kvbaton eval <gsm8k>", "commit": "abc123", "dirty": True, "device": "cpu", "threads": 1,
              "libraries": {"torch": "2"}, "n": 12, "repeats": 1, "load": 0.1}
KL = {"dense": 0.0, "full-shared": 0.02, "kvcmas": 0.01}


def hop(agent: str, handed: int, kl: float, ttft_s: float, **more: Any) -> dict[str, Any]:
    return {"agent": agent, "handed": handed, "kl": kl, "agree": 1 - kl, "ttft_s": ttft_s, "tpot_s": 0.01,
            "dense": False, "reuse": 0.9, "learned_bytes": 2**20, "held_bytes": 2**21, **more}


def record(question: int, method: str, shift: float = 0.0) -> dict[str, Any]:
    noise = random.Random(f"{question}").random() * 0.005
    kl = KL[method] + (noise + shift if method != "dense" else 0)
    speed = {"dense": 1.0, "full-shared": 0.1, "kvcmas": 0.2}[method]
    return {"kind": "record", "question": str(question), "method": method, "repeat": 0, "gold_nll": 1 + kl,
            "floor_nll": 3.0 + noise, "hops": [hop("solver", 0, 0.0, 1.0), hop("judge", 2, kl, speed)],
            "score": float(question % 2), "choice": str(question % 2), "outcome": "right" if question % 2 else "wrong"}


def run(shift: float = 0.0, n: int = 12, path: str = "a.jsonl", **identity: Any) -> RunFile:
    records = tuple(record(q, m, shift) for q in range(n) for m in KL)
    return RunFile(Path(path), {**IDENTITY, **identity}, (CONDITIONS,), records)
