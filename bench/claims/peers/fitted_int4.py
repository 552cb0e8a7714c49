"""openvino-genai's int4 model of a checkpoint, as near to the original as its own tools make it by a text.

    python bench/claims/peers/fitted_int4.py CHECKPOINT TEXT OUTPUT

AWQ and scale estimation on windows of the text, blocks of 32 with zero points, and as much in eight bits as ours has
(`SHARE_OF_FOUR`). Runs where the peers are.
"""

import sys
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoTokenizer

WINDOW, NUM_WINDOWS, NUM_MEASURED = 256, 32, 4
"""Those that `mirrorsd export` fits its own int4 to; the last ones of the text are left for measuring."""
SHARE_OF_FOUR = 0.84
"""Of the layers' weights: that of SmolLM2, whose queries, keys and values have eight bits in our bundle."""


def main() -> None:
    """Write the model's folder."""
    checkpoint, text, output = (Path(word) for word in sys.argv[1:4])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if len(windows) <= NUM_MEASURED:
        raise SystemExit(f"{text} has {len(ids)} tokens; more than {NUM_MEASURED * WINDOW + WINDOW} are needed")
    fitted = [tokenizer.decode(window) for window in windows[-NUM_WINDOWS - NUM_MEASURED : -NUM_MEASURED]]
    config = OVWeightQuantizationConfig(
        bits=4,
        sym=False,
        group_size=32,
        ratio=SHARE_OF_FOUR,
        dataset=fitted,
        num_samples=len(fitted),
        quant_method="awq",
        scale_estimation=True,
        tokenizer=str(checkpoint),
    )
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, quantization_config=config, compile=False)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for name, converted in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        openvino.save_model(converted, output / f"openvino_{name}.xml")


if __name__ == "__main__":
    main()
