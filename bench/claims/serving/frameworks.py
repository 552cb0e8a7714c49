"""Agents of three frameworks against a server: two tools, three turns, and no `tool_choice`; every turn must end.

    mirrorsd serve storyteller.mirror &
    pip install langchain langchain-openai "pydantic-ai-slim[openai]" openai-agents
    python bench/claims/serving/frameworks.py http://127.0.0.1:8600/v1 --output agents.json

It needs nothing of mirrorsd, so that the frameworks may have an environment of their own.

An agent asks the model, runs the tools that it calls, shows it their results and asks again, until it answers in words.
What a small model answers is its own affair: counted is whether each turn ends with an answer, and what its tools were
asked. An agent that asks for ever is stopped after so many requests as `--requests` says, and has not answered.
"""

import argparse
import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

_TURN_S = 600.0
INSTRUCTIONS = "Answer in one short sentence."
"""A small model repeats itself without an end where it is free to; and an answer that meets its bound is no answer."""
TURNS = ("What is the weather in Oslo?", "And what time is it in Rome?", "Thank you. Which town did I ask about first?")
Ask = Callable[[str], Awaitable[str]]


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a running server, /v1 included")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens per request")
    parser.add_argument("--requests", type=int, default=8, help="most requests for one turn")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(conversations(options))
    versions = {name: version(name) for name in ("langchain", "langchain-openai", "pydantic-ai-slim", "openai-agents")}
    report = {"model": model_of(options.url), "versions": versions, "turns": TURNS, "rows": rows}
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    raise SystemExit(not all(row["has_ended"] for row in rows))


async def conversations(options: Any) -> list[dict[str, Any]]:
    """What became of every turn with every agent; in one loop, since clients keep their connections."""
    rows = []
    for name, agent in AGENTS.items():
        called: list[str] = []
        for row in await converse(name, agent(options.url, options, tools(called)), called):
            rows.append(row)
            print(*row.values(), sep=" | ")
    return rows


def model_of(url: str) -> str:
    """The server's first model."""
    with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


async def converse(name: str, ask: Ask, called: list[str]) -> list[dict[str, Any]]:
    """What became of every turn."""
    rows = []
    for turn, question in enumerate(TURNS):
        called.clear()
        started = perf_counter()
        try:
            answer, error = await asyncio.wait_for(ask(question), _TURN_S), ""
        except Exception as fault:  # whatever a framework says when it gives up
            answer, error = "", f"{type(fault).__name__}: {fault}"[:300]
        seconds = round(perf_counter() - started, 1)
        row = {"agent": name, "turn": turn, "has_ended": not error, "seconds": seconds, "calls": " ".join(called)}
        rows.append(row | {"answer": answer[:200], "error": error})
    return rows


def tools(called: list[str]) -> list[Callable[..., str]]:
    """Two tools that note their calls."""

    def weather(city: str) -> str:
        """Tell the weather in a city."""
        called.append(f"weather({city})")
        return f"It rains in {city}, 7 degrees."

    def local_time(city: str) -> str:
        """Tell the time in a city."""
        called.append(f"local_time({city})")
        return f"It is 12:30 in {city}."

    return [weather, local_time]


def langchain(url: str, options: Any, functions: list[Callable[..., str]]) -> Ask:
    """LangChain's agent."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model=model_of(url), max_tokens=options.tokens, max_retries=0)
    agent = create_agent(model, functions, system_prompt=INSTRUCTIONS)
    history: list[Any] = []

    async def ask(question: str) -> str:
        history.append({"role": "user", "content": question})
        config = {"recursion_limit": 2 * options.requests + 1}
        history[:] = (await agent.ainvoke({"messages": list(history)}, config))["messages"]
        return str(history[-1].content)

    return ask


def pydantic_ai(url: str, options: Any, functions: list[Callable[..., str]]) -> Ask:
    """Pydantic's agent."""
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(model_of(url), provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, tools=functions, instructions=INSTRUCTIONS, model_settings={"max_tokens": options.tokens})
    history: list[Any] = []

    async def ask(question: str) -> str:
        limits = UsageLimits(request_limit=options.requests)
        found = await agent.run(question, message_history=list(history), usage_limits=limits)
        history[:] = found.all_messages()
        return str(found.output)

    return ask


def openai_agents(url: str, options: Any, functions: list[Callable[..., str]], *, uses_responses: bool = False) -> Ask:
    """OpenAI's agents, over chat or responses."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if uses_responses else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(
        "assistant",
        instructions=INSTRUCTIONS,
        model=kind(model_of(url), openai_client=client),
        tools=[agents.function_tool(function) for function in functions],
        model_settings=agents.ModelSettings(max_tokens=options.tokens),
    )
    history: list[Any] = []

    async def ask(question: str) -> str:
        given = [*history, {"role": "user", "content": question}]
        found = await agents.Runner.run(agent, given, max_turns=options.requests)
        history[:] = found.to_input_list()
        return str(found.final_output)

    return ask


def openai_responses(url: str, options: Any, functions: list[Callable[..., str]]) -> Ask:
    """OpenAI's agents over responses."""
    return openai_agents(url, options, functions, uses_responses=True)


AGENTS = {
    "langchain": langchain,
    "pydantic-ai": pydantic_ai,
    "openai-agents, chat": openai_agents,
    "openai-agents, responses": openai_responses,
}


if __name__ == "__main__":
    main()
