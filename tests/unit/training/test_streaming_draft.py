"""Streams against a brute-force forward in which they are ordinary rows behind an explicit mask."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.training.streaming_draft import STREAMS_FILE, StreamingDraft

ROWS, STREAMS, STREAM_LAYERS = 7, 3, 2


def tiny_draft(seed: int = 0) -> StreamingDraft:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    draft = StreamingDraft(LlamaForCausalLM(config), num_streams=STREAMS, num_stream_layers=STREAM_LAYERS)
    draft.stream_embeddings.data.normal_()
    return draft.eval()


def brute_force(draft: StreamingDraft, ids: torch.Tensor, row: int) -> torch.Tensor:
    """Return the streams of one row: rows 0..row, then the streams as further rows, through HF's own layers."""
    decoder = draft.base.model
    hidden = decoder.embed_tokens(ids[:, : row + 1])
    positions = torch.arange(row + 1 + STREAMS)
    for number, layer in enumerate(decoder.layers):
        if number == len(decoder.layers) - STREAM_LAYERS:
            hidden = torch.cat((hidden, hidden[:, row : row + 1] + draft.stream_embeddings), dim=1)
        size = hidden.shape[1]
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        rotary = decoder.rotary_emb(hidden, positions[None, :size])
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    return decoder.norm(hidden)[:, row + 1 :]


@torch.no_grad()
def test_streams_equal_extra_rows_behind_a_mask() -> None:
    # With one tip row, stream j at position r + j sees rows 0..r and streams 1..j: exactly j further causal rows.
    draft = tiny_draft()
    ids = torch.randint(0, 50, (2, ROWS))
    tips = torch.tensor([0, 2, 5, 6])
    streams = draft(ids, tips).streams
    for place, row in enumerate(tips.tolist()):
        torch.testing.assert_close(streams[:, place], brute_force(draft, ids, row), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_main_rows_are_the_base_model() -> None:
    draft = tiny_draft()
    ids = torch.randint(0, 50, (2, ROWS))
    logits = draft.logits(draft(ids, torch.tensor([1, 3])).main)
    torch.testing.assert_close(logits, draft.base(ids).logits, atol=1e-5, rtol=1e-5)


def test_files_come_back(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.save(tmp_path, dtype=torch.float32)
    again = StreamingDraft.load(tmp_path)
    ids, tips = torch.randint(0, 50, (1, ROWS)), torch.tensor([4])
    torch.testing.assert_close(again(ids, tips).streams, draft(ids, tips).streams)
    assert (again.num_streams, again.num_stream_layers) == (STREAMS, STREAM_LAYERS)


def test_saving_leaves_the_draft_as_it_was(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.save(tmp_path)
    assert next(draft.parameters()).dtype == next(draft.base.parameters()).dtype == torch.float32


def test_missing_streams_file_is_named(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.save(tmp_path)
    (tmp_path / STREAMS_FILE).unlink()
    with pytest.raises(ExportError, match=r"streams\.safetensors does not exist"):
        StreamingDraft.load(tmp_path)


@pytest.mark.parametrize(("streams", "layers", "message"), [(-1, 1, "num_streams is -1"), (2, 4, "allowed are 1..3")])
def test_impossible_shapes_are_refused(streams: int, layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingDraft(tiny_draft().base, num_streams=streams, num_stream_layers=layers)
