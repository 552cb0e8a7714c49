"""The stage contracts, on the sizes of a small model."""

from mirrorsd.graphs import DraftShape, TargetShape, draft_contract, exit_contract, segment_contract

TARGET = TargetShape(num_layers=4, hidden_size=64, vocab_size=100, num_kv_heads=2, head_dim=16, dtype="float16")
DRAFT = DraftShape(num_layers=2, vocab_size=100, num_kv_heads=1, head_dim=8, num_streams=3, num_candidates=5)


def test_prefix_takes_ids_and_gives_hidden() -> None:
    contract = segment_contract(TARGET, "prefix", first_layer=0, end_layer=1)
    names = [spec.name for spec in contract.inputs]
    assert names == ["input_ids", "seqlens_k", "total_length", "past_key.0", "past_value.0"]
    assert [spec.name for spec in contract.outputs] == ["hidden", "present_key.0", "present_value.0"]
    assert contract.outputs[0].shape == (1, "S", 64)
    assert contract.outputs[0].dtype == "float16"


def test_middle_takes_hidden_and_gives_hidden() -> None:
    contract = segment_contract(TARGET, "middle", first_layer=1, end_layer=3)
    assert (contract.inputs[0].name, contract.outputs[0].name) == ("hidden", "next_hidden")
    assert [spec.name for spec in contract.inputs if spec.name.startswith("past_key")] == ["past_key.1", "past_key.2"]
    assert "logit_rows" not in {spec.name for spec in contract.inputs}


def test_suffix_gives_logits_of_the_asked_rows() -> None:
    contract = segment_contract(TARGET, "suffix", first_layer=3, end_layer=4)
    assert [spec.name for spec in contract.inputs[:2]] == ["hidden", "logit_rows"]
    assert {spec.name: spec.shape for spec in contract.outputs[:3]} == {
        "logits": (1, "R", 100),
        "argmax_ids": (1, "R"),
        "argmax_gap": (1, "R"),
    }


def test_past_and_present_are_one_buffer() -> None:
    contract = segment_contract(TARGET, "suffix", first_layer=2, end_layer=4)
    past = [(spec.dtype, spec.shape) for spec in contract.inputs if spec.name.startswith("past_")]
    present = [(spec.dtype, spec.shape) for spec in contract.outputs if spec.name.startswith("present_")]
    assert past == present
    assert past[0] == ("float16", (1, 2, "C", 16))


def test_exit_gives_the_best_candidates() -> None:
    contract = exit_contract(TARGET, "exit2", num_candidates=16)
    assert [(spec.name, spec.shape) for spec in contract.outputs] == [
        ("exit_ids", (1, "S", 16)),
        ("exit_logprobs", (1, "S", 16)),
    ]


def test_draft_tips_hold_main_and_streams() -> None:
    contract = draft_contract(DRAFT)
    assert contract.outputs[0].shape == ("R", 4, 5)
    assert {spec.name: spec.shape for spec in contract.inputs}["mask"] == (1, 1, "N", "C+N")
    assert contract.outputs[-1].name == "new_value.1"
    assert contract.outputs[-1].shape == (1, 1, "N", 8)
