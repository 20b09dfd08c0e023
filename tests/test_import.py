"""The package's front door: light to import, complete, and quick to refuse a wrong name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvbaton

HEAVY = ("torch", "transformers", "numpy", "pydantic", "yaml", "kvbaton.kv")


def modules_after(code: str) -> set[str]:
    """Modules a fresh interpreter has loaded after running ``code``."""
    script = f"{code}\nimport sys\nprint('\\nMODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_importing_the_package_loads_nothing_heavy():
    loaded = modules_after("import kvbaton")
    assert "kvbaton" in loaded
    assert not loaded & set(HEAVY)


def test_the_check_can_fail():
    assert "torch" in modules_after("from kvbaton import Recipe")


@pytest.mark.parametrize("name", kvbaton.__all__)
def test_every_public_name_resolves(name):
    assert getattr(kvbaton, name) is not None
    assert name in dir(kvbaton)


def test_every_lazy_name_is_public():
    assert set(kvbaton._HOME) | {"__version__"} == set(kvbaton.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Teem"):
        _ = kvbaton.Teem
