"""Trees on ONNX Runtime: masked stages give the bundle's own numbers, and texts with siblings are plain decoding's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.device_maps import TargetPlacement, load_device_map
from mirrorsd.devices.inventory import cannot_take_trees
from mirrorsd.devices.onnxruntime import device as onnx_device
from mirrorsd.devices.onnxruntime.masked_graph import MOST_APART, RowLayout, rows_apart
from mirrorsd.devices.onnxruntime.stage import OnnxStage, Place
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.runtime import loading
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger

KINDS = ("medusa", "eagle3", "streaming")
FLAT = ((1.0, 10.0), (32.0, 10.1))
TEXT = np.random.default_rng(3).integers(0, 64, 60)
TREE = ([30, 31, 32, 7, 9, 11], [-1, 0, 1, 0, 1, 4])
"""Rows of the text at three positions; 7 beside the second, 9 beside the third, 11 behind that 9."""


def open_session(bundle: Path, *, takes_trees: bool, captures: bool = False) -> OnnxTarget:
    model = OnnxTargetModel(bundle, read_bundle(bundle).target, TargetPlacement(), takes_trees=takes_trees)
    model.device.captures = captures
    return model.new_session()


def logits(session: OnnxTarget, tokens: Any, start: int, parents: Any = None) -> NDArray[np.floating]:
    rows = None if parents is None else np.array(parents)
    output = session.run(np.array(tokens), start, with_logits=True, ledger=Ledger(), exits=(), parents=rows)
    assert output.logits is not None
    return output.logits.copy()


def tree_of_text() -> NDArray[np.int64]:
    tokens = np.array(TREE[0])
    tokens[:3] = TEXT[30:33]
    return tokens


def check_tree(tree: OnnxTarget, plain: OnnxTarget) -> None:
    """Rows of a chain have every bit of plain passes, and siblings are what plain passes over their paths say."""
    tokens, parents = tree_of_text(), TREE[1]
    for session in (tree, plain):
        session.prefill(TEXT[:30], 0, ledger=Ledger())
    assert np.array_equal(logits(tree, TEXT[30:36], 30), logits(plain, TEXT[30:36], 30))
    found = logits(tree, tokens, 30, parents)
    for row in range(len(tokens)):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = logits(plain, tokens[path], 30)[-1]
        assert np.abs(found[row] - alone).max() <= (0.0 if row < 3 else 1e-4)
    # Rows of the text are kept, those beside it fed once more: the next pass begins behind what it keeps.
    assert np.array_equal(logits(tree, TEXT[32:40], 32), logits(plain, TEXT[32:40], 32))


def test_masked_stages_give_the_numbers_of_the_bundles_own(tiny_bundle: Path) -> None:
    check_tree(open_session(tiny_bundle, takes_trees=True), open_session(tiny_bundle, takes_trees=False))


@pytest.mark.parametrize("captures", [False, True])
def test_masks_reach_a_device(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, *, captures: bool) -> None:
    monkeypatch.setattr(onnx_device, "place_of", lambda _: Place(kind="cpu", is_device=True))
    monkeypatch.setattr(OnnxStage, "release", lambda *_: None)  # a processor captures nothing
    tree, plain = (open_session(tiny_bundle, takes_trees=takes, captures=captures) for takes in (True, False))
    check_tree(tree, plain)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}])
@pytest.mark.parametrize("form", [{}, {"repetition_penalty": 1.2}, {"regex": "[a-z ]{0,60}"}])
def test_texts_are_those_of_plain_decoding(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], form: dict[str, Any]
) -> None:
    monkeypatch.setattr(loading, "cannot_take_trees", lambda *_: "")
    config = GenerationConfig(max_new_tokens=40, ignore_eos="regex" not in form, **settings, **form)
    num_siblings = 0
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"siblings": 6}, use_tuned=False) as pipe:
        pipe.engine.known.target_ms = FLAT
        for prompt in ("a fox", "once upon a time there was"):
            expected = pipe.generate(prompt, config=config, method="plain")
            for method in ("serial", "mirror", "auto"):
                found = pipe.generate(prompt, config=config, method=method)
                assert found.token_ids == expected.token_ids
                num_siblings += sum(step.num_siblings for step in found.steps)
    assert num_siblings or form


def test_rounding_is_far_from_what_is_refused(tiny_bundle: Path) -> None:
    assert rows_apart(open_session(tiny_bundle, takes_trees=True)) < MOST_APART / 3


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4, "top_k": 20}])
@pytest.mark.parametrize("form", [{}, {"repetition_penalty": 1.2}, {"regex": "[a-z ]{0,60}"}])
def test_texts_of_heads_with_siblings_are_those_of_plain_decoding(
    headed_bundle: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], form: Any
) -> None:
    monkeypatch.setattr(loading, "cannot_take_trees", lambda *_: "")
    config = GenerationConfig(max_new_tokens=40, ignore_eos="regex" not in form, **settings, **form)
    steps = []
    with MirrorPipeline.load(headed_bundle[0], device_map="cpu", speculation={"siblings": 8}, use_tuned=False) as pipe:
        pipe.engine.known.target_ms = FLAT
        for prompt in ("a fox", "once upon a time there was"):
            expected = pipe.generate(prompt, config=config, method="plain").token_ids
            for method in (*KINDS, "auto"):
                found = pipe.generate(prompt, config=config, method=method)
                assert found.token_ids == expected, method
                steps += found.steps
    assert sum(step.num_siblings for step in steps) > 40 or form
    assert sum(step.num_aside for step in steps) or form


def test_a_head_reads_the_rows_of_a_tree_that_are_text(headed_bundle: tuple[Path, list[int]]) -> None:
    """Where a sibling is right, the same guesses as where it was the window; behind a row that is fed again, too."""
    manifest = read_bundle(headed_bundle[0])
    tokens, parents = tree_of_text(), np.array(TREE[1])
    for kind in KINDS:
        tree, chain = (
            OnnxTargetModel(
                headed_bundle[0], manifest.target, TargetPlacement(), heads=manifest.heads, takes_trees=takes
            ).new_session()
            for takes in (True, False)
        )
        path = np.array([0, 1, 4, 5])
        for session in (tree, chain):
            session.prefill(TEXT[:30], 0, ledger=Ledger())
            session.guess(kind, np.array([*TEXT[1:30], tokens[0]]), 0, ledger=Ledger())
        tree.run(tokens, 30, with_logits=False, ledger=Ledger(), parents=parents)
        chain.run(tokens[path], 30, with_logits=False, ledger=Ledger())
        following = np.array([*tokens[path[1:]], 8])
        other = tree.guess(kind, following, 30, ledger=Ledger())
        found = [
            tree.guess(kind, following, 30, rows=path, ledger=Ledger()),
            chain.guess(kind, following, 30, ledger=Ledger()),
        ]
        tree.run(np.array([*tokens[path[2:]], 8, 20]), 32, with_logits=False, ledger=Ledger())
        chain.run(np.array([8, 20]), 34, with_logits=False, ledger=Ledger())
        following = np.array([20, 6])
        found.append(tree.guess(kind, following, 34, rows=np.array([2, 3]), ledger=Ledger()))
        found.append(chain.guess(kind, following, 34, ledger=Ledger()))
        for left, right in (found[:2], found[2:]):
            np.testing.assert_array_equal(left.ids, right.ids, kind)
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
        assert np.abs(other.logprobs - found[0].logprobs).max() > 1e-3, "the first rows are others"


@pytest.mark.parametrize("ignored", ["mask", "table_rows"])
def test_a_device_that_ignores_what_rows_see_is_refused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    of_chain = getattr(RowLayout, ignored)

    def blind(layout: RowLayout, *given: Any) -> NDArray[Any]:
        return of_chain(RowLayout(layout._count, layout._start, None), *given)

    monkeypatch.setattr(RowLayout, ignored, blind)
    with pytest.raises(DeviceError, match=r"takes the mask of siblings and does not follow it: rows differ by \d"):
        open_session(tiny_bundle, takes_trees=True)


def test_where_rows_are_not_exact_siblings_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match=r"siblings need .* runs on the processor, .* Leave them out \(siblings=0\)"):
        MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"siblings": 4})
    refused = pytest.raises(ConfigError, match=r"siblings need .* runs on the processor")
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe, refused:
        pipe.session({"siblings": 4})
    manifest = read_bundle(tiny_bundle)
    assert "openvino" in cannot_take_trees(load_device_map("openvino-cpu"), manifest)
    assert cannot_take_trees(load_device_map("webgpu-cpu"), manifest) == ""
