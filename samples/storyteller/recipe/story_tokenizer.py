"""The storyteller's tokenizer: byte-level BPE of 4,096 tokens, digits one by one, and its chat form."""

from __future__ import annotations

import json
from pathlib import Path

from corpus_mix import Document, Turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_SIZE = 4096
PAD, BOS, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = (
    "<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception(\"Unknown role '\" + message['role'] + \"'; use system, user or assistant\") }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def render(turns: Turns) -> str:
    """Write a document as one string with its special tokens.

    >>> render([("text", "Once.")]), render([("user", "Hi"), ("assistant", "Hello.")])
    ('<|bos|>Once.<|end|>', '<|bos|><|user|>Hi<|end|><|assistant|>Hello.<|end|>')
    """
    marks = {"text": "", "user": USER, "assistant": ASSISTANT, "system": SYSTEM}
    return BOS + "".join(f"{marks[role]}{text}{END}" for role, text in turns)


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Train the BPE on the text of the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for document in documents for _, text in document.turns)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and `special_tokens_map.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    config = {
        **names,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
