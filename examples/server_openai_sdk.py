"""Three agents on a KVBaton server, with nothing but the OpenAI SDK: the client does not know that KV is shared.

    kvbaton serve smollm2 --reuse all            # in an environment with vLLM: make vllm-venv
    pip install openai && python examples/server_openai_sdk.py

The server finds the question and every answer in later prompts by content, moves their KV and corrects it. The
first run teaches it the edges between these agents; from the second run on little of a prompt is computed. A text
is found from 16 tokens on (`window` of the connector's options); an agent is known by its first 32 tokens, so role
prompts should differ early.
"""

from __future__ import annotations

import os

from openai import OpenAI

QUESTION = ("Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her "
            "friends every day with four. She sells the remainder at the farmers' market daily for $2 per fresh egg. "
            "How much in dollars does she make every day at the market?")
ROLES = {
    "solver": "Solver of word problems: you work out the answer of a question step by step, one short line a step, and "
              "finish with the result.",
    "critic": "Critic in a team of mathematicians: read a colleague's solution, check each step against the question, "
              "and name the first mistake, if there is one.",
    "judge": "As the judge you have the last word. Weigh the solution and the review, then state the final answer in "
             "one sentence.",
}


def main() -> None:
    client = OpenAI(base_url=os.environ.get("KVBATON_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    model = client.models.list().data[0].id
    said: dict[str, str] = {}
    for agent, role in ROLES.items():
        parts = [QUESTION, *(f"{name} wrote:\n{text}" for name, text in said.items())]
        answer = client.chat.completions.create(
            model=model, max_tokens=96, temperature=0.0,
            messages=[{"role": "system", "content": role}, {"role": "user", "content": "\n\n".join(parts)}])
        said[agent] = answer.choices[0].message.content or ""
        usage = answer.usage
        reused = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        print(f"[{agent}] {usage.prompt_tokens} prompt tokens, {reused} of them not computed")
        print(said[agent], end="\n\n")


if __name__ == "__main__":
    main()
