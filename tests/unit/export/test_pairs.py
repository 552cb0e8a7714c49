"""The table of pairs: read whole, searched by the target's name, with a way out where nothing is known."""

import pytest

from mirrorsd.export.options import TARGET_PRECISIONS
from mirrorsd.export.pairs import draft_for, known_pairs
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.hub.checkpoints import parse_name


def test_every_pair_is_of_hub_names_and_known_precisions() -> None:
    assert len(known_pairs()) > 3
    for pair in known_pairs():
        assert parse_name(pair.target) is not None
        assert not pair.draft or parse_name(pair.draft) is not None
        assert all(parse_name(head) is not None for head in pair.heads)
        assert pair.licence
        assert set(pair.exported) <= set(TARGET_PRECISIONS)
        assert not pair.measured or pair.exported, "nothing is measured of what was never exported"
    assert len({pair.target for pair in known_pairs()}) == len(known_pairs())


def test_a_target_finds_its_draft_in_any_case_of_letters() -> None:
    assert draft_for("Qwen/Qwen3-8B") == draft_for("qwen/qwen3-8b") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("someone/model", "no draft is known for someone/model: name one with --draft"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "cut_draft.py"),
        ("Qwen/Qwen3.5-9B", "its siblings have recurrent layers and cannot be drafts: .*blank_draft"),
        ("openai/gpt-oss-20b", "no small model has its tokens: .*blank_draft"),
    ],
)
def test_without_a_known_draft_the_way_out_is_said(target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        draft_for(target)
