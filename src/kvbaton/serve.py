"""`kvbaton serve`: vLLM's OpenAI-compatible server, started with the flags that KVBaton needs on the build at hand.

The server is vLLM's own, run as a module: the ``vllm`` command of the CPU build looks for a distribution named
"vllm", does not find it, and crashes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvbaton.errors import UsageError
from kvbaton.vllm import CONNECTOR, SCHEDULER, check_version
from kvbaton.vllm.options import ServerOptions

MODULE = "vllm.entrypoints.openai.api_server"
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""A KV cache of 2 GiB, and bounded kernel caches: oneDNN compiles a matrix product anew for every number of rows and
keeps 1,024 of them, 0.3 MiB each, once in vLLM's own copy and once in PyTorch's, which keeps them a second time. Row
counts in serving hardly ever come back, except the few of decoding (docs/results/vllm/README.md)."""


@dataclass(frozen=True)
class Serve:
    """What to serve. ``options``: the connector's; ``gap_jump`` False: vLLM's own scheduler; ``extra``: vLLM flags."""

    model: str
    options: ServerOptions = field(default_factory=ServerOptions)
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    gap_jump: bool = True
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        taken = ("--model", "--kv-transfer-config", "--scheduler-cls", "--host", "--port", "--dtype")
        for flag in self.extra:
            if flag.split("=")[0] in taken:
                raise UsageError(f"{flag.split('=')[0]} is set by kvbaton serve itself: use its own options")

    def command(self, folder: str, cpu: bool) -> list[str]:
        """The command line. ``folder``: where the model lies, or its hub id; ``cpu``: vLLM's CPU build."""
        argv = [sys.executable, "-m", MODULE, "--model", folder, "--served-model-name", self.model,
                "--host", self.host, "--port", str(self.port),
                "--kv-transfer-config", json.dumps(self.transfer_config()),
                "--enable-prompt-tokens-details", "--enable-per-request-metrics"]
        if self.dtype is not None:
            argv += ["--dtype", self.dtype]
        if self.gap_jump:
            argv += ["--scheduler-cls", SCHEDULER, "--no-async-scheduling"]
        if cpu and not any(flag.startswith("--block-size") for flag in self.extra):
            argv += ["--block-size", "32"]
        return [*argv, *self.extra]

    def transfer_config(self) -> dict[str, Any]:
        """The value of ``--kv-transfer-config``, with the options that differ from the defaults."""
        default = ServerOptions()
        given = {name: value for name, value in vars(self.options).items() if value != getattr(default, name)}
        return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": given}

    def environment(self, environ: Mapping[str, str], cpu: bool) -> dict[str, str]:
        """``environ`` with what is missing: the V1 model runner, and `CPU_ENVIRONMENT` on a CPU."""
        wanted = {"VLLM_NO_USAGE_STATS": "1"}
        if self.gap_jump:
            wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return {**wanted, **(CPU_ENVIRONMENT if cpu else {}), **environ}


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build, a distribution of its own."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def folder_of(model: str) -> str:
    """Where a packaged model lies, converted first if need be; any other name is vLLM's to find.

    A conversion that exists is used as it is: vLLM's environment needs neither the package nor the converter.
    """
    from kvbaton.engine.models import PACKAGED, dequantise

    packaged = PACKAGED.get(model)
    if packaged is None:
        return model
    return str(packaged.cache if packaged.cached else packaged.folder(dequantise))


def run(serve: Serve) -> None:
    """Become the server: this process is replaced. Raises MissingExtra or Unsupported without a fitting vLLM."""
    check_version()
    cpu = is_cpu_build()
    argv = serve.command(folder_of(serve.model), cpu)
    sys.stdout.flush()
    os.execve(argv[0], argv, serve.environment(os.environ, cpu))
