"""Does a bundle write what Hugging Face's `generate` writes? Greedy texts of chat prompts, token by token.

    python bench/claims/models/published_parity.py pair.mirror --target TARGET --prompts prompts.jsonl

TARGET is the folder or the GGUF file that the bundle was exported from. An fp32 bundle differs where two
tokens are nearly tied, if at all: the report gives the place of the first difference and Hugging Face's gap there
between its token and ours. Without --target the methods are compared with plain decoding alone, which must hold at
every precision and at every one of the `--temperatures`.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.graphs.errors import ContextLengthError


class HuggingFace:
    """The target in PyTorch, in float32."""

    def __init__(self, path: Path) -> None:
        place: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.suffix == ".gguf":
            place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**place, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, local_files_only=True)
        self.model = model.eval()

    def greedy(self, messages: runs.Messages, num_tokens: int) -> tuple[list[int], list[int]]:
        """Ids of the prompt, by the tokenizer's own chat template, and of the answer."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        settings = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": num_tokens}
        whole = self.model.generate(**prompt, **settings)[0].tolist()
        num_given = prompt["input_ids"].shape[1]
        return whole[:num_given], whole[num_given:]

    def gap(self, ids: list[int], ours: int) -> float:
        """How far the logit of the token `ours` is below the best one behind `ids`."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        return float(logits.max() - logits[ours])


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Place of the first token that differs; None where the texts are equal.

    >>> first_difference([3, 4, 5], [3, 4]), first_difference([3, 4], [3, 4])
    (2, None)
    """
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))


def by_methods(
    pipe: MirrorPipeline, messages: runs.Messages, asked: argparse.Namespace, heat: float
) -> tuple[GenerationResult, dict[str, Any]]:
    """One prompt at one temperature: the plain text, and whether the other methods' texts are the same."""
    config = GenerationConfig(max_new_tokens=asked.tokens, temperature=heat, seed=1 if heat else None)
    results = {
        method: pipe.generate(messages=messages, config=config, method=method)
        for method in dict.fromkeys(("plain", *asked.methods))
    }
    plain = results.pop("plain")
    found: dict[str, Any] = {"tokens": len(plain.token_ids), "ended_by": plain.stop_reason}
    return plain, found | {method: result.token_ids == plain.token_ids for method, result in results.items()}


def compare(pipe: MirrorPipeline, whole: HuggingFace | None, messages: runs.Messages, asked: Any) -> dict[str, Any]:
    """One prompt: our plain text against Hugging Face's, the other methods against plain."""
    plain, found = by_methods(pipe, messages, asked, 0.0)
    for heat in asked.temperatures:
        sampled = by_methods(pipe, messages, asked, heat)[1] if heat else {}
        found |= {f"{name}, T={heat:g}": value for name, value in sampled.items()}
    if whole is not None:
        prompt, theirs = whole.greedy(messages, asked.tokens)
        place = first_difference(plain.token_ids, theirs)
        found |= {"same_prompt": prompt == plain.prompt_ids, "same_as_hugging_face": place is None}
        if place is not None:
            found["first_difference"] = place
            ours = plain.token_ids[place : place + 1]
            found["gap"] = whole.gap(prompt + theirs[:place], ours[0]) if ours else None
    return found


def main() -> None:
    """Compare on every prompt; print and write the report."""
    parser = runs.parser(__doc__, count=10, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target", type=Path, help="the Hugging Face folder that the bundle was exported from")
    parser.add_argument("--methods", nargs="+", default=["plain"], choices=["plain", "serial", "mirror", "auto"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of the methods' texts")
    parser.add_argument("--device-map", default="cpu")
    options: argparse.Namespace = parser.parse_args()
    whole = None if options.target is None else HuggingFace(options.target)
    report = runs.header(options.bundle, device_map=options.device_map, tokens=options.tokens, rows=[])
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        # Prompts that leave no room in the bundle's context are passed over; twice as many are at hand.
        for number, messages in enumerate(runs.spread_prompts(options.prompts, 2 * options.count)):
            if len(report["rows"]) == options.count:
                break
            with suppress(ContextLengthError):
                report["rows"].append({"prompt": number, **compare(pipe, whole, messages, options)})
                print(report["rows"][-1], flush=True)
    checks = [value for row in report["rows"] for value in row.values() if isinstance(value, bool)]
    report["all_same"] = all(checks)
    runs.finish(report, options.output)


if __name__ == "__main__":
    main()
