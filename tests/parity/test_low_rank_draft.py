"""Drafts cut from a GGUF target, with a smaller head and the target's embedding: exported, and decoded with."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.verify.draft import DraftRun, Tree
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.training.draft_shape import DraftHead, draft_from_layers
from mirrorsd.training.models.model_folder import copy_tokenizer
from mirrorsd.training.models.streaming_draft import StreamingDraft, StreamShape
from mirrorsd.training.models.whole_model import load_whole

WriteGguf = Callable[..., Path]
OPTIONS = ExportOptions(precision="file", context=384, buckets=((8, 8), (16, 16), (64, 1)), capacities=(384,))


@pytest.fixture(params=[DraftHead(16), DraftHead(num_tokens=200)], ids=["low rank", "first ids"])
def pair(request: pytest.FixtureRequest, write_gguf: WriteGguf, tmp_path: Path) -> tuple[Path, StreamingDraft, Path]:
    """The target's file, the draft, and its folder; what starts without effect is trained by a throw of dice."""
    file = write_gguf("Q4_0")
    draft = draft_from_layers(load_whole(file), StreamShape(2, 1, 4, 8), (0, 1), request.param).eval()
    torch.manual_seed(9)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "link" in name or "adapters" in name or name == "stream_embeddings":
                weight.normal_(std=0.2)
    draft.save(tmp_path / "draft", dtype=torch.float32)
    copy_tokenizer(open_checkpoint(file, "target").folder, tmp_path / "draft")
    return file, draft, tmp_path / "draft"


def test_it_decodes_what_the_target_says(pair: tuple[Path, StreamingDraft, Path], tmp_path: Path) -> None:
    file, draft, folder = pair
    manifest = export_pair(file, folder, tmp_path / "pair.mirror", OPTIONS)
    assert manifest.draft.source.num_parameters < sum(weight.numel() for weight in draft.base.parameters())
    run = DraftRun(tmp_path / "pair.mirror" / manifest.draft.file, manifest.draft.shape, 384)
    ids = np.random.default_rng(3).integers(0, 250, 20).tolist()
    found, _ = run.forward(Tree(tuple(ids), tuple(range(-1, len(ids) - 1))), 0, np.array([19]))
    with torch.no_grad():
        hidden = draft(torch.tensor([ids]), torch.tensor([19]))
    assert found[0, :, 0].tolist() == draft.follow(hidden.main[0, 19], hidden.streams[0, 0], ids[19])
    with MirrorPipeline.load(tmp_path / "pair.mirror") as pipe:
        for temperature in (0.0, 0.8):
            texts = [
                pipe.generate(
                    "abba ab", GenerationConfig(method=method, max_new_tokens=24, temperature=temperature, seed=5)
                )
                for method in ("plain", "serial", "mirror", "auto")
            ]
            assert all(one.token_ids == other.token_ids for one, other in itertools.pairwise(texts))


def test_a_head_of_too_few_tokens_for_the_candidates_is_refused(write_gguf: WriteGguf, tmp_path: Path) -> None:
    file = write_gguf("Q4_0")
    draft_from_layers(load_whole(file), StreamShape(2, 1, 4, 8), (0, 1), DraftHead(num_tokens=3)).save(
        tmp_path / "draft"
    )
    copy_tokenizer(open_checkpoint(file, "target").folder, tmp_path / "draft")
    with pytest.raises(ConfigError, match="this vocabulary has 3 tokens"):
        export_pair(file, tmp_path / "draft", tmp_path / "pair.mirror", OPTIONS)


def test_another_targets_draft_is_refused(
    pair: tuple[Path, StreamingDraft, Path], tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Tokenizers are compared first; here they are made equal, and the embedding's shape gives it away."""
    _, _, folder = pair
    for source in (tiny_pair[0] / "tokenizer.json", tiny_pair[0] / "generation_config.json"):
        (folder / source.name).write_bytes(source.read_bytes())
    config = (folder / "config.json").read_text().replace('"bos_token_id": 1', '"bos_token_id": null')
    (folder / "config.json").write_text(config)
    with pytest.raises(ExportError, match=r"(shares its target's token embedding|do not fit together)"):
        export_pair(tiny_pair[0], folder, tmp_path / "pair.mirror", OPTIONS)
