"""The same team as a LangGraph graph. No line of it knows of KVBaton.

    kvbaton serve smollm2 --reuse all
    pip install langgraph langchain-openai && python examples/server_langgraph.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from server_openai_sdk import QUESTION, ROLES


class State(TypedDict, total=False):
    question: str
    solver: str
    critic: str
    judge: str


def node(model: ChatOpenAI, agent: str) -> Callable[[State], State]:
    """A node in which ``agent`` reads the question and all answers so far."""

    def answer(state: State) -> State:
        parts = [state["question"], *(f"{name} wrote:\n{state[name]}" for name in ROLES if name in state)]
        reply = model.invoke([("system", ROLES[agent]), ("user", "\n\n".join(parts))])
        usage = reply.usage_metadata or {}
        reused = usage.get("input_token_details", {}).get("cache_read", 0)
        print(f"[{agent}] {usage.get('input_tokens')} prompt tokens, {reused} of them not computed")
        return {agent: str(reply.content)}

    return answer


def main() -> None:
    model = ChatOpenAI(base_url=os.environ.get("KVBATON_URL", "http://127.0.0.1:8000/v1"), api_key="none",
                       model=os.environ.get("KVBATON_MODEL", "smollm2"), temperature=0.0, max_tokens=96)
    graph = StateGraph(State)
    names = list(ROLES)
    for agent in names:
        graph.add_node(f"ask_{agent}", node(model, agent))
    graph.add_edge(START, f"ask_{names[0]}")
    for before, after in itertools.pairwise(names):
        graph.add_edge(f"ask_{before}", f"ask_{after}")
    graph.add_edge(f"ask_{names[-1]}", END)
    print(graph.compile().invoke({"question": QUESTION})["judge"])


if __name__ == "__main__":
    main()
