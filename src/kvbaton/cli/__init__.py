"""The command line: parses, delegates, prints. `main` is the console script."""

from __future__ import annotations

import sys

from kvbaton.cli import (  # noqa: F401  each registers its commands
    analyze,
    bench,
    bench_serving,
    compare,
    demo,
    evaluate,
    methods,
    models,
    profile,
    report,
    run,
    serve,
    store,
)
from kvbaton.cli.app import app
from kvbaton.errors import InvariantError, KVBatonError, UsageError

__all__ = ["app", "main"]

_STOPPED = "stopped by Ctrl-C"


def main() -> None:
    """Run the command line. Exit codes: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        app()
    except InvariantError:
        raise
    except KVBatonError as error:
        _stop(str(error), 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        _stop(_STOPPED, 130)
    except SystemExit as done:
        if done.code == 130:  # typer's own answer to Ctrl-C says nothing
            _stop(_STOPPED, 130)
        raise


def _stop(why: str, code: int) -> None:
    print(f"kvbaton: {why}", file=sys.stderr)
    sys.exit(code)
