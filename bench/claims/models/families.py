"""Do all methods write plain decoding's text on a family's models? A random checkpoint of it, exported and asked.

    python bench/claims/models/families.py --family qwen3_5_text --texts 200
    python bench/claims/models/families.py --family gpt_oss --family qwen3_next --precision int8 --output families.json

Each text is a random prompt of 1 to 60 tokens, answered by plain decoding in a new session, and then by every method in
a session that goes on from text to text, greedily and at T = 0.8 by turns. By turns, too, the session has just written
something else (`fresh`), goes back into the answer and on from there (`rewind`), gives three answers to one prompt
(`branch`), or is saved and restored in another session (`saved`). Random models: nothing here says how fast or how
good a family is. A draft that shares nothing with the target is rarely right, so nearly every window has rejected rows;
random models repeat themselves, so `lookup` is often right.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.families.registry import FAMILIES
from mirrorsd.graphs.names import Method
from mirrorsd.runtime.session import MirrorSession

METHODS: tuple[Method, ...] = ("serial", "mirror", "auto", "lookup")
FORMS = ("fresh", "rewind", "branch", "saved")
VOCABULARY, CONTEXT, LONGEST_PROMPT, TOKENS, ANSWERS = 320, 384, 60, 20, 3
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
    "sliding_window": 48, "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48, "full_attn_idxs": [1],
}  # fmt: skip
"""Sizes of random models, as far as a family's config has the entry; everything else is transformers' default."""
TOKEN_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
WITH_OWN_HEAD = "qwen3_5_text"


def main() -> None:
    """Make, export and ask one family after the other; print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, action="append", required=True)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"precision": options.precision, "ends": "ignored", "families": {}}
    for family in options.family:
        with tempfile.TemporaryDirectory() as work:
            bundle = exported(Path(work), family, options.precision)
            report |= runs.header(bundle)
            report["families"][family] = found = asked(bundle, options.texts, Path(work) / "cache")
        print(json.dumps({family: found}), flush=True)
    report.pop("bundle", None)
    runs.finish(report, options.output)
    if any(found["different"] for found in report["families"].values()):
        raise SystemExit(1)


def exported(work: Path, family: str, precision: str) -> Path:
    """A random pair of the family, and its bundle."""
    write_checkpoint(work / "target", family, seed=5)
    if family == WITH_OWN_HEAD:
        add_own_head(work / "target")
    write_checkpoint(work / "draft", "llama", seed=2)
    options = ExportOptions(
        precision=precision, products="blocks", context=CONTEXT, exit_layers=(2,), num_exit_candidates=4
    )
    export_pair(work / "target", work / "draft", work / f"{family}.mirror", options)
    return work / f"{family}.mirror"


@torch.no_grad()
def randomise(network: torch.nn.Module) -> None:
    """Let norms, biases and sinks say something, and states remember more than the row before."""
    for name, parameter in network.named_parameters():
        if "norm" in name or name.endswith(("bias", "sinks")):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        elif name.endswith("A_log"):
            parameter.uniform_(-5.0, -1.0)


def write_checkpoint(folder: Path, family: str, *, seed: int) -> None:
    """A random model with a tokenizer of single bytes; norms, biases and sinks are random, too."""
    torch.manual_seed(seed)
    kind: Any = CONFIG_MAPPING[family]
    known = kind().to_dict()
    config = kind(**{name: size for name, size in SMALL.items() if name in known}, **TOKEN_IDS)
    network: Any = AutoModelForCausalLM.from_config(config)
    randomise(network)
    network.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{letter: number + 1 for number, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")


def add_own_head(folder: Path) -> None:
    """Write a head for further tokens as published checkpoints have it: a layer like the last one, norms and `fc`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = f"model.layers.{SMALL['num_hidden_layers'] - 1}."
    shapes: dict[str, Sequence[int]] = {
        f"layers.0.{name.removeprefix(last)}": one.shape for name, one in tensors.items() if last in name
    }
    hidden = SMALL["hidden_size"]
    shapes |= dict.fromkeys(("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"), (hidden,))
    shapes["fc.weight"] = (hidden, 2 * hidden)
    tensors |= {f"mtp.{name}": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    save_file(tensors, path, {"format": "pt"})


def asked(bundle: Path, num_texts: int, cache: Path) -> dict[str, Any]:
    """Ask for so many texts; count by method, form and temperature those that are plain decoding's; name the others."""
    dice = np.random.default_rng(1)
    same: Counter[str] = Counter()
    different: list[dict[str, Any]] = []
    with MirrorPipeline.load(bundle, device_map="cpu", use_tuned=False) as pipe:
        methods = (*METHODS, *(cast(Method, head.kind) for head in pipe.manifest.heads))
        sessions = {method: pipe.session() for method in methods}
        for number in range(num_texts):
            prompt = dice.integers(1, VOCABULARY - 64, int(dice.integers(1, LONGEST_PROMPT + 1))).tolist()
            form, temperature = FORMS[number % len(FORMS)], 0.8 * (number // len(FORMS) % 2)
            settings = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": temperature, "seed": number}
            if not temperature:
                del settings["seed"]
            for method, session in sessions.items():
                case = f"{method} {form} T={temperature}"
                pairs = texts_of(pipe, session, (method, form, prompt), settings, cache)
                if all(found == expected for found, expected in pairs):
                    same[case] += 1
                else:
                    different.append({"case": case, "text": number, "prompt": prompt})
        for session in sessions.values():
            session.close()
    return {"texts": num_texts, "methods": methods, "same": dict(same), "different": different}


def texts_of(
    pipe: MirrorPipeline, session: MirrorSession, case: tuple[Method, str, list[int]], settings: Any, cache: Path
) -> list[tuple[list[int], list[int]]]:
    """What the method wrote in this form, each beside plain decoding's in a new session."""
    method, form, prompt = case
    if form == "branch":
        several = session.generate_several(ANSWERS, token_ids=prompt, **settings)
        seeds = [{} if answer.seed is None else {"seed": answer.seed} for answer in several]
        alone = [plain(pipe, prompt, settings | seed) for seed in seeds]
        pairs = [(list(one.token_ids), truth) for one, truth in zip(several, alone, strict=True)]
        return [*pairs, (list(session.generate(token_ids=prompt, method=method, **settings).token_ids), alone[0])]
    first = list(session.generate(token_ids=prompt, method=method, **settings).token_ids)
    pairs = [(first, plain(pipe, prompt, settings))]
    if form == "rewind":
        back = [*prompt, *first[: len(first) // 3], 7]
        for ids in (back, prompt):
            found = session.generate(token_ids=ids, method=method, **settings)
            pairs.append((list(found.token_ids), plain(pipe, ids, settings)))
    elif form == "saved":
        session.save_cache(cache)
        longer = [*prompt, *first]
        with pipe.session() as other:
            other.load_cache(cache)
            found = other.generate(token_ids=longer, method=method, **settings)
        pairs.append((list(found.token_ids), plain(pipe, longer, settings)))
    return pairs


def plain(pipe: MirrorPipeline, prompt: list[int], settings: Any) -> list[int]:
    """Plain decoding's text in a session of its own."""
    with pipe.session() as session:
        return list(session.generate(token_ids=prompt, method="plain", **settings).token_ids)


if __name__ == "__main__":
    main()
