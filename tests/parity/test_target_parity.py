"""The composed stages against Hugging Face's whole model, through plain `session.run` with caches passed by value."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers import AutoModelForCausalLM

from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.contract import exit_contract, segment_contract
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.texts.config import SpeculationConfig
from mirrorsd.texts.speculation import check_fits

TOLERANCE = 1e-4


class ChainOfSegments:
    """Segments run one after the other; every call gives what it fed and gets logits at all rows."""

    def __init__(self, pair: Any) -> None:
        self.target = pair.manifest.target
        stages = (*self.target.segments, *self.target.exits)
        self.sessions = {
            stage.name: ort.InferenceSession(str(pair.bundle / stage.file), providers=["CPUExecutionProvider"])
            for stage in stages
        }
        shape = self.target.shape
        size = (1, shape.num_kv_heads, self.target.capacity, shape.head_dim)
        self.caches = {
            f"past_{kind}.{layer}": np.zeros(size, np.float32)
            for layer in range(shape.num_layers)
            for kind in ("key", "value")
        }

    def __call__(self, ids: list[int], start: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        total = start + len(ids) + self.target.spare_rows
        flowing, hidden = np.array([ids]), {}
        for segment in self.target.segments:
            session = self.sessions[segment.name]
            given = {
                "input_ids": flowing,
                "hidden": flowing,
                "logit_rows": np.arange(len(ids)),
                "seqlens_k": np.array([total - 1], np.int32),
                "total_length": np.array(total, np.int32),
            } | self.caches
            outputs = [value.name for value in session.get_outputs()]
            feeds = {value.name: given[value.name] for value in session.get_inputs()}
            results = dict(zip(outputs, session.run(outputs, feeds), strict=True))
            self.caches |= {n.replace("present", "past"): v for n, v in results.items() if n.startswith("present")}
            flowing = results[outputs[0]]
            hidden[segment.end_layer] = flowing
        logits = hidden.pop(self.target.shape.num_layers)[0]
        np.testing.assert_array_equal(results["argmax_ids"][0], logits.argmax(-1))
        top_two = np.sort(logits, axis=-1)[:, -2:]
        np.testing.assert_allclose(results["argmax_gap"][0], top_two[:, 1] - top_two[:, 0], rtol=1e-6)
        return logits, hidden


def _whole(pair: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("name", ["llama_pair", "qwen3_pair"])
def test_prefill_rows_window_and_rollback_match_the_whole_model(name: str, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(name)
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 320, 200).tolist()
    with torch.no_grad():
        expected = _whole(pair)(torch.tensor([ids])).logits[0].numpy()
    chain, found = ChainOfSegments(pair), []
    found.append(chain(ids[:120], 0)[0])
    found += [chain([ids[row]], row)[0] for row in range(120, 130)]
    rejected = rng.integers(0, 320, 6).tolist()
    found.append(chain([*ids[130:133], *rejected], 130)[0][:3])
    found.append(chain(ids[133:141], 133)[0])
    found.append(chain(ids[141:], 141)[0])
    joined = np.concatenate(found)
    assert np.abs(joined - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(joined.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ["llama_pair", "qwen3_pair"])
def test_exits_match_norm_head_and_adapter(name: str, request: pytest.FixtureRequest) -> None:
    from safetensors.torch import load_file

    pair = request.getfixturevalue(name)
    model = _whole(pair)
    ids = list(range(20, 60))
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hidden_by_layer = ChainOfSegments(pair)(ids, 0)[1]
    chain = ChainOfSegments(pair)
    path = pair.target / "exit_adapters.safetensors"
    adapters = load_file(path) if path.is_file() else {}
    for point in pair.manifest.target.exits:
        state = states[point.layer]
        np.testing.assert_allclose(hidden_by_layer[point.layer], state.numpy(), atol=TOLERANCE)
        if point.adapter_rank:
            down, up = (adapters[f"layers.{point.layer}.{part}.weight"] for part in ("down", "up"))
            state = state + state @ down.T @ up.T
        with torch.no_grad():
            best = torch.log_softmax(model.lm_head(model.model.norm(state)), dim=-1).topk(16)
        found_ids, found_logprobs = chain.sessions[point.name].run(None, {"hidden": hidden_by_layer[point.layer]})
        np.testing.assert_array_equal(found_ids, best.indices.numpy())
        np.testing.assert_allclose(found_logprobs, best.values.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama_pair", "qwen3_pair"])
def test_stages_have_exactly_the_contract_s_inputs_and_outputs(name: str, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(name)
    target = pair.manifest.target
    spans = {s.name: {"first_layer": s.first_layer, "end_layer": s.end_layer} for s in target.segments}
    contracts = [(s.file, segment_contract(target.shape, s.name, **spans[s.name])) for s in target.segments]
    contracts += [(e.file, exit_contract(target.shape, e.name, num_candidates=e.num_candidates)) for e in target.exits]
    for file, contract in contracts:
        graph = onnx.load(pair.bundle / file, load_external_data=False).graph
        for values, specs in ((graph.input, contract.inputs), (graph.output, contract.outputs)):
            assert [value.name for value in values] == [spec.name for spec in specs]
            for value, spec in zip(values, specs, strict=True):
                tensor = value.type.tensor_type
                assert onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) == np.dtype(spec.dtype)
                assert tuple(d.dim_param or d.dim_value for d in tensor.shape.dim) == spec.shape


def test_graphs_are_tight(llama_pair: Any) -> None:
    """Rotary and norms are folded: one attention with its spare row, four products and two norms per layer, no more."""
    graph = onnx.load(llama_pair.bundle / "target" / "prefix.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("GroupQueryAttention") == kinds.count("Pad") == kinds.count("Slice") == 2
    assert kinds.count("MatMul") == 8
    assert set(kinds) == {
        "Gather",
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "MatMul",
        "Split",
        "Pad",
        "GroupQueryAttention",
        "Slice",
        "Sigmoid",
        "Mul",
        "Add",
    }


@pytest.mark.parametrize(("exits", "expected"), [(None, [1, 2]), ((), []), ((2,), [2])])
def test_only_the_chosen_exits_are_run(
    qwen3_pair: Any, exits: tuple[int, ...] | None, expected: list[int], bound: dict[str, Any]
) -> None:
    """A bundle with two borders; an exit that is not chosen costs no run, and the target's answer is the same."""
    heard: list[int] = []
    ledger = Ledger()
    output = bound["session"].run(
        np.arange(8),
        0,
        with_logits=True,
        ledger=ledger,
        on_exit=lambda guesses: heard.append(guesses.layer),
        exits=exits,
    )
    assert heard == expected
    assert sum(span.name == "exit" for span in ledger.spans) == len(expected)
    np.testing.assert_array_equal(output.logits, bound["logits"])


@pytest.fixture(scope="module")
def bound(qwen3_pair: Any) -> dict[str, Any]:
    """A session of the runtime, and what it says of eight rows."""
    placement = load_device_map("cpu").target
    session = OnnxTargetModel(qwen3_pair.bundle, qwen3_pair.manifest.target, placement).new_session()
    output = session.run(np.arange(8), 0, with_logits=True, ledger=Ledger())
    return {"session": session, "logits": output.logits.copy()}


def test_exits_that_a_bundle_does_not_have_are_refused(qwen3_pair: Any) -> None:
    listening = SpeculationConfig(root_source="progressive", exits=(1, 2))
    check_fits(listening, qwen3_pair.manifest.target)
    with pytest.raises(ConfigError, match=r"exits names layer 3; this bundle has exits after layers \[1, 2\]"):
        check_fits(replace(listening, exits=(1, 3)), qwen3_pair.manifest.target)
