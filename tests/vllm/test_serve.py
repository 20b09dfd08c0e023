"""`kvbaton serve`: the command line and environment it makes."""

from __future__ import annotations

import json
import sys

import pytest

from kvbaton.errors import UnknownName, Unsupported, UsageError
from kvbaton.serve import MODULE, Serve
from kvbaton.vllm.options import ServerOptions


def config_of(argv: list[str]) -> dict:
    return json.loads(argv[argv.index("--kv-transfer-config") + 1])


def test_the_command_starts_vllms_server_as_a_module() -> None:
    options = ServerOptions(method="full-shared", set=("lead_rows=2",), apply="all")
    argv = Serve("m", options, port=9, extra=("--max-model-len", "4096")).command("/folder", cpu=True)
    assert argv[:5] == [sys.executable, "-m", MODULE, "--model", "/folder"]
    config = config_of(argv)
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("KVBaton", "recompute")
    assert ServerOptions.parse(config["kv_connector_extra_config"]) == options
    assert argv[argv.index("--block-size") + 1] == "32"
    assert argv[-2:] == ["--max-model-len", "4096"]
    assert "kvbaton.vllm.jumping.GapJumpScheduler" in argv


def test_a_gpu_build_keeps_its_block_size_and_the_stock_scheduler_its_runner() -> None:
    serve = Serve("m", gap_jump=False)
    argv = serve.command("m", cpu=False)
    assert "--block-size" not in argv
    assert "--scheduler-cls" not in argv
    assert "VLLM_USE_V2_MODEL_RUNNER" not in serve.environment({}, cpu=False)


def test_the_environment_of_the_user_wins() -> None:
    environment = Serve("m").environment({"VLLM_CPU_KVCACHE_SPACE": "9", "HOME": "/x"}, cpu=True)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["HOME"] == "/x"


def test_kernel_caches_are_bounded_on_a_cpu_and_only_there() -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        assert int(Serve("m").environment({}, cpu=True)[name]) <= 64
        assert Serve("m").environment({name: "7"}, cpu=True)[name] == "7"
        assert name not in Serve("m").environment({}, cpu=False)


def test_flags_that_kvbaton_sets_are_not_taken_twice() -> None:
    with pytest.raises(UsageError, match="--scheduler-cls is set by kvbaton"):
        Serve("m", extra=("--scheduler-cls=mine",))


def test_methods_that_vllm_cannot_run_are_refused_before_anything_starts() -> None:
    with pytest.raises(Unsupported, match="cannot run inside vLLM"):
        Serve("m", ServerOptions(method="cacheblend"))
    with pytest.raises(UnknownName):
        Serve("m", ServerOptions(method="hybird"))
