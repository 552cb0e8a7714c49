"""Write a small draft that has learned nothing, for a target whose heads or `lookup` are to do the guessing.

    python samples/blank_draft.py TARGET OUT
    mirrorsd export TARGET --draft OUT --head HEAD -o pair.mirror

A bundle has a draft, and some targets have no small sibling that can be one: Qwen3.5 and 3.6, gpt-oss. This one has
the target's tokens and one narrow layer of random numbers, so it is hardly ever right and costs next to nothing: `auto`
soon leaves it alone. TARGET is a Hugging Face folder; of its weights none is read.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
WIDTH = 64


def write_blank(target: Path, out: Path) -> None:
    """Write a random Llama with the tokens, positions and tokenizer of `target` into the folder `out`.

    Raises:
        SystemExit: `target` is no Hugging Face folder, or `out` itself.
    """
    if out.resolve() == target.resolve():
        raise SystemExit(f"{out} is the target itself, which would be lost; give another folder as OUT")
    if not (target / "config.json").is_file():
        raise SystemExit(f"{target} has no config.json; give a Hugging Face folder")
    whole = AutoConfig.from_pretrained(target, local_files_only=True)
    text = whole.get_text_config()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id if text.eos_token_id is not None else whole.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    for path in (path for pattern in SMALL_FILES for path in target.glob(pattern)):
        shutil.copy(path, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="Hugging Face folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    asked = parser.parse_args()
    write_blank(asked.target, asked.out)
