"""A target in three segments with two exits: progressive roots hear both, and the text stays the target's."""

from dataclasses import replace
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.export import ExportOptions, export_pair


@pytest.mark.slow
def test_two_exits_give_the_same_text(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = ExportOptions(context=256, exit_layers=(1, 3), buckets=((8, 8), (64, 1)), capacities=(256,))
    export_pair(*tiny_pair, tmp_path / "two.mirror", options)
    with MirrorPipeline.load(tmp_path / "two.mirror", device_map="cpu", speculation={"pad_rows_to": 8}) as pipe:
        settings = {"max_new_tokens": 60, "ignore_eos": True}
        plain = pipe.generate("Once upon a time", **settings, method="plain")
        for source in ("proxy", "early", "progressive"):
            session = pipe.session(_with(pipe, source))
            mirror = session.generate("Once upon a time", **settings, method="mirror")
            assert mirror.token_ids == plain.token_ids
            assert {"prefix", "middle", "suffix"} <= {span.name for span in mirror.spans}
        for exits in ((), (1,), (3,)):
            session = pipe.session(replace(pipe.speculation, exits=exits))
            mirror = session.generate("Once upon a time", **settings, method="mirror")
            assert mirror.token_ids == plain.token_ids
            assert ("exit" in {span.name for span in mirror.spans}) == bool(exits)


def _with(pipe: MirrorPipeline, source: str):
    return replace(pipe.speculation, root_source=source)
