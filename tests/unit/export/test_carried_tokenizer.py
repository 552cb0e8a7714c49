"""What a bundle's tokenizer makes of text and chats, against transformers on the checkpoint that it came from."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mirrorsd.export.checkpoints.carried_files import copy_tokenizer
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.verify.text import PARITY_TEXT
from mirrorsd.graphs.manifest import SourceModel
from mirrorsd.texts.tokenizer import BundleTokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<unk>"]
FRAGMENTS = (
    *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u200b", "\ufeff", "\x00"),
    *("é", "e\u0301", "Å", "ﬁ", "ß", "İ", "ا\u0644", "日本語", "한국어", "हिन्दी"),
    *("👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "𝔘", "\U0010ffff", "½", "x²", "don't", "I'LL", "3.14159", "1,000"),
    *("<|end|>", "<|im_start|>user", "<unk>", "< |end|>", "<|", "a_b-c/d\\e", "def f(x):\n    return x", "{{ x }}"),
    *("▁", "Ġ", "##ing"),
)
TEXTS = tuple(
    dict.fromkeys(
        itertools.chain(
            FRAGMENTS,
            (f"{one}{other}" for one, other in itertools.pairwise(FRAGMENTS)),
            (f" {one}  {other}\n" for one, other in zip(FRAGMENTS, FRAGMENTS[3:], strict=False)),
            (f"The {one}lamp{other}." for one, other in zip(FRAGMENTS, FRAGMENTS[7:], strict=False)),
            (one * 3 for one in FRAGMENTS),
            (f"{one}\n\n{one} {one}" for one in FRAGMENTS),
        )
    )
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "special tokens": "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "[{{ ns.n }}:{{ m.role }}] {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}",
    "generation blocks": "{% for m in messages %}\n{%- if m.role == 'assistant' %}\n  {%- generation -%} "
    "{{ m.content }}"
    "<|im_end|> {%- endgeneration -%} \n{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}",
    "json and loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}"
    "{{ m | tojson(indent=2) }}{% endfor %}",
}
CHATS = (
    [
        {"role": "system", "content": 'Be brief. <b>é</b> & "quotes"'},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello 👋"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    [
        {"role": "user", "content": "日本語?"},
        {"role": "assistant", "content": "<|im_end|>はい"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "1\r\n2"},
        {"role": "user", "content": "don't  stop"},
    ],
)


def byte_level() -> tuple[Tokenizer, Any]:
    """As in Llama 3, Qwen and GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)


def byte_fallback() -> tuple[Tokenizer, Any]:
    """As in Llama 2, Mistral and Gemma: spaces become a letter, unknown letters bytes; a first token is added."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", pair="<|end|> $A $B", special_tokens=[("<|end|>", 0)]
    )
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=tokens)


def unigram() -> tuple[Tokenizer, Any]:
    """As in models with SentencePiece's other kind of vocabulary, with limits left over from training."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>")


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, unigram], ids=lambda kind: kind.__name__)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    tokenizer, trainer = request.param()
    trainer.show_progress = False
    tokenizer.train_from_iterator([PARITY_TEXT], trainer)
    if request.param is unigram:
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if request.param is unigram:
        settings |= {"bos_token": {"content": "<unk>", "__type": "AddedToken"}, "added_tokens_decoder": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|end|>"}))
    return folder


def carried(folder: Path, bundle: Path) -> BundleTokenizer:
    source = SourceModel(name="target", family="llama", licence="unknown", num_parameters=1)
    copy_tokenizer(Checkpoint(folder=folder, role="target", config={}, generation={}, source=source), bundle)
    return BundleTokenizer(bundle)


def test_tricky_texts_become_the_same_ids_and_text(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert len(TEXTS) >= 200
    theirs, ours = AutoTokenizer.from_pretrained(checkpoint), carried(checkpoint, tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        whole = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == whole, text
        decoder = ours.decoder()
        assert "".join([*map(decoder.push, ids), decoder.finish()]) == whole, text


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_become_the_same_ids(template: str, checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (checkpoint / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8", newline="")
    theirs, ours = AutoTokenizer.from_pretrained(checkpoint), carried(checkpoint, tmp_path)
    for chat in CHATS:
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_texts_are_cut_as_the_file_says_whatever_the_class_of_transformers_makes_of_it(tmp_path: Path) -> None:
    """SmolLM2's file splits digits; the class that its settings name has a way of its own, and no word about it."""
    (tmp_path / "model").mkdir()
    tokenizer, trainer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.train_from_iterator(["1234 12 12\n\n12 a\n\nb"] * 9, trainer)
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "add_prefix_space": False}
    (tmp_path / "bundle").mkdir()
    for name, content in (("tokenizer_config", settings), ("config", {"model_type": "llama"})):
        (tmp_path / "model" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    source = SourceModel(name="tiny", family="llama", licence="unknown", num_parameters=1)
    target = Checkpoint(folder=tmp_path / "model", role="target", config={}, generation={}, source=source)
    with pytest.warns(RuntimeWarning, match="cuts texts otherwise than GPT2Tokenizer of transformers"):
        copy_tokenizer(target, tmp_path / "bundle")
    found = BundleTokenizer(tmp_path / "bundle")
    for text in ("a\n\n12 34", "1234"):
        assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
