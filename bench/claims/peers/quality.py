"""What the peers' models keep of a checkpoint: best tokens, and perplexity, on the end of a text.

    python bench/claims/peers/quality.py CHECKPOINT TEXT CACHE/openvino/NAME-int4 \
        CACHE/onnxruntime/NAME-int4 CACHE/llama.cpp/NAME-int4.gguf --output CACHE/quality.json

The text's last four windows of 256 tokens, as in `mirrorsd export`'s own report; `export/verify/calibration.txt` is
what that takes without `--calibration`. A GGUF file's weights are computed with in floats. What the output says of
other models stays. Runs in the environment of mirrorsd's export.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mirrorsd.devices.openvino.core import new_core

WINDOW, NUM_WINDOWS = 256, 4
Array = npt.NDArray[Any]
Run = Callable[[Array], Array]
"""Logits `[L, V]` after ids `[L]`."""


def main() -> None:
    """Print a line per model, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = np.array(ids[: len(ids) // WINDOW * WINDOW], np.int64).reshape(-1, WINDOW)[-NUM_WINDOWS:]
    whole = torch_run(AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32))
    reference = run_over(whole, windows)
    del whole
    is_there = options.output is not None and options.output.is_file()
    known: dict[str, Any] = json.loads(options.output.read_text(encoding="utf-8")) if is_there else {}
    for model in options.models:
        found = run_over(run_of(model), windows)
        kept = np.mean([(a.argmax(-1) == b.argmax(-1)).mean() for a, b in zip(found, reference, strict=True)])
        rise = np.exp(mean_loss(found, windows) - mean_loss(reference, windows)) - 1
        print(f"{model}: {kept:.1%} of the best tokens, perplexity {rise:+.1%}")
        name = f"{model.parent.name}/{model.name.removesuffix('.gguf')}"
        known[name] = {"kept": round(float(kept), 4), "perplexity": round(float(rise), 4)}
    if options.output is not None:
        options.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


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
    compiled = new_core().compile_model(model / "openvino_model.xml", "CPU")
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
