"""What an editor and a print show: every public name is listed, loads, and is what the runtime has."""

import pytest

import mirrorsd
from mirrorsd.graphs import errors
from mirrorsd.runtime.reporting.results import GenerationResult


def test_every_public_name_loads_and_is_listed() -> None:
    assert set(mirrorsd.__all__) <= set(dir(mirrorsd))
    assert all(getattr(mirrorsd, name) is not None for name in mirrorsd.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'MirrorPipelines'"):
        _ = mirrorsd.MirrorPipelines


def test_every_error_that_is_raised_on_purpose_can_be_caught_by_its_public_name() -> None:
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert raised <= set(mirrorsd.__all__)
    assert issubclass(mirrorsd.Cancelled, mirrorsd.GenerationError)


def test_a_result_prints_its_text_and_fits_on_a_line() -> None:
    figures = {"device_map": "cpu", "layout": "apart", "seed": None, "stats": None, "spans": (), "steps": ()}
    text = "Once upon a time there was a fox. " * 9
    result = GenerationResult(
        text=text, prompt_ids=[1], token_ids=[2] * 90, stop_reason="eos", method="auto", **figures
    )
    assert str(result) == text
    assert repr(result).startswith("<GenerationResult: 90 tokens by auto, ended by eos: 'Once upon a time")
    assert len(repr(result)) < 160
    assert "\n" not in repr(result)
