import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mirrorsd.export.checkpoints.carried_files import generation_defaults, tell_what_is_not_followed, token_entry
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import TokenEntry
from mirrorsd.graphs.quality_bounds import end_warnings

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_sizes_licence_and_ids_are_read(checkpoint: Path) -> None:
    (checkpoint / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Model\n")
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "temperature": 0.6}))
    found = open_checkpoint(checkpoint, "target")
    assert found.source.num_parameters == 10
    assert found.source.licence == "apache-2.0"
    assert found.source.family == "llama"
    assert found.eos_ids == (3, 2)
    assert found.token_id("bos_token_id") == 1
    assert found.token_id("pad_token_id") is None


def test_a_special_token_that_the_vocabulary_lacks_is_none(checkpoint: Path) -> None:
    given = {"pad_token_id": -1, "bos_token_id": 1, "eos_token_id": [3, 8]}
    (checkpoint / "generation_config.json").write_text(json.dumps(given))
    entry = token_entry(open_checkpoint(checkpoint, "target"))
    assert (entry.eos_ids, entry.bos_id, entry.pad_id) == ((3, 2), 1, None)


def test_licence_file_is_recognised_and_else_unknown(checkpoint: Path) -> None:
    assert open_checkpoint(checkpoint, "target").source.licence == "unknown"
    (checkpoint / "LICENSE").write_text("MIT License\n\nCopyright")
    assert open_checkpoint(checkpoint, "target").source.licence == "MIT"


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _lengthen(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"123")


def _break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 20) + b"x" * 40)


def _write_index(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")


def _configure(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "has no config.json: not a complete Hugging Face checkpoint",
        ),
        (lambda folder: (folder / "config.json").write_text("{oops"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has config.json but no model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
            "holds .*safetensors files, and neither .* fetch the rest",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"abc"),
            "truncated: 3 bytes cannot hold its header",
        ),
        (_truncate, r"is truncated: \d+ bytes, its header says \d+"),
        (_lengthen, "is damaged"),
        (_break_header, "its header is not JSON"),
        (_write_index, "lacks model-2.safetensors, which its index names"),
        (_configure(model_type="new"), "has model_type 'new', which is not supported; supported are llama, qwen2"),
        (
            _configure(model_type="qwen3_moe", num_experts=2**31),
            "has num_experts 2147483648; .* fewer than one for each",
        ),
        (
            _configure(model_type="qwen3_moe", num_experts_per_tok=0),
            "has num_experts_per_tok 0; expected a whole number",
        ),
        (_configure(model_type="mixtral"), "its mixtures of experts are of another form than Qwen3's"),
        (_configure(model_type="mamba"), "not supported: it has state-space layers of another kind"),
        (_configure(model_type="gemma3"), "it takes images too"),
        (_configure(model_type="gemma2", use_bidirectional_attention=True), "attention in both directions is not"),
        (_configure(is_causal=False), "is_causal to false in config.json: attention in both directions is not"),
        (
            _configure(model_type="qwen2_moe", use_sliding_window=True),
            "a sliding window of this family is not supported",
        ),
        (_configure(model_type="gpt2", add_cross_attention=True), "cross-attention is not supported"),
        (_configure(model_type="gemma2", hidden_size=81), "contradicts itself: .*not a multiple"),
        (_configure(quantization_config={}), "is already quantised"),
        (_configure(head_dim=24), "head size 24; GroupQueryAttention needs a multiple of 16"),
        (_configure(hidden_size=80, num_attention_heads=2), "head size 40"),
        (_configure(rope_parameters={"rope_type": "new"}), "rope type 'new'; supported are default"),
        (_configure(rope_parameters={"full_attention": {"rope_type": "new"}}), "rope type 'new'; supported"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_what_is_wrong(
    checkpoint: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(ExportError, match=message):
        open_checkpoint(checkpoint, "target")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the draft .*nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere", "draft")


def test_every_end_token_and_every_default_of_sampling_is_carried_over(checkpoint: Path) -> None:
    defaults = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 200,
    }
    written = {"eos_token_id": [5, 3], "pad_token_id": 0, "transformers_version": "5.0", **defaults}
    (checkpoint / "generation_config.json").write_text(json.dumps(written))
    found = open_checkpoint(checkpoint, "target")
    assert token_entry(found) == TokenEntry(eos_ids=(5, 3, 2), bos_id=1, pad_id=0)
    assert generation_defaults(found) == defaults


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"do_sample": True, "temperature": -3}, "temperature is -3; allowed: 0"),
        ({"do_sample": True, "temperature": 10**400}, "temperature is 1000"),
        ({"do_sample": True, "top_p": 0}, "top_p is 0; allowed: above 0"),
        ({"do_sample": True, "top_k": -2}, "top_k is -2; allowed: 0"),
        ({"do_sample": 1, "top_k": 5.5}, "top_k is 5.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
    ],
)
def test_defaults_that_no_text_could_take_are_refused(checkpoint: Path, wrong: dict[str, Any], words: str) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ExportError, match=rf"generation_config.json cannot be taken: GenerationConfig.{words}"):
        generation_defaults(open_checkpoint(checkpoint, "target"))


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_a_temperature_of_nearly_nothing_is_greedy(checkpoint: Path, temperature: float) -> None:
    """Qwen2.5-VL's is 1e-6."""
    written = {"do_sample": True, "temperature": temperature, "repetition_penalty": 1.05}
    (checkpoint / "generation_config.json").write_text(json.dumps(written))
    found = generation_defaults(open_checkpoint(checkpoint, "target"))
    assert found == {"do_sample": False, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.0}, {"do_sample": False}),
        ({"do_sample": False, "temperature": 1e-6}, {"do_sample": False}),
        ({"top_p": 1.5, "max_new_tokens": -1, "top_k": 50.0}, {"top_k": 50}),
        ({"do_sample": 1, "top_k": 50.0, "top_p": 1}, {"do_sample": True, "top_k": 50, "top_p": 1}),
        ({"max_new_tokens": 2048.0}, {"max_new_tokens": 2048}),
    ],
)
def test_defaults_that_nobody_reads_stop_no_export(
    checkpoint: Path, written: dict[str, Any], taken: dict[str, Any]
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(written))
    assert generation_defaults(open_checkpoint(checkpoint, "target")) == taken


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"suppress_tokens": [3], "no_repeat_ngram_size": 3}, "no_repeat_ngram_size, suppress_tokens"),
        ({"do_sample": True, "typical_p": 0.9, "num_beams": 4}, "num_beams, typical_p"),
        ({"no_repeat_ngram_size": 1, "guidance_scale": 0, "sequence_bias": []}, "no_repeat_ngram_size, guidance_scale"),
        ({"typical_p": 0.9, "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": [], "top_p": 0.9}, ""),
        ({"do_sample": True, "typical_p": 1.0, "min_new_tokens": None, "max_length": 4096, "use_cache": True}, ""),
    ],
)
def test_defaults_that_no_bundle_follows_are_told(
    checkpoint: Path, written: dict[str, Any], named: str, recwarn: pytest.WarningsRecorder
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(written))
    tell_what_is_not_followed(open_checkpoint(checkpoint, "target"))
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == bool(named)
    assert all(f"generation_config.json names {named}, which no text of a bundle follows" in one for one in found)


def test_minus_one_is_every_token(checkpoint: Path) -> None:
    """As other engines write it."""
    (checkpoint / "generation_config.json").write_text(json.dumps({"top_k": -1, "top_p": 0.9}))
    assert generation_defaults(open_checkpoint(checkpoint, "target")) == {"top_p": 0.9}


@pytest.mark.parametrize("wrong", ["<|im_end|>", [2, None], -1, True, 2.0])
def test_an_end_token_that_is_no_id_is_refused(checkpoint: Path, wrong: Any) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ExportError, match=r"generation_config\.json says eos_token_id .*expected are token ids"):
        _ = open_checkpoint(checkpoint, "target").eos_ids


@pytest.mark.parametrize("named", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_where_no_config_ends_a_text_the_tokenizer_does(checkpoint: Path, file: str, named: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    document = {"added_tokens": [{"id": 5, "content": "<x>"}], "model": {"vocab": {"</s>": 2}}}
    (checkpoint / "tokenizer.json").write_text(json.dumps(document))
    nothing = open_checkpoint(checkpoint, "target")
    assert nothing.eos_ids == ()
    (warning,) = end_warnings(token_entry(nothing))
    assert warning.startswith("no token ends a text")
    (checkpoint / file).write_text(json.dumps({"eos_token": named}))
    assert open_checkpoint(checkpoint, "target").eos_ids == (2,)
    document["added_tokens"] = [{"id": 7, "content": "</s>"}]
    (checkpoint / "tokenizer.json").write_text(json.dumps(document))
    found = open_checkpoint(checkpoint, "target")
    assert found.eos_ids == (7,)
    assert end_warnings(token_entry(found)) == ()


@pytest.mark.parametrize(
    ("written", "licence"),
    [
        ("license: apache-2.0 # since 2024", "apache-2.0"),
        ("license: 'mit'", "mit"),
        ("license: [mit]", "mit"),
        ("license: [apache-2.0, mit]", "apache-2.0, mit"),
        ("license:\n- apache-2.0", "apache-2.0"),
        ("license:\n  - 'apache-2.0'\n  - mit", "apache-2.0, mit"),
        ("license:", "MIT"),
        ("license: null", "MIT"),
        ("license: []", "MIT"),
    ],
)
@pytest.mark.parametrize("text", ["LICENSE", "LICENCE.md"])
def test_a_licence_is_what_the_card_s_yaml_says_else_the_text_of_one(
    checkpoint: Path, written: str, licence: str, text: str
) -> None:
    (checkpoint / "README.md").write_text(f"---\nbase: x\n{written}\nlanguage: en\ntags:\n- a\n---\n# Model\n")
    (checkpoint / text).write_text("MIT License\n\nPermission is hereby granted")
    assert open_checkpoint(checkpoint, "target").source.licence == licence
