"""A streaming draft's main rows and files; its streams are tested family by family in test_families.py."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.families.stream_link import SHORTLIST, log_mass
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.names import STREAMS_FILE
from mirrorsd.training.draft_shape import check_same_streams, draft_from_model
from mirrorsd.training.models.streaming_draft import StreamingDraft, StreamShape, read_stream_shape

ROWS, STREAMS, STREAM_LAYERS = 7, 3, 2


def tiny_draft(seed: int = 0, stream_rank: int = 0, link_rank: int = 0) -> StreamingDraft:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    streams = StreamShape(STREAMS, STREAM_LAYERS, stream_rank, link_rank)
    draft = StreamingDraft(LlamaForCausalLM(config), **streams._asdict())
    draft.stream_embeddings.data.normal_()
    for adapter in draft.adapters:
        adapter.up.weight.data.normal_()
    if draft.link is not None:
        draft.link.up.weight.data.normal_()
    return draft.eval()


@torch.no_grad()
@pytest.mark.parametrize("stream_rank", [0, 8])
def test_main_rows_are_the_base_model(stream_rank: int) -> None:
    draft = tiny_draft(stream_rank=stream_rank)
    ids = torch.randint(0, 50, (2, ROWS))
    logits = draft.logits(draft(ids, torch.tensor([1, 3])).main)
    torch.testing.assert_close(logits, draft.base(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stream_rank", [0, 8])
def test_files_come_back(tmp_path: Path, stream_rank: int) -> None:
    draft = tiny_draft(stream_rank=stream_rank)
    draft.save(tmp_path, dtype=torch.float32)
    again = StreamingDraft.load(tmp_path)
    ids, tips = torch.randint(0, 50, (1, ROWS)), torch.tensor([4])
    torch.testing.assert_close(again(ids, tips).streams, draft(ids, tips).streams)
    assert (again.num_streams, again.num_stream_layers) == (STREAMS, STREAM_LAYERS)
    assert len(again.adapters) == (STREAM_LAYERS + 1 if stream_rank else 0)


@torch.no_grad()
def test_a_link_comes_back_and_makes_streams_depend_on_what_was_chosen_before(tmp_path: Path) -> None:
    draft = tiny_draft(stream_rank=8, link_rank=4)
    draft.save(tmp_path, dtype=torch.float32)
    again = StreamingDraft.load(tmp_path)
    ids, tips = torch.randint(0, 50, (1, ROWS)), torch.tensor([4])
    streams, tokens = draft(ids, tips).streams, torch.arange(2 * STREAMS).reshape(2, 1, 1, STREAMS)
    expected = draft.linked(streams, *tokens)
    torch.testing.assert_close(again.linked(streams, *tokens), expected, atol=1e-4, rtol=1e-4)
    for changed in ((tokens[0] + 1, tokens[1]), (tokens[0], tokens[1] + 1)):
        assert not torch.allclose(draft.linked(streams, *changed), expected, atol=1e-2)


@torch.no_grad()
def test_an_untrained_link_changes_nothing(tmp_path: Path) -> None:
    tiny_draft(stream_rank=8).save(tmp_path, dtype=torch.float32)
    draft = draft_from_model(tmp_path, StreamShape(STREAMS, STREAM_LAYERS, 8, 4))
    assert draft.link is not None
    hidden = draft(torch.randint(0, 50, (1, ROWS)), torch.tensor([4]))
    main, streams = hidden.main[0, 4], hidden.streams[0, 0]
    expected = draft.logits(torch.cat((main[None], streams))).argmax(-1).tolist()
    assert draft.follow(main, streams, own=7) == expected


@torch.no_grad()
def test_streams_choose_one_after_the_other() -> None:
    """Each hears of the two tokens before its own: the row's, its choice, then what the streams before it chose."""
    draft = tiny_draft(link_rank=4)
    hidden = draft(torch.randint(0, 50, (1, ROWS)), torch.tensor([4]))
    main, streams = hidden.main[0, 4], hidden.streams[0, 0]
    tokens = draft.follow(main, streams, own=7)
    assert tokens[0] == int(draft.logits(main).argmax())
    known = [7, *tokens]
    for stream in range(STREAMS):
        last, earlier = (torch.full((STREAMS,), known[stream + 1 - back]) for back in (0, 1))
        bare, linked = draft.logits(streams)[stream], draft.logits(draft.linked(streams, last, earlier))[stream]
        shortlist = bare.topk(SHORTLIST).indices
        assert tokens[1 + stream] == int(shortlist[linked[shortlist].argmax()])


def test_the_mass_beside_a_shortlist_is_what_it_was() -> None:
    bare, added = torch.randn(3, 50), torch.randn(3, 8)
    kept, ids = bare.topk(8)
    whole = bare.scatter(1, ids, kept + added)
    expected = torch.logsumexp(whole, dim=1, keepdim=True)
    torch.testing.assert_close(log_mass(kept + added, kept, bare), expected)


@torch.no_grad()
def test_untrained_adapters_change_nothing_and_trained_ones_the_streams() -> None:
    plain, adapted = tiny_draft(), tiny_draft(stream_rank=8)
    adapted.base.load_state_dict(plain.base.state_dict())
    adapted.stream_embeddings.data.copy_(plain.stream_embeddings)
    ids, tips = torch.randint(0, 50, (1, ROWS)), torch.tensor([4])
    expected = plain(ids, tips).streams
    for place in (*range(STREAM_LAYERS + 1), None):
        for number, adapter in enumerate(adapted.adapters):
            adapter.up.weight.data.fill_(0.1 if number == place else 0.0)
        is_same = torch.allclose(adapted(ids, tips).streams, expected, atol=1e-5)
        assert is_same == (place is None), place


def test_saving_leaves_the_draft_as_it_was(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.save(tmp_path)
    assert next(draft.parameters()).dtype == next(draft.base.parameters()).dtype == torch.float32


@torch.no_grad()
def test_without_a_streams_file_it_is_an_ordinary_draft(tmp_path: Path) -> None:
    draft = tiny_draft()
    draft.save(tmp_path)
    (tmp_path / STREAMS_FILE).unlink()
    plain = StreamingDraft.load(tmp_path)
    assert plain.num_streams == 0
    assert plain(torch.tensor([[1, 2, 3]]), torch.tensor([1])).streams.shape == (1, 1, 0, 32)


def test_streams_of_another_format_are_refused(tmp_path: Path) -> None:
    tiny_draft().save(tmp_path)
    save_file({"stream_embeddings": torch.zeros(1, 32)}, tmp_path / STREAMS_FILE, metadata={"format": "else"})
    with pytest.raises(ExportError, match="'else'; expected 'mirrorsd-streams-1' or 'mirrorsd-streams-2'"):
        StreamingDraft.load(tmp_path)
    (tmp_path / STREAMS_FILE).write_bytes((tmp_path / STREAMS_FILE).read_bytes()[:-2])
    with pytest.raises(ExportError, match=r"streams\.safetensors cannot be read"):
        StreamingDraft.load(tmp_path)


@pytest.mark.parametrize(("streams", "layers", "message"), [(-1, 1, "num_streams is -1"), (2, 4, "allowed are 1..3")])
def test_impossible_shapes_are_refused(streams: int, layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingDraft(tiny_draft().base, num_streams=streams, num_stream_layers=layers)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("adapters.1.up.weight", None, r"lacks adapters.1.up.weight; train the draft again"),
        ("adapters.1.up.weight", torch.ones(8, 8), r"does not fit the draft beside it.*adapters.1.up.weight"),
        ("link.last.weight", None, r"does not fit the draft beside it.*\(0,\) where \(4, 32\) is expected"),
    ],
)
def test_streams_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tiny_draft(stream_rank=8, link_rank=4).save(tmp_path)
    with safe_open(tmp_path / STREAMS_FILE, framework="pt") as file:
        metadata = file.metadata()
    tensors = {**load_file(tmp_path / STREAMS_FILE), name: tensor}
    save_file({key: part for key, part in tensors.items() if part is not None}, tmp_path / STREAMS_FILE, metadata)
    with pytest.raises(ExportError, match=f"(?s){message}"):
        StreamingDraft.load(tmp_path)


@pytest.mark.parametrize("stream_rank", [0, 8])
def test_a_draft_that_streams_goes_on_with_its_own_streams(tmp_path: Path, stream_rank: int) -> None:
    draft = tiny_draft(stream_rank=stream_rank)
    draft.save(tmp_path, dtype=torch.float32)
    shape = StreamShape(STREAMS, STREAM_LAYERS, stream_rank)
    assert read_stream_shape(tmp_path) == shape
    again = draft_from_model(tmp_path, shape)
    for name, weight in draft.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, msg=name)


def test_other_streams_than_a_draft_has_are_refused_and_none_make_it_ordinary(tmp_path: Path) -> None:
    draft = tiny_draft(stream_rank=8)
    draft.save(tmp_path, dtype=torch.float32)
    found = "3 streams in 2 layers with adapters of rank 8 and a link of rank 0; asked for are 2 streams in 2 layers"
    with pytest.raises(ConfigError, match=found):
        draft_from_model(tmp_path, StreamShape(2, 2, 8))
    with pytest.raises(ConfigError, match="start from a copy of it without its streams file"):
        check_same_streams(tmp_path, StreamShape(STREAMS, STREAM_LAYERS, 0))
    ordinary = draft_from_model(tmp_path, StreamShape(0, 2, 8, 4))
    assert (ordinary.num_streams, len(ordinary.adapters)) == (0, 0)
    ids = torch.randint(0, 50, (1, ROWS))
    torch.testing.assert_close(ordinary.base(ids).logits, draft.base(ids).logits)
