"""A target in three segments with two exits: progressive roots hear both, and the text stays the target's."""

from dataclasses import replace
from typing import Any

from mirrorsd import MirrorPipeline


def test_two_exits_give_the_same_text(qwen3_pair: Any) -> None:
    with MirrorPipeline.load(qwen3_pair.bundle, device_map="cpu", speculation={"pad_rows_to": 8}) as pipe:
        settings = {"max_new_tokens": 60, "ignore_eos": True}
        plain = pipe.generate("Once upon a time", **settings, method="plain")
        for source in ("proxy", "early", "progressive"):
            session = pipe.session(_with(pipe, source))
            mirror = session.generate("Once upon a time", **settings, method="mirror")
            assert mirror.token_ids == plain.token_ids
            assert {"prefix", "middle", "suffix"} <= {span.name for span in mirror.spans}
        for exits in ((), (1,), (2,)):
            session = pipe.session(replace(pipe.speculation, root_source="progressive", exits=exits))
            mirror = session.generate("Once upon a time", **settings, method="mirror")
            assert mirror.token_ids == plain.token_ids
            assert ("exit" in {span.name for span in mirror.spans}) == bool(exits)


def _with(pipe: MirrorPipeline, source: str):
    return replace(pipe.speculation, root_source=source)
