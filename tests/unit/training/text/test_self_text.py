"""The target writes the same text alone, in a batch, and after a restart."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.text.corpus import Document
from mirrorsd.training.text.self_prompts import PromptRules, cut_prompts
from mirrorsd.training.text.self_text import SelfText, SelfTextConfig, generate_batch
from mirrorsd.training.text.text_folder import join_texts, load_texts, mark_own, write_self_text
from mirrorsd.training.text.token_stream import MixedStream, TokenStream

END = 2


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=1, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


PROMPTS = [[1, 9, 8], [1, 7], [1, 30, 31, 32, 33, 34], [1, 4, 5, 6]]


def test_greedy_text_is_that_of_transformers(target: LlamaForCausalLM) -> None:
    config = SelfTextConfig(ends=(END,), max_new_tokens=12)
    texts = generate_batch(target, PROMPTS, torch.zeros(len(PROMPTS)), config)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([prompt])
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert text == alone[0].tolist()


def test_sampled_tokens_are_as_frequent_as_they_are_likely_at_each_text_s_temperature(target: LlamaForCausalLM) -> None:
    prompt, draws = [1, 5, 9], 4000
    with torch.no_grad():
        logits = target(torch.tensor([prompt])).logits[0, -1].float()
    config = SelfTextConfig(ends=(0,), max_new_tokens=1)
    for temperature in (1.0, 0.5):
        texts = generate_batch(target, [prompt] * draws, torch.full((draws,), temperature), config)
        found = torch.bincount(torch.tensor([text[-1] for text in texts]), minlength=len(logits)) / draws
        assert (found - (logits / temperature).softmax(-1)).abs().max() < 0.03


def test_a_text_ends_at_its_end_token_or_its_limit(target: LlamaForCausalLM) -> None:
    config = SelfTextConfig(ends=(END,), max_new_tokens=9)
    texts = generate_batch(target, PROMPTS * 8, torch.full((32,), 3.0), config)
    for prompt, text in zip(PROMPTS * 8, texts, strict=True):
        written = text[len(prompt) :]
        assert text[: len(prompt)] == prompt
        assert END not in written[:-1]
        assert len(written) == 9 or written[-1] == END


def test_a_text_ends_at_whichever_end_token_comes_first(target: LlamaForCausalLM) -> None:
    """Chats of Llama 3 and Gemma end at another token than their documents."""
    ends = (END, 11, 12)
    config = SelfTextConfig(ends=ends, max_new_tokens=30)
    texts = generate_batch(target, PROMPTS * 8, torch.full((32,), 3.0), config)
    written = [text[len(prompt) :] for prompt, text in zip(PROMPTS * 8, texts, strict=True)]
    assert not {*ends} & {token for text in written for token in text[:-1]}
    assert {text[-1] for text in written if len(text) < 30} == {*ends}


def test_the_context_is_never_exceeded(target: LlamaForCausalLM) -> None:
    config = SelfTextConfig(ends=(END,), max_new_tokens=500)
    (text,) = generate_batch(target, [[1, 9, 8]], torch.zeros(1), config)
    assert len(text) <= target.config.max_position_embeddings


def test_parts_and_restarts_write_the_same_batches(target: LlamaForCausalLM, tmp_path: Path) -> None:
    config = SelfTextConfig(ends=(END,), max_new_tokens=6, batch=2)
    write_self_text(target, PROMPTS, tmp_path / "whole", config)
    for part in (0, 1):
        write_self_text(target, PROMPTS, tmp_path / "parts", config, (part, 2))
    (tmp_path / "parts" / "batch_00001.npz").unlink()
    write_self_text(target, PROMPTS, tmp_path / "parts", config)
    whole, parts = load_texts(tmp_path / "whole"), load_texts(tmp_path / "parts")
    assert whole == parts
    assert sorted(tuple(text.tokens[: text.prompt_length]) for text in whole) == sorted(map(tuple, PROMPTS))
    np.testing.assert_array_equal(join_texts(whole, seed=1), join_texts(parts, seed=1))
    assert len(join_texts(whole)) == sum(len(text.tokens) for text in whole)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no text"):
        load_texts(tmp_path)


class WordTokenizer:
    """One id per word; a chat is `3 user 2`, `4 assistant 2`, and an open 4 at its end."""

    def __call__(self, text: str, *, truncation: bool, max_length: int) -> dict[str, list[int]]:
        return {"input_ids": [1, *(int(word) for word in text.split())][:max_length]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool
    ) -> dict[str, list[int]]:
        marks = {"user": 3, "assistant": 4}
        turns = [[marks[turn["role"]], int(turn["content"]), 2] for turn in messages]
        return {"input_ids": [1, *(token for turn in turns for token in turn), 4]}


CHAT = Document(messages=({"role": "user", "content": "20"}, {"role": "assistant", "content": "21"}))


def test_prompts_end_where_the_assistant_speaks_or_early_in_a_text() -> None:
    rules = PromptRules(shortest=2, longest=9)
    prompts = cut_prompts([CHAT, Document("22 23 24 25 26")], WordTokenizer(), count=2, seed=0, rules=rules)
    assert [1, 3, 20, 2, 4] in prompts
    plain = next(prompt for prompt in prompts if prompt[1] == 22)
    assert 2 <= len(plain) <= 3


def test_a_repeated_document_gives_one_prompt() -> None:
    assert cut_prompts([CHAT] * 5, WordTokenizer(), count=10, seed=0) == [[1, 3, 20, 2, 4]]


def test_documents_too_short_for_a_prompt_are_an_error() -> None:
    with pytest.raises(ConfigError, match="none of 1 documents gives a prompt"):
        cut_prompts([Document("5 6")], WordTokenizer(), count=1, seed=0)


def test_text_of_other_prompts_is_not_mixed_in(target: LlamaForCausalLM, tmp_path: Path) -> None:
    config = SelfTextConfig(ends=(END,), max_new_tokens=3)
    write_self_text(target, PROMPTS[:2], tmp_path, config)
    with pytest.raises(ConfigError, match=r"made otherwise \(made_from, prompts differ"):
        write_self_text(target, PROMPTS, tmp_path, config)


def test_ids_beyond_two_bytes_survive(tmp_path: Path) -> None:
    assert join_texts([SelfText([1, 70_000], 1)]).tolist() == [1, 70_000]
    assert join_texts([SelfText([1, 7], 1)]).dtype == np.uint16


def test_the_targets_own_tokens_are_known_in_the_joined_text() -> None:
    texts = [SelfText([1, 2, 30, 31], 2), SelfText([3, 32], 1), SelfText([4, 5, 6], 3)]
    tokens, own = join_texts(texts, seed=3), mark_own(texts, seed=3)
    assert sorted(tokens[own].tolist()) == [30, 31, 32]
    ids, marks = TokenStream(tokens, own).take_marked(2, 4)
    assert (ids[marks] >= 30).all()
    assert (ids[~marks] < 30).all()
    both = MixedStream(TokenStream(tokens, own), TokenStream(tokens, own=False), share=0.5)
    assert both.take_marked(2, 4)[1].sum(-1).tolist() == [int(marks[0].sum()), 0]
    with pytest.raises(ConfigError, match="2 marks for 9 tokens"):
        TokenStream(tokens, own[:2])
