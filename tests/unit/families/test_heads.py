"""Every kind of head guesses the same with caches, row by row, as over a whole text; its config is checked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_heads import usual_config
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.families.heads import KINDS, HeadChain, HeadConfig, HeadNetwork, build_head
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.choice import Choice
from mirrorsd.families.heads.kind import add_kind
from mirrorsd.families.heads.lending import lent_by
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.names import HEAD_KINDS, TRAINED_HEADS

ROOT = Path(__file__).resolve().parents[3]
VOCAB, HIDDEN, LENGTH = 50, 32, 3
SIZES: Any = {
    "length": LENGTH, "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_logits": VOCAB, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_positions": 64,
}  # fmt: skip
MEDUSA = HeadConfig(head_kind="medusa", taps=("final",), depth=2, **SIZES)
HYDRA = HeadConfig(head_kind="hydra", taps=("final",), vocabulary="low-rank", head_rank=8, **SIZES)
EAGLE3 = HeadConfig(head_kind="eagle3", taps=(1, 2, 3), num_layers=2, tap_norm="each", **SIZES)
BLOCK = HeadConfig(head_kind="block", taps=(1, 3), num_layers=2, qk_norm=True, **SIZES)
STREAMING = HeadConfig(head_kind="streaming", taps=(2, 3), num_layers=2, adapter_rank=4, **SIZES)
HEADS = {
    "medusa": MEDUSA,
    "medusa, own vocabularies": replace(MEDUSA, vocabulary="own"),
    "hydra": HYDRA,
    "hydra behind a layer": replace(HYDRA, num_layers=1, depth=2),
    "eagle3": EAGLE3,
    "eagle3, fewer tokens": replace(EAGLE3, vocabulary="reduced", num_logits=20, feeds_norm=True, tap_norm="joined"),
    "eagle3 in one pass": replace(EAGLE3, mask_token=7, own_embedding=True),
    "eagle3, projected": replace(EAGLE3, joins="projection", taps=(4,), tap_norm="none", norm_before_residual=True),
    "block": BLOCK,
    "block with a gated link": replace(BLOCK, link="gated", link_rank=4, tap_norm="each"),
    "streaming": STREAMING,
    "block with a Markov link": replace(BLOCK, link="markov", link_rank=4, mask_token=9, samples_anchor=False),
    **{f"{kind} as usual": replace(usual_config(kind), **SIZES) for kind in TRAINED_HEADS},
}


def random_head(config: HeadConfig) -> HeadNetwork:
    torch.manual_seed(3)
    network = build_head(config)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    if network.lm_head.map is not None:
        network.lm_head.map.copy_(torch.arange(config.num_logits) * 2 + 1)
    return network


def random_text(config: HeadConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(1, 12, len(config.taps) * HIDDEN, generator=generator)
    return features, torch.randint(0, VOCAB, (1, 12), generator=generator)


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@torch.no_grad()
def test_rows_in_three_passes_guess_like_the_whole_text(config: HeadConfig) -> None:
    network, (features, tokens) = random_head(config), random_text(config)
    noise = torch.randn(LENGTH, config.num_logits)
    tips = torch.tensor([4, 6, 11])
    whole = Choice(network.lm_head, noise, num_candidates=4)
    network.unroll(FeatureRows(features, tokens, tips, torch.tensor([0])), whole)
    chain, capacity = HeadChain(network, num_candidates=4), 16
    layers, kv_heads, width = config.cache_shape
    caches = [torch.full((1, kv_heads, capacity, width), 9.0) for _ in range(2 * layers)]
    spans = [(0, 5), (5, 7), (7, 12)]
    for tip, (begin, end) in enumerate(spans):
        padding = torch.zeros(1, 2, features.shape[2]), torch.zeros(1, 2, dtype=torch.long)
        given = torch.cat((features[:, begin:end], padding[0]), 1), torch.cat((tokens[:, begin:end], padding[1]), 1)
        start, last = torch.tensor([begin]), torch.tensor([end - begin - 1])
        ids, logprobs, *new = chain(*given, start, last, noise, *caches)
        assert torch.equal(ids, whole.ids[tip])
        torch.testing.assert_close(logprobs, whole.logprobs[tip], rtol=1e-4, atol=1e-4)
        filled = chain.fill(*given, start, *caches)
        for cache, rows, same in zip(caches, new, filled, strict=True):
            torch.testing.assert_close(rows, same)
            cache[:, :, begin : begin + rows.shape[2]] = rows


@pytest.mark.parametrize("config", [HYDRA, EAGLE3, replace(BLOCK, link="gated", link_rank=4)], ids=str)
@torch.no_grad()
def test_a_guess_depends_on_the_token_guessed_before_it(config: HeadConfig) -> None:
    network, (features, tokens) = random_head(config), random_text(config)
    found = []
    for favoured in (7, 8):
        noise = torch.zeros(LENGTH, VOCAB)
        noise[0, favoured] = 1e4
        choice = Choice(network.lm_head, noise)
        network.unroll(FeatureRows(features, tokens, torch.tensor([11]), torch.tensor([0])), choice)
        assert choice.ids[0, 0, 0] == favoured
        found.append(choice.logprobs[0, 1, 0])
    assert found[0] != found[1]


def test_every_kind_has_a_name_a_file_of_its_own_and_a_row_on_its_page() -> None:
    assert sorted(KINDS) == sorted(HEAD_KINDS)
    assert [kind for kind in HEAD_KINDS if KINDS[kind].training] == list(TRAINED_HEADS)
    files = {path.stem for path in (ROOT / "families" / "heads" / "kinds").glob("*.py")} - {"__init__"}
    assert files == set(KINDS)
    page = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    assert [kind for kind in HEAD_KINDS if f"| `{kind}` |" not in page] == []


def test_two_kinds_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two kinds of heads 'medusa'"):
        add_kind("medusa", KINDS["medusa"])


def test_a_head_folder_keeps_its_config(tmp_path: Path) -> None:
    for config in HEADS.values():
        config.write(tmp_path)
        assert HeadConfig.read(tmp_path) == config


def test_what_is_borrowed_follows_from_kind_and_vocabulary() -> None:
    assert MEDUSA.borrowed == ("lm_head.weight",)
    assert HYDRA.borrowed == ("embed_tokens.weight",)
    assert EAGLE3.borrowed == ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"head_kind": "medea"}, f"head_kind is 'medea'; allowed: {', '.join(sorted(HEAD_KINDS))}"),
        ({"taps": (3, "first")}, "taps are"),
        ({"taps": (1, 2)}, "reads one tap"),
        ({"vocabulary": "low-rank"}, "head_rank=0; a low-rank one has a rank"),
        ({"num_logits": 20}, "names 20 of 50 tokens"),
        ({"length": 0}, "length is 0; it must be at least 1"),
        ({"link": "gated"}, "link_rank=0"),
        ({"num_kv_heads": 3}, "4 query heads for 3"),
        ({"num_layers": 1}, "a medusa head has num_layers=1; at most 0 are allowed"),
        ({"head_kind": "eagle3", "num_layers": 0}, "must be at least 1"),
        ({"adapter_rank": 4}, "medusa head has adapter_rank=4; streams have adapters, and only they"),
        ({"head_kind": "streaming", "num_layers": 2, "intermediate_size": 48, "taps": (1, 3)}, "each of its 2 layers"),
    ],
)
def test_a_config_that_no_head_has_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(MEDUSA, **wrong)


def test_a_folder_without_a_heads_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a drafting head"):
        HeadConfig.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="it has no 'head_kind'"):
        HeadConfig.read(tmp_path)
    (tmp_path / "config.json").write_text('{"head_kind": "medusa", "colour": 1}')
    with pytest.raises(ConfigError, match="does not know: colour"):
        HeadConfig.read(tmp_path)


@torch.no_grad()
def test_untrained_streams_are_more_rows_of_the_target_in_its_last_layers() -> None:
    """Rows that begin as the last one's state, put behind it, come out of the target's layers as the streams do."""
    sizes: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    sizes |= {"vocab_size": VOCAB, "rms_norm_eps": 1e-5, "initializer_range": 0.2}
    target = LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, num_hidden_layers=4, **sizes)).eval()
    network, tokens = build_head(STREAMING), torch.arange(12)[None]
    for name, lent in lent_by(target, network).items():
        network.get_parameter(name).data = lent.data
    passed = target(tokens, output_hidden_states=True)
    features = torch.cat([passed.hidden_states[tap] for tap in STREAMING.taps], dim=-1)
    rows = FeatureRows(features, tokens, torch.tensor([11]), torch.tensor([0]))
    choice = Choice(network.lm_head, None, num_candidates=VOCAB)
    network.unroll(rows, choice)
    for (keys, values), layer in zip(rows.new, passed.past_key_values.layers[2:], strict=True):
        torch.testing.assert_close(keys, layer.keys)
        torch.testing.assert_close(values, layer.values)
    entering = passed.hidden_states[STREAMING.taps[0]]
    hidden = torch.cat((entering, entering[:, -1:].expand(-1, LENGTH, -1)), dim=1)
    positions = torch.arange(hidden.shape[1])[None]
    unseen = torch.full((hidden.shape[1],) * 2, -1e9).triu(1)[None, None]
    angles = target.model.rotary_emb(hidden, positions)
    for layer in target.model.layers[2:]:
        hidden = layer(hidden, attention_mask=unseen, position_ids=positions, position_embeddings=angles)
    expected = target.lm_head(target.model.norm(hidden[0, -LENGTH:])).log_softmax(-1)
    torch.testing.assert_close(choice.logprobs[0], expected.gather(-1, choice.ids[0]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_streams_neither_depend_on_later_streams_nor_on_what_others_guess() -> None:
    network, (features, tokens) = random_head(STREAMING), random_text(STREAMING)
    found = []
    for changed in (None, 1):
        if changed is not None:
            network.stream_embeddings[changed] += 1.0
        choice = Choice(network.lm_head, None)
        network.unroll(FeatureRows(features, tokens + (changed or 0), torch.tensor([11]), torch.tensor([0])), choice)
        found.append(choice.logprobs[0, :, 0])
    assert found[0][0] == found[1][0]
    assert all(found[0][1:] != found[1][1:]), "the stream itself, and the one behind it"
