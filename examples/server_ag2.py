"""The same team as AG2 agents that answer in turn. No line of it knows of KVBaton.

    kvbaton serve smollm2 --reuse all
    pip install "ag2[openai]>=1.2" && python examples/server_ag2.py
"""

from __future__ import annotations

import asyncio
import os

from ag2 import Agent
from ag2.config import OpenAIConfig
from server_openai_sdk import QUESTION, ROLES


async def main() -> None:
    config = OpenAIConfig(model=os.environ.get("KVBATON_MODEL", "smollm2"), api_key="none", temperature=0.0,
                          base_url=os.environ.get("KVBATON_URL", "http://127.0.0.1:8000/v1"), max_tokens=96)
    said: dict[str, str] = {}
    for name, role in ROLES.items():
        parts = [QUESTION, *(f"{writer} wrote:\n{text}" for writer, text in said.items())]
        reply = await Agent(name, prompt=role, config=config).ask("\n\n".join(parts))
        said[name] = str(reply.body)
        print(f"[{name}]\n{said[name]}\n")


if __name__ == "__main__":
    asyncio.run(main())
