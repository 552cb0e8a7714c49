"""Client libraries against a server: each of their ways to ask must end as the library expects it.

    mirrorsd serve storyteller.mirror &
    pip install instructor litellm llama-index-core llama-index-llms-openai-like llm langchain-tests langchain-openai
    python bench/claims/serving/clients.py http://127.0.0.1:8600/v1 --output clients.json

It needs nothing of mirrorsd; libraries that do not go together may each have an environment, and what is not installed
is named and left out. `clients.mjs` beside it does the same for Vercel's AI SDK.

What a small model says is its own affair: where its own words decide, a case asks for whatever comes. The standard
suite of langchain-tests judges the words, too: what fails there is to be read.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

Cases = dict[str, Callable[[], object]]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_SUITE = """
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServer(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    model_override_value = MODEL
    has_tool_choice = supports_json_mode = True
    chat_model_params = {"base_url": URL, "api_key": "none", "model": MODEL, "temperature": 0, "stream_usage": True}
"""


def main() -> None:
    """Run every case, print and write the report; ends with 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a running server, /v1 included")
    parser.add_argument("--only", choices=LIBRARIES, action="append", help="these libraries")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.url}/models", timeout=60) as answer:
        model = str(json.load(answer)["data"][0]["id"])
    rows: list[dict[str, Any]] = []
    for library, cases in LIBRARIES.items():
        if options.only and library not in options.only:
            continue
        try:
            release, found = version(library), cases(options.url, model)
        except (ImportError, PackageNotFoundError) as lack:
            print(library, "left out:", lack, sep=" | ")
            continue
        for name, case in found.items():
            rows.append({"library": library, "version": release, "case": name, **outcome(case)})
            print(*rows[-1].values(), sep=" | ")
    if options.output is not None:
        report = {"model": model, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    raise SystemExit(not rows or not all(row["has_passed"] for row in rows))


def outcome(case: Callable[[], object]) -> dict[str, Any]:
    """Whether a case passed, and what it said."""
    started = perf_counter()
    try:
        said, has_passed = str(case()), True
    except Exception as fault:  # whatever a library says when it gives up
        said, has_passed = f"{type(fault).__name__}: {fault}", False
    return {"has_passed": has_passed, "seconds": round(perf_counter() - started, 1), "said": said[:300]}


def instructor(url: str, model: str) -> Cases:
    """A pydantic model as answer, in the modes that constrain the text."""
    import instructor
    import openai
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: list[Any] = [{"role": "user", "content": "Extract: Jason is 25 years old."}]

    def extracted(mode: Any) -> Callable[[], object]:
        made = instructor.from_openai(client, mode=mode).chat.completions
        return lambda: made.create(model=model, messages=asked, response_model=Person, max_retries=0)

    def pieces() -> object:
        made = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions
        return list(made.create_partial(model=model, messages=asked, response_model=Person, max_retries=0))[-1]

    modes = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON", "RESPONSES_TOOLS")
    return {name: extracted(instructor.Mode[name]) for name in modes} | {"in pieces": pieces}


def litellm(url: str, model: str) -> Cases:
    """Chat, streams, calls and their results, overflow, completions, responses."""
    import litellm

    def ask(kind: str = "openai", **more: Any) -> Any:
        usual = {"messages": QUESTION, "max_tokens": 60, "api_base": url, "api_key": "none", "max_retries": 0}
        return litellm.completion(**{"model": f"{kind}/{model}", **usual, **more})

    def second_turn() -> object:
        called = ask(tools=TOOLS, tool_choice="required").choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "It rains."}
        return ask(messages=[*QUESTION, called, result], tools=TOOLS).choices[0].message.content

    def streamed(**more: Any) -> object:
        return litellm.stream_chunk_builder(list(ask(stream=True, **more))).choices[0].message

    def overflow(**more: Any) -> object:
        try:
            ask(messages=[{"role": "user", "content": "word " * 50_000}], **more)
        except litellm.ContextWindowExceededError as error:
            return type(error).__name__
        raise RuntimeError("a prompt that does not fit was answered")

    own = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    texts = {**own, "model": f"text-completion-openai/{model}"}
    return {
        "chat": lambda: ask().choices[0].message.content,
        "stream": streamed,
        "tools": lambda: ask(tools=TOOLS).choices[0].message,
        "a demanded tool": lambda: ask(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0],
        "a demanded tool, streamed": lambda: streamed(tools=TOOLS, tool_choice="required"),
        "a second turn": second_turn,
        "overflow": overflow,
        "overflow, streamed": lambda: overflow(stream=True),
        "as vLLM": lambda: ask("hosted_vllm", tools=TOOLS).choices[0].message,
        "as LM Studio": lambda: ask("lm_studio").choices[0].message.content,
        "completion": lambda: litellm.text_completion(prompt="Once", max_tokens=9, **texts).choices[0].text,
        "responses": lambda: litellm.responses(input="Hi", max_output_tokens=20, **own).output[0],
    }


def llama_index(url: str, model: str) -> Cases:
    """Chat, calls, structured answers, and an agent of three turns."""
    import asyncio

    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.core.workflow import Context
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    def weather(city: str) -> str:
        """Tell the weather in a city."""
        return f"It rains in {city}."

    usual = {"model": model, "api_base": url, "api_key": "none", "max_tokens": 128, "max_retries": 0}
    speaker = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=2048, **usual)
    tool = FunctionTool.from_defaults(weather)

    async def turns() -> list[str]:
        agent = FunctionAgent(tools=[tool], llm=speaker, system_prompt="Answer in one short sentence.")
        context = Context(agent)
        asked = ("What is the weather in Oslo?", "And in Rome?", "Thanks. Which town did I ask about first?")
        return [str(await agent.run(question, ctx=context, max_iterations=8)) for question in asked]

    def called() -> object:
        return speaker.get_tool_calls_from_response(
            speaker.chat_with_tools([tool], "What is the weather in Oslo?", tool_required=True)
        )

    return {
        "complete": lambda: speaker.complete("Name one colour."),
        "stream": lambda: list(speaker.stream_complete("Name one colour."))[-1],
        "completion": lambda: OpenAILike(is_chat_model=False, **usual).complete("Once upon"),
        "a demanded tool": called,
        "structured": lambda: speaker.structured_predict(Person, PromptTemplate("Jason is 25.")),
        "agent": lambda: asyncio.run(turns()),
    }


def llm(url: str, model: str) -> Cases:
    """The `llm` command with this server as a further model: a prompt, a tool, a function, a schema."""
    home = tempfile.mkdtemp()
    about = {"model_id": "local", "model_name": model, "api_base": url, "supports_tools": True, "supports_schema": True}
    Path(home, "extra-openai-models.yaml").write_text(json.dumps([about]), encoding="utf-8")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "local", *arguments]
        ended = subprocess.run(
            command, env={**os.environ, "LLM_USER_PATH": home}, capture_output=True, text=True, timeout=600
        )
        if ended.returncode:
            raise RuntimeError(ended.stderr)
        return ended.stdout

    short, product = (
        ("-o", "max_tokens", "60"),
        'def product(x: int, y: int) -> int:\n    "Multiply."\n    return x * y',
    )
    return {
        "prompt": lambda: run("Name one colour.", *short),
        "tool": lambda: run("-T", "llm_time", "What time is it?", *short),
        "tool, in one piece": lambda: run("--no-stream", "-T", "llm_version", "Which version?", *short),
        "function": lambda: run("--functions", product, "What is 34 * 21?", *short),
        "schema": lambda: sorted(json.loads(run("--schema", "name, age int", "Invent a dog."))),
    }


def langchain_suite(url: str, model: str) -> Cases:
    """The standard suite for chat models of langchain-tests, a case for each of its tests."""
    import pytest

    folder = Path(tempfile.mkdtemp())
    (folder / "test_standard.py").write_text(f"URL, MODEL = {url!r}, {model!r}\n{_SUITE}", encoding="utf-8")
    seen: dict[str, str] = {}

    class Noting:
        """Notes how each test ended."""

        def pytest_runtest_logreport(self, report: Any) -> None:
            """What pytest says of a phase."""
            if report.when == "call" or (report.outcome != "passed" and report.nodeid not in seen):
                seen[report.nodeid.split("::")[-1]] = "" if report.outcome == "passed" else str(report.longrepr)[-300:]

    loops = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"]
    with suppress(SystemExit):
        pytest.main(["-q", "-p", "no:cacheprovider", *loops, str(folder)], plugins=[Noting()])
    return {name: lambda fault=fault: _or_fail(fault) for name, fault in seen.items()}  # type: ignore[misc]


def _or_fail(fault: str) -> str:
    if fault and "Skipped" not in fault:
        raise RuntimeError(fault)
    return fault


LIBRARIES: Mapping[str, Callable[[str, str], Cases]] = {
    "instructor": instructor,
    "litellm": litellm,
    "llama-index-llms-openai-like": llama_index,
    "llm": llm,
    "langchain-tests": langchain_suite,
}


if __name__ == "__main__":
    main()
