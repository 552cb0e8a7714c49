"""A pipeline that answers from a script, behind the same interface as the real one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.device_maps import load_device_map
from mirrorsd.runtime import Chunk, GeneratedToken, GenerationConfig
from mirrorsd.runtime.reporting.stats import GenerationStats

STATS = GenerationStats(
    seconds=0.5,
    prefill_ms=12.0,
    time_to_first_token_ms=34.0,
    num_prompt_tokens=5,
    num_reused_tokens=0,
    tokens_per_second=100.0,
    steps=2,
    tokens_per_step=1.5,
    mean_accepted=0.5,
    num_drafted=4,
    draft_right=0.25,
    reuse_rate=0.25,
    repeat_rate=0.0,
    reuse_by_source={"exit": 0.25},
    draft_exposed_ms=0.1,
    overlap=0.9,
    step_ms={"prefix": 1.0, "exit": 0.2, "suffix": 1.0, "draft": 0.8, "verify": 0.1, "host": 0.05},
    near_ties=0,
    near_tie_positions=[],
    steps_by_method={"mirror": 2},
    stop_reason="length",
    plain_tokens_per_second=40.0,
)


class ScriptedPipeline:
    """Records its requests; `answer` decides the ids, and so the text."""

    def __init__(self, answer: Callable[[str, str], list[int]]) -> None:
        self.device_map = load_device_map("cpu")
        self.layout, self.advice = "apart", ""
        self.chat: dict[str, Any] = {}
        settings = {"generation": {}, "chat_settings": lambda given: self.chat if given is None else {}}
        self.manifest = SimpleNamespace(accepted_length=None, **settings)
        self.placement = ["target: here", "draft: there"]
        self.requests: list[tuple[str | None, Any, GenerationConfig]] = []
        self.stats: dict[str, Any] = {}
        self.num_sessions = self.num_forgotten = 0
        self._answer = answer

    def generate(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Any = None,
        **overrides: Any,
    ) -> Any:
        config = replace(config or GenerationConfig(), **overrides).resolve(self.manifest.generation)
        self.requests.append((prompt, messages, config))
        ids = self._answer(config.method, prompt or messages[-1]["content"])
        text = "".join(f"<{token}>" for token in ids)
        return SimpleNamespace(
            text=text,
            token_ids=ids,
            stop_reason="length",
            seed=config.seed,
            method=config.method,
            layout=self.layout,
            stats=replace(STATS, **self.stats),
            write_trace=lambda path: path.write_text("trace"),
        )

    def forget(self) -> None:
        self.num_forgotten += 1

    def session(self) -> "ScriptedPipeline":
        self.num_sessions += 1
        return self

    def stream(self, prompt: str | None, config: GenerationConfig, *, messages: Any = None) -> Iterator[Chunk]:
        result = self.generate(prompt, config, messages=messages)
        for token in result.token_ids:
            yield Chunk(f"<{token}>", (GeneratedToken(token, "plain"),), None)
        yield Chunk("", (), result)

    def __enter__(self) -> "ScriptedPipeline":
        return self

    def __exit__(self, *details: object) -> None:
        return None


@pytest.fixture
def use_pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, str], list[int]]], ScriptedPipeline]:
    """Make `generate` and `compare` use a scripted pipeline; its `loaded` holds how it was opened."""

    def install(answer: Callable[[str, str], list[int]]) -> ScriptedPipeline:
        pipeline = ScriptedPipeline(answer)

        def load(
            bundle: Path, *, device_map: str, speculation: dict[str, object], layout: str | None, on_progress: Any
        ) -> ScriptedPipeline:
            pipeline.loaded = (bundle, device_map, speculation)  # type: ignore[attr-defined]
            pipeline.layout = layout or "apart"
            return pipeline

        monkeypatch.setattr("mirrorsd.runtime.MirrorPipeline.load", load)
        return pipeline

    return install
