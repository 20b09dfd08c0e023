"""The scripts behind docs/results/vllm keep up with the code."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

from study_scripts import start_all


def test_every_study_script_starts() -> None:
    start_all("vllm")
