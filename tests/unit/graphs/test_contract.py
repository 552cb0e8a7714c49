"""The stage contracts, on the sizes of a small model."""

from mirrorsd.graphs import (
    DraftShape,
    HeadShape,
    TargetShape,
    draft_contract,
    exit_contract,
    head_contract,
    segment_contract,
)

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


def test_segments_give_the_taps_behind_their_layers_and_nothing_else() -> None:
    """A tap at a border is the segment's hidden state itself; 5 is behind the final norm of four layers."""
    taps = (1, 2, 3, 4, 5)
    spans = {"prefix": (0, 2), "middle": (2, 3), "suffix": (3, 4)}
    found = {
        name: [
            spec.name
            for spec in segment_contract(TARGET, name, first_layer=first, end_layer=end, taps=taps).outputs
            if spec.name.startswith("tap")
        ]
        for name, (first, end) in spans.items()
    }
    assert found == {"prefix": ["tap.1"], "middle": [], "suffix": ["tap.4", "tap.5"]}
    bare, tapped = (segment_contract(TARGET, "suffix", first_layer=3, end_layer=4, taps=some) for some in ((), (1, 2)))
    assert bare == tapped


def test_a_head_takes_taps_tokens_and_noise_and_gives_a_chain() -> None:
    shape = HeadShape(taps=(1, 5), length=3, num_candidates=2, num_layers=1, num_kv_heads=2, head_dim=8)
    contract = head_contract(TARGET, shape, "head-eagle3")
    assert {spec.name: spec.shape for spec in contract.inputs} == {
        "tap.1": (1, "S", 64),
        "tap.5": (1, "S", 64),
        "tokens": (1, "R"),
        "start": (1,),
        "noise": (3, 100),
        "past_key.0": (1, 2, "C", 8),
        "past_value.0": (1, 2, "C", 8),
    }
    assert [spec.name for spec in contract.outputs] == ["ids", "logprobs", "present_key.0", "present_value.0"]
    assert contract.outputs[0].shape == (3, 2)
