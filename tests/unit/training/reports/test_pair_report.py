"""Misses, confirmed tokens and sampling, against values known by construction or by brute force."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.families.low_rank_head import HEAD_TOKENS
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.exit_adapter import exit_logits
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.reports.draft_report import measure_confirmed
from mirrorsd.training.reports.miss_report import measure_misses
from mirrorsd.training.reports.pair_report import TrainedPair, report_pair
from mirrorsd.training.reports.sampling_report import SamplingTrial, measure_sampling
from mirrorsd.training.text.answers import answer
from mirrorsd.training.text.self_text import SelfText

VOCABULARY = 40


def tiny_model(layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=24, max_position_embeddings=64, initializer_range=0.4, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_model(3, seed=1)


@pytest.fixture(scope="module")
def draft() -> StreamingDraft:
    return StreamingDraft(tiny_model(2, seed=2), num_streams=2, num_stream_layers=1)


@pytest.fixture(scope="module")
def texts() -> list[SelfText]:
    generator = torch.Generator().manual_seed(4)
    return [SelfText(torch.randint(0, VOCABULARY, (30,), generator=generator).tolist(), 5) for _ in range(3)]


@torch.no_grad()
def test_misses_are_those_of_a_count_by_hand(
    target: LlamaForCausalLM, draft: StreamingDraft, texts: list[SelfText]
) -> None:
    found = measure_misses(target, {2: None}, draft, texts)
    misses = in_draft = in_both = 0
    for text in texts:
        ids = torch.tensor([text.tokens])
        outputs = target(ids, output_hidden_states=True)
        by_exit = exit_logits(target, outputs.hidden_states[2], None)[0]
        by_draft = draft.base(ids).logits[0]
        for row in range(text.prompt_length - 1, len(text.tokens) - 1):
            own, true = int(by_draft[row].argmax()), text.tokens[row + 1]
            if own == true:
                continue
            misses += 1
            runners_up = [token for token in by_draft[row].argsort(descending=True).tolist() if token != own]
            proxies = [token for token in by_exit[row].argsort(descending=True).tolist() if token != own]
            in_draft += true in runners_up[:4]
            in_both += true in runners_up[:4] + proxies[:4]
    assert (found["positions"], found["misses"]) == (75, misses)
    assert found["draft"]["4"] == pytest.approx(in_draft / misses, abs=1e-4)
    assert found["both_2"]["4"] == pytest.approx(in_both / misses, abs=1e-4)


@torch.no_grad()
def test_rejection_accepts_what_two_laws_have_in_common(target: LlamaForCausalLM, draft: StreamingDraft) -> None:
    text = SelfText([1, 7, 9, 30, 4], 4)
    found = measure_sampling(target, draft, [text], SamplingTrial(gamma=2, draws=3000, stride=8))
    context = torch.tensor([text.tokens[:4]])
    p, q = (model(context).logits[0, -1].softmax(-1) for model in (target, draft.base))
    common = torch.minimum(p, q).sum().item()
    first = found["accepted_first"]
    assert first["rejection"] == pytest.approx(common, abs=0.03)
    assert first["sample_and_match"] == pytest.approx((p * q).sum().item(), abs=0.02)
    assert (common / (2 - common)) - 0.04 < first["shared_noise"] < common + 0.04
    assert found["accepted_per_window"]["rejection"] > first["rejection"]


@torch.no_grad()
def test_a_draft_samples_only_what_its_head_names(target: LlamaForCausalLM) -> None:
    """Its law is that over the first 15 tokens; the others have no share, in rejection as in shared noise."""
    reduced = StreamingDraft(tiny_model(2, seed=2), num_streams=0, num_stream_layers=0)
    setattr(reduced.base.config, HEAD_TOKENS, 15)
    text = SelfText([1, 7, 9, 30, 4], 4)
    found = measure_sampling(target, reduced, [text], SamplingTrial(gamma=2, draws=3000, stride=8))
    context = torch.tensor([text.tokens[:4]])
    p, q = target(context).logits[0, -1].softmax(-1)[:15], reduced.base(context).logits[0, -1][:15].softmax(-1)
    common = torch.minimum(p, q).sum().item()
    assert found["accepted_first"]["rejection"] == pytest.approx(common, abs=0.03)
    assert found["accepted_first"]["sample_and_match"] == pytest.approx((p * q).sum().item(), abs=0.02)
    assert (common / (2 - common)) - 0.04 < found["accepted_first"]["shared_noise"] < common + 0.04


def test_a_draft_that_is_the_target_is_always_accepted(target: LlamaForCausalLM, texts: list[SelfText]) -> None:
    same = StreamingDraft(tiny_model(3, seed=1), num_streams=0, num_stream_layers=0)
    found = measure_sampling(target, same, texts[:1], SamplingTrial(gamma=3, draws=2, stride=9))
    assert found["accepted_per_window"]["shared_noise"] == 3.0
    assert found["accepted_per_window"]["rejection"] == pytest.approx(3.0, abs=1e-3)
    assert found["accepted_per_window"]["sample_and_match"] < 3.0
    assert measure_misses(target, {}, same, texts)["positions"] == 75


def test_useless_streams_confirm_one_token_per_pass(target: LlamaForCausalLM, texts: list[SelfText]) -> None:
    without = StreamingDraft(tiny_model(2, seed=2), num_streams=0, num_stream_layers=0)
    assert measure_confirmed(without, texts, longest=9)["tokens_per_pass"] == 1.0


def test_a_report_has_the_sections_that_were_asked_for(
    target: LlamaForCausalLM, draft: StreamingDraft, texts: list[SelfText]
) -> None:
    baseline = StreamingDraft(tiny_model(2, seed=2), num_streams=0, num_stream_layers=0)
    pair = TrainedPair(target=target, exits={1: None}, draft=draft, baseline=baseline)
    greedy = {"story": texts[:1], "sums": texts[1:2]}
    found = report_pair(pair, greedy, [], sections=("windows", "confirmed"), gamma=3)
    assert set(found) == {"texts", "gamma", "windows", "confirmed"}
    windows = found["windows"]
    assert windows["reference"] == "s=0, 3 passes"
    # The baseline is the streaming draft's own base, so its 3 passes are what the main rows alone give.
    assert windows["s=0, 3 passes"] == windows["main rows alone, 3 passes"]
    assert set(windows["J=2"]["by_task"]) == {"story", "sums"}
    with pytest.raises(ConfigError, match="no section 'speed'"):
        report_pair(pair, greedy, [], sections=("speed",))


class ChatTokenizer:
    chat_template = "yes"

    def apply_chat_template(self, messages: list[Any], *, add_generation_prompt: bool) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + len(message["content"]) % 30 for message in messages)]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "x" * len(ids)


def test_answers_become_part_of_the_conversation(target: LlamaForCausalLM) -> None:
    texts = answer(target, ChatTokenizer(), [("a", "bb"), ("ccc",)], ends=(2,), max_new_tokens=5)
    assert [text.prompt_length for text in texts] == [2, 2, 4]
    second = texts[2].tokens
    first_answer = len(texts[0].tokens) - 2
    assert second[:4] == [1, 4, 3 + first_answer, 5]
