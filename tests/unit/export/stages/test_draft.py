import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.export.checkpoints.loading import Streams
from mirrorsd.export.stages.attention import TREE_ATTENTION
from mirrorsd.export.stages.draft import DraftStage, stream_bias
from mirrorsd.families.registry import parts_of
from mirrorsd.graphs.contract import MASKED, DraftShape, draft_contract


def test_streams_see_their_row_s_view_their_row_and_earlier_streams_of_it() -> None:
    """Two cache slots, rows 0 and 1 (row 1 sees slot 0 and row 0), tips 1 and 0, two streams each."""
    mask = torch.full((1, 1, 2, 4), MASKED)
    mask[0, 0, 0, 2] = 0.0
    mask[0, 0, 1, [0, 2, 3]] = 0.0
    seen = (stream_bias(mask, torch.tensor([1, 0]), 2)[0, 0] == 0).int().tolist()
    assert seen == [
        [0, 0, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 0, 1, 1],
    ]


def test_a_stream_sees_its_own_row_even_where_the_mask_hides_it() -> None:
    mask = torch.full((1, 1, 1, 3), MASKED)
    assert (stream_bias(mask, torch.tensor([0]), 1)[0, 0, 1] == 0).tolist() == [False, False, True, True]


def test_streams_behind_the_last_position_do_not_rescale_all_others() -> None:
    """Dynamic and long rope turn by the length of what they are asked for."""
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config).eval()
    plain = {"num_layers": 1, "vocab_size": 20, "num_kv_heads": 2, "head_dim": 16, "num_candidates": 4}

    def table(num_streams: int) -> torch.Tensor:
        shape = DraftShape(num_streams=num_streams, **plain)
        streams = Streams(embeddings=torch.zeros(num_streams, 32), num_stream_layers=1) if num_streams else None
        contract = draft_contract(shape)
        stage = DraftStage(parts_of(model), contract, shape, streams=streams, context=64, num_input_ids=20)
        found: torch.Tensor = stage.rotary.cos_table
        return found

    torch.testing.assert_close(table(2)[:64], table(0), rtol=0, atol=0)
    assert len(table(2)) == 66


def test_ids_that_the_draft_lacks_are_read_as_its_last_one() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)).eval()
    model.set_attn_implementation(TREE_ATTENTION)
    shape = DraftShape(num_layers=1, vocab_size=20, num_kv_heads=1, head_dim=16, num_streams=0, num_candidates=4)
    stage = DraftStage(parts_of(model), draft_contract(shape), shape, streams=None, context=64, num_input_ids=30)

    def best(token: int) -> list[int]:
        cache = torch.zeros(1, 1, 2, 16)
        rest = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, 3), torch.tensor([0]), cache, cache)
        with torch.no_grad():
            return list(stage(torch.tensor([[token]]), *rest)[0][0, 0].tolist())

    assert best(29) == best(19) != best(3)


def test_noise_moves_the_best_candidates_and_leaves_their_logprobs() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)).eval()
    model.set_attn_implementation(TREE_ATTENTION)
    plain = {"num_layers": 1, "vocab_size": 20, "num_kv_heads": 1, "head_dim": 16, "num_streams": 0}
    cache = torch.zeros(1, 1, 2, 16)
    rows = (torch.tensor([[3]]), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, 3), torch.tensor([0]))

    def run(num_candidates: int, num_noise_rows: int, *noise: torch.Tensor) -> tuple[list[int], list[float]]:
        shape = DraftShape(**plain, num_candidates=num_candidates, num_noise_rows=num_noise_rows)
        contract = draft_contract(shape)
        stage = DraftStage(parts_of(model), contract, shape, streams=None, context=64, num_input_ids=20)
        with torch.no_grad():
            ids, logprobs, *_ = stage(*rows, *noise, cache, cache)
        return ids[0, 0].tolist(), logprobs[0, 0].tolist()

    ids, logprobs = run(20, 0)
    worst = ids[-1]
    noise = torch.zeros(2, 20)
    noise[1, worst] = 100.0
    noisy_ids, noisy_logprobs = run(2, 2, noise, torch.tensor([[1]]))
    assert noisy_ids == [worst, ids[0]]
    assert noisy_logprobs == [logprobs[-1], logprobs[0]]
    assert run(2, 2, noise, torch.tensor([[0]]))[0] == ids[:2]
