"""`kvbaton serve`: an OpenAI-compatible server whose requests reuse each other's KV."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvbaton.cli.app import Json, app, emit
from kvbaton.cli.options import Set


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A name from `kvbaton models`, a local folder or a Hugging Face id.")],
    method: Annotated[str, typer.Option(help="Method of requests that name none.")] = "hybrid",
    settings: Set = None,
    reuse: Annotated[str, typer.Option(help="asked: for requests that ask for it. all: for every request.")] = "asked",
    group: Annotated[str, typer.Option(help="Sharing group of requests that name none.")] = "default",
    store_gib: Annotated[float, typer.Option(help="KV of shared text kept for reuse.", min=0)] = 2.0,
    learned_gib: Annotated[float, typer.Option(help="Learned state kept, per group and method.", min=0)] = 2.0,
    state_dir: Annotated[Path | None, typer.Option(help="Folder that keeps what was learned between starts.")] = None,
    stock_scheduler: Annotated[bool, typer.Option(
        "--stock-scheduler", help="Keep vLLM's own scheduler: reuse then ends at the first gap in a prompt.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: vLLM's choice.")] = None,
    show: Annotated[bool, typer.Option(
        "--show", help="Print the command and stop; with --json also what it adds to the environment.")] = False,
    json: Json = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with KVBaton inside. Further options are handed to vLLM as they are."""
    from kvbaton.serve import Serve, is_cpu_build, run
    from kvbaton.vllm.options import ServerOptions

    options = ServerOptions(method=method, set=tuple(settings or ()), apply=reuse, group=group,
                            store_bytes=int(store_gib * 2**30), memory_bytes=int(learned_gib * 2**30),
                            state_dir=str(state_dir) if state_dir else None)
    wanted = Serve(model, options, host, port, dtype, not stock_scheduler, tuple(context.args))
    if not show:
        run(wanted)
    command = wanted.command(model, is_cpu_build())
    if json:
        emit({"command": command, "environment": wanted.environment({}, is_cpu_build())}, json, list)
    else:
        print(shlex.join(command))
