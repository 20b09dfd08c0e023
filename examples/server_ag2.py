"""The same team as AG2 agents that answer in turn. No line of it knows of KVBaton.

    kvbaton serve smollm2 --reuse all
    pip install "ag2[openai]" && python examples/server_ag2.py
"""

from __future__ import annotations

import os

from autogen import ConversableAgent
from server_openai_sdk import QUESTION, ROLES


def main() -> None:
    config = {"config_list": [{
        "model": os.environ.get("KVBATON_MODEL", "smollm2"), "api_key": "none", "price": [0, 0], "max_tokens": 96,
        "temperature": 0.0, "base_url": os.environ.get("KVBATON_URL", "http://127.0.0.1:8000/v1")}], "cache_seed": None}
    said: dict[str, str] = {}
    for name, role in ROLES.items():
        agent = ConversableAgent(name, system_message=role, llm_config=config, human_input_mode="NEVER")
        parts = [QUESTION, *(f"{writer} wrote:\n{text}" for writer, text in said.items())]
        reply = agent.generate_reply(messages=[{"role": "user", "content": "\n\n".join(parts)}])
        said[name] = reply if isinstance(reply, str) else str((reply or {}).get("content", ""))
        print(f"[{name}]\n{said[name]}\n")


if __name__ == "__main__":
    main()
