"""What the peers' models keep of a checkpoint: best tokens, and perplexity, on the end of a text.

    python bench/claims/peers/int4_quality.py CHECKPOINT TEXT CACHE/openvino/NAME-int4 \
        CACHE/onnxruntime/NAME-int4 CACHE/llama.cpp/NAME-int4.gguf

The text's last four windows of 256 tokens, as in `mirrorsd export`'s own report. A GGUF file's weights are computed
with in floats.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import openvino as ov
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, NUM_WINDOWS = 256, 4
Array = npt.NDArray[Any]
Run = Callable[[Array], Array]
"""Logits `[L, V]` after ids `[L]`."""


def main() -> None:
    """Print a line per model."""
    checkpoint, text, *models = (Path(word) for word in sys.argv[1:])
    ids = AutoTokenizer.from_pretrained(checkpoint)(text.read_text(encoding="utf-8"), add_special_tokens=False)
    whole = ids["input_ids"][: len(ids["input_ids"]) // WINDOW * WINDOW]
    windows = np.array(whole, np.int64).reshape(-1, WINDOW)[-NUM_WINDOWS:]
    reference = run_over(torch_run(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)), windows)
    for model in models:
        found = run_over(run_of(model), windows)
        kept = np.mean([(a.argmax(-1) == b.argmax(-1)).mean() for a, b in zip(found, reference, strict=True)])
        rise = np.exp(mean_loss(found, windows) - mean_loss(reference, windows)) - 1
        print(f"{model}: {kept:.1%} of the best tokens, perplexity {rise:+.1%}")


def run_over(run: Run, windows: Array) -> list[Array]:
    """Each window on its own."""
    return [run(window) for window in windows]


def run_of(model: Path) -> Run:
    """The model of whichever runtime."""
    if model.suffix == ".gguf":
        return torch_run(AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32))
    return openvino_run(model) if (model / "openvino_model.xml").is_file() else onnx_run(model)


def torch_run(network: Any) -> Run:
    """One in PyTorch."""

    def run(ids: Array) -> Array:
        with torch.no_grad():
            logits: Array = network(torch.from_numpy(ids)[None]).logits[0].numpy()
        return logits

    return run


def openvino_run(model: Path) -> Run:
    """One with a hidden cache."""
    compiled = ov.Core().compile_model(model / "openvino_model.xml", "CPU")
    request = compiled.create_infer_request()
    known = {name for port in compiled.inputs for name in port.get_names()}

    def run(ids: Array) -> Array:
        request.reset_state()
        given = inputs_for(ids) | {"beam_idx": np.zeros(1, np.int32)}
        found = request.infer({name: value for name, value in given.items() if name in known})
        return np.array(found[compiled.output("logits")][0])

    return run


def onnx_run(model: Path) -> Run:
    """One with its cache among the inputs, empty here."""
    session = ort.InferenceSession(str(model / "model.onnx"), providers=["CPUExecutionProvider"])
    sizes = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    cache = np.zeros((1, sizes["num_key_value_heads"], 0, sizes["head_size"]), np.float32)

    def run(ids: Array) -> Array:
        given = inputs_for(ids)
        return np.array(session.run(["logits"], {p.name: given.get(p.name, cache) for p in session.get_inputs()})[0][0])

    return run


def inputs_for(ids: Array) -> dict[str, Array]:
    """A whole text at once."""
    size = len(ids)
    given = {"input_ids": ids[None], "attention_mask": np.ones((1, size), np.int64)}
    return given | {"position_ids": np.arange(size, dtype=np.int64)[None]}


def mean_loss(logits: list[Array], windows: Array) -> float:
    """Nats per token, of the tokens that really come next."""
    losses = [
        torch.nn.functional.cross_entropy(torch.from_numpy(rows[:-1]).float(), torch.from_numpy(window[1:])).item()
        for rows, window in zip(logits, windows, strict=True)
    ]
    return float(np.mean(losses))


if __name__ == "__main__":
    main()
