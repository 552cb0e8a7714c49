"""What a pipeline takes over from its own session looks the same to a program that asks."""

import inspect

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.runtime.session import MirrorSession

SHARED = ["generate", "stream", "generate_several", "astream", "agenerate", "encode"]


@pytest.mark.parametrize("name", SHARED)
def test_a_method_of_both_has_one_signature_and_one_kind(name: str) -> None:
    of_pipeline, of_session = getattr(MirrorPipeline, name), getattr(MirrorSession, name)
    assert inspect.signature(of_pipeline) == inspect.signature(of_session)
    assert inspect.getdoc(of_pipeline) == inspect.getdoc(of_session)
    for is_kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction):
        assert is_kind(of_pipeline) == is_kind(of_session), is_kind


def test_a_program_that_asks_awaits_agenerate() -> None:
    assert inspect.iscoroutinefunction(MirrorPipeline.agenerate)
