"""What is done before a pipeline is loaded, and what its chat advises."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mirrorsd.cli.chat.in_process import InProcess
from mirrorsd.cli.commands.loading import check_fits
from mirrorsd.cli.input.requests import Request


def test_what_is_wrong_with_a_manifest_is_for_loading_to_say(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff{}")
    check_fits(tmp_path, Request(prompt="Once"))


def test_a_chat_advises_what_can_be_typed() -> None:
    pipe: Any = SimpleNamespace(advice="`mirrorsd tune BUNDLE` looks for more")
    answers = InProcess(pipe, Path("my pairs/story.mirror"))
    assert answers.advice == "`mirrorsd tune 'my pairs/story.mirror'` looks for more"
    assert answers.name == "story"
