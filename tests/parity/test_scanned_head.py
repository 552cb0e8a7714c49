"""An LM head that finds a row's best tokens in four bits and computes their logits again in eight."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from mirrorsd import MirrorPipeline
from mirrorsd.cli.commands.inspect import precision_line
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.pair import _BuiltDraft
from mirrorsd.export.stages import target as stages
from mirrorsd.export.verify.target import _undecided
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ParityError
from mirrorsd.graphs.manifest import Manifest

Exported = tuple[Path, Manifest]


@pytest.fixture(scope="module")
def tied(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    return make_checkpoint(folder / "target", "llama", seed=8, num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def exported(tied: Path, gptq_options: ExportOptions) -> Exported:
    return tied.parent / "bundle", export_pair(tied, tied, tied.parent / "bundle", gptq_options)


def test_a_tied_head_is_scanned_in_four_bits_and_looks_its_best_up_in_the_embedding(exported: Exported) -> None:
    bundle, manifest = exported
    storage = manifest.target.storage
    assert storage is not None
    assert (storage.head, storage.embedding, storage.num_rescored) == ("int4", "int8", 32)
    assert "head int4 with the best 32 again in int8" in precision_line(manifest.target)

    prefix, suffix, point = (ir.load(bundle / names.stage_file(name)).graph for name in ("prefix", "suffix", "exit1"))
    width = manifest.target.shape.vocab_size
    for graph in (suffix, point):
        assert [node.attributes["bits"].as_int() for node in products(graph, width)] == [4]
    (looked_up,) = (node for node in suffix if node.op_type == "GatherBlockQuantized")
    (embedding,) = (node for node in prefix if node.op_type == "GatherBlockQuantized")
    assert place(looked_up) == place(embedding)
    assert not [node for node in point if node.op_type == "GatherBlockQuantized"]


def products(graph: ir.Graph, width: int) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "MatMulNBits" and node.attributes["N"].as_int() == width]


def place(node: ir.Node) -> tuple[int | None, int | None]:
    table = node.inputs[0]
    assert table is not None
    assert isinstance(table.const_value, ir.ExternalTensor)
    return table.const_value.offset, table.const_value.length


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_its_texts_are_the_same_with_every_method(exported: Exported, temperature: float) -> None:
    with MirrorPipeline.load(exported[0]) as pipeline:
        asked = {"max_new_tokens": 48, "temperature": temperature, "seed": 3}
        texts = {
            method: pipeline.generate("Once upon", method=method, **asked)
            for method in ("plain", "serial", "mirror", "auto")
        }
    assert len({tuple(text.token_ids) for text in texts.values()}) == 1


@pytest.mark.usefixtures("traced_anew")
def test_a_graph_that_does_not_compute_them_again_is_refused(
    tied: Path, gptq_options: ExportOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference does, so that the tokens in question differ by what four bits lose."""
    monkeypatch.setattr(stages, "rescored", lambda logits, *others: logits)
    with pytest.raises(ParityError, match="suffix"):
        export_pair(tied, tied, tmp_path / "bundle", gptq_options)


class CollectedError(Exception):
    """What the products of a head read of the text is collected, or not."""


def test_other_heads_stay_in_eight_bits(
    tied: Path,
    make_checkpoint: Callable[..., Path],
    gptq_options: ExportOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One with weights of its own, which would have to be stored twice, and one that was asked for in int8.

    Only a head that is scanned is fitted to what it reads.
    """

    def collected(*_: Any, with_head: bool) -> None:
        raise CollectedError(with_head)

    monkeypatch.setattr("mirrorsd.export.pair._build_draft", lambda *_: _BuiltDraft(None, (), None))
    monkeypatch.setattr("mirrorsd.export.verify.sensitive_layers.collect_inputs", collected)
    untied = make_checkpoint(tmp_path / "untied", "llama", seed=8, num_hidden_layers=2, tie_word_embeddings=False)
    asked = replace(gptq_options, head_precision="int8")
    for target, options, is_scanned in (
        (tied, gptq_options, True),
        (untied, gptq_options, False),
        (tied, asked, False),
    ):
        with pytest.raises(CollectedError, match=str(is_scanned)):
            export_pair(target, tied, tmp_path / "pair.mirror", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("granite", {"logits_scaling": 2.0}), ("opt", {"num_key_value_heads": 4, "word_embed_proj_dim": 32})],
    ids=["logits-scaled-afterwards", "projected-beforehand"],
)
def test_what_a_family_does_around_its_head_is_kept(
    tied: Path,
    make_checkpoint: Callable[..., Path],
    gptq_options: ExportOptions,
    tmp_path: Path,
    family: str,
    sizes: dict[str, float],
) -> None:
    """The export compares every stage with PyTorch, and would be refused. It says that the given text is short."""
    told: list[str] = []
    asked = replace(gptq_options, calibration_text="The fox went into the wood, and the wood was dark. " * 100)
    target = make_checkpoint(tmp_path / family, family, seed=4, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    manifest = export_pair(target, tied, tmp_path / "bundle", asked, lambda stage, share: told.append(stage))
    assert manifest.target.storage is not None
    assert manifest.target.storage.num_rescored == 32
    assert any("a longer --calibration text" in stage for stage in told)


def test_tokens_at_the_edge_of_the_best_are_not_compared() -> None:
    """Arithmetic decides which of them is among the best; every other token is surely in or out."""
    scanned = torch.tensor([[9.0, 5.0, 5.001, -3.0], [9.0, 5.0, 4.0, -3.0]])
    assert _undecided(scanned, 2).tolist() == [[False, True, True, False], [False, True, False, False]]
    assert not _undecided(scanned, 0).any()


def test_only_the_best_logits_of_each_row_are_computed_again() -> None:
    hidden, table = torch.tensor([[1.0, 2.0], [2.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    found = stages.rescored(torch.tensor([[0.9, 1.8, 3.3], [1.9, -1.2, 1.1]]), hidden, table, num_best=2)
    np.testing.assert_allclose(found.numpy(), [[0.9, 2.0, 3.0], [2.0, -1.2, 1.0]])
