"""What transformers' reader leaves out of a GGUF file is in the checkpoint, or the file is refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_writer import HEADS, HIDDEN
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaTokenizer,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.gguf_gaps import complete_config, complete_tokenizer
from mirrorsd.graphs.errors import ExportError
from mirrorsd.training.models.whole_model import load_whole

WriteGguf = Callable[..., Path]
HALF = HIDDEN // HEADS // 2
USUAL = 10000.0 ** -(np.arange(HALF) / HALF)


def frequencies(file: Path) -> Any:
    """By which the positions of the checkpoint are turned."""
    config: Any = AutoConfig.from_pretrained(open_checkpoint(file, "target").folder)
    rotary: Any = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.numpy()


def test_positions_without_a_word_are_the_usual_ones(write_gguf: WriteGguf) -> None:
    assert np.allclose(frequencies(write_gguf("Q8_0")), USUAL)


def test_llama_3_s_divisors_are_those_of_the_file(write_gguf: WriteGguf) -> None:
    """Its scaling is nowhere else: without it every position past the first few thousand is another one."""
    divisors = np.linspace(1, 8, HALF, dtype=np.float32)
    file = write_gguf("Q8_0", floats={"rope_freqs.weight": divisors})
    assert np.allclose(frequencies(file), USUAL / divisors)
    assert load_whole(file).config.rope_parameters["rope_type"] == "longrope"  # which is trained on, too


def test_scaled_positions_are_scaled(write_gguf: WriteGguf) -> None:
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert np.allclose(frequencies(write_gguf("Q8_0", more=scaled)), USUAL / 4)
    yarn = {**scaled, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128}
    rope = open_checkpoint(write_gguf("Q8_0", more=yarn), "target").config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)


def test_all_that_a_file_says_of_yarn_is_read_or_refused(write_gguf: WriteGguf) -> None:
    """As llama.cpp's converter writes it, of any family's config.json."""
    size = "llama.rope.scaling."
    yarn = {f"{size}type": "yarn", f"{size}factor": 4.0, f"{size}original_context_length": 128}
    turns = {f"{size}yarn_beta_fast": 4.0, f"{size}yarn_beta_slow": 2.0, f"{size}yarn_ext_factor": 1.0}
    rope = open_checkpoint(write_gguf("Q8_0", more=yarn | turns), "target").config["rope_parameters"]
    assert (rope["beta_fast"], rope["beta_slow"]) == (4.0, 2.0)
    for name, number in (("yarn_attn_factor", 0.5), ("yarn_ext_factor", 0.25), ("yarn_log_multiplier", 0.125)):
        with pytest.raises(ExportError, match=rf"has rope.scaling.{name} {number}, which is not read"):
            open_checkpoint(write_gguf("Q8_0", more=yarn | {f"{size}{name}": number}), "target")


def test_positions_of_an_unknown_kind_are_refused(write_gguf: WriteGguf) -> None:
    with pytest.raises(ExportError, match="scales its positions by 'spiral', which is not known"):
        open_checkpoint(write_gguf("Q8_0", more={"llama.rope.scaling.type": "spiral"}), "target")


def fields(**values: Any) -> dict[str, Any]:
    return {
        f"arch.{name.replace('__', '.')}": SimpleNamespace(contents=lambda v=value: v) for name, value in values.items()
    }


def test_phi_turns_a_part_of_a_head_by_two_sets_of_divisors() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 512}
    config = Phi3Config(**sizes, pad_token_id=0)
    short, long = np.linspace(1, 2, 6, dtype=np.float32), np.linspace(2, 9, 6, dtype=np.float32)
    tensors = {
        f"rope_factors_{name}.weight": SimpleNamespace(data=numbers)
        for name, numbers in (("short", short), ("long", long))
    }
    said = fields(rope__dimension_count=12, rope__scaling__original_context_length=64, attention__sliding_window=32)
    complete_config(config, Path("phi"), said | fields(rope__scaling__attn_factor=1.25), tensors)
    again = Phi3Config.from_dict(config.to_dict())
    rotary: Any = Phi3RotaryEmbedding(again)
    assert np.allclose(rotary.inv_freq.numpy(), 10000.0 ** -(np.arange(6) / 6) / short)
    assert (rotary.attention_scaling, again.sliding_window) == (1.25, 32)


def test_no_window_is_none() -> None:
    """Files of Phi-4 say 0."""
    config = Phi3Config(pad_token_id=0)
    complete_config(config, Path("phi"), fields(attention__sliding_window=0), {})
    assert config.sliding_window is None


@pytest.mark.parametrize(("said", "begins"), [(None, "\u2581"), (True, "\u2581"), (False, "a")])
def test_a_first_space_is_left_out_where_the_file_says_so(said: bool | None, begins: str) -> None:
    tokenizer: Any = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "a": 4}, merges=[])
    given = {} if said is None else {"tokenizer.ggml.add_space_prefix": SimpleNamespace(contents=lambda: said)}
    complete_tokenizer(tokenizer, Path("file"), given)
    ids = tokenizer.backend_tokenizer.encode("a a", add_special_tokens=False)
    assert ids.tokens[0] == begins
    assert tokenizer.backend_tokenizer.decode(ids.ids) == "a a"


def test_a_family_that_turns_whole_heads_refuses_a_part() -> None:
    config = Qwen2MoeConfig(hidden_size=64, num_attention_heads=4)
    with pytest.raises(ExportError, match="turns 8 of 16 numbers of a head, and the family qwen2_moe turns all"):
        complete_config(config, Path("file"), fields(rope__dimension_count=8), {})


def test_caps_and_the_base_of_windows_are_the_file_s() -> None:
    caps = fields(attn_logit_softcapping=20.0, final_logit_softcapping=7.0)
    capped, layered = Gemma2Config(), Gemma3TextConfig()
    complete_config(capped, Path("gemma"), caps, {})
    assert (capped.attn_logit_softcapping, capped.final_logit_softcapping) == (20.0, 7.0)
    complete_config(layered, Path("gemma"), fields(**{"rope__freq_base_swa": 5000.0}), {})
    assert layered.rope_parameters["sliding_attention"]["rope_theta"] == 5000.0
    assert layered.rope_parameters["full_attention"]["rope_theta"] == 1000000.0


def test_layers_that_see_everything_are_scaled_where_layers_differ() -> None:
    config = Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, head_dim=128)
    complete_config(config, Path("gemma"), fields(rope__scaling__type="linear", rope__scaling__factor=8.0), {})
    rope = config.rope_parameters
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("linear", 8.0)
    assert rope["sliding_attention"]["rope_type"] == "default"
    assert config.query_pre_attn_scalar == 168
    small = Gemma2Config(num_hidden_layers=42)
    complete_config(small, Path("gemma"), {}, {})
    assert small.query_pre_attn_scalar == 256
    narrow = Gemma2Config(num_hidden_layers=4, head_dim=32)  # no published size: llama.cpp scales by the head's own
    complete_config(narrow, Path("gemma"), {}, {})
    assert narrow.query_pre_attn_scalar == 32


def test_widths_of_experts_are_those_of_the_file() -> None:
    config = Qwen2MoeConfig()
    complete_config(
        config, Path("moe"), fields(expert_feed_forward_length=2560, expert_shared_feed_forward_length=20480), {}
    )
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (2560, 20480)


def test_heads_and_gpt_2_have_the_sizes_of_the_file() -> None:
    """transformers takes 128 for Qwen3's heads, and 1,024 positions for every GPT-2."""
    wide, short, few = Qwen3Config(), GPT2Config(n_embd=64), Phi3Config(vocab_size=300)
    complete_config(wide, Path("qwen"), fields(attention__key_length=64), {})
    assert wide.head_dim == 64
    complete_config(short, Path("gpt"), fields(context_length=512, feed_forward_length=96), {})
    assert (short.max_position_embeddings, short.n_inner) == (512, 96)
    complete_config(few, Path("phi"), {}, {})  # whose family pads with token 32,000
    assert few.pad_token_id is None


def test_a_tensor_without_a_place_is_refused(write_gguf: WriteGguf) -> None:
    """As Granite's files of Llama's form have biases: without them every text is another one."""
    file = write_gguf("Q8_0", floats={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    with pytest.raises(ExportError, match="holds 1 tensors that its family has no place for"):
        open_checkpoint(file, "target")


def pieces(file: Path, text: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(open_checkpoint(file, "target").folder / "tokenizer.json"))
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_texts_are_cut_as_the_model_was_taught(write_gguf: WriteGguf) -> None:
    assert pieces(write_gguf("Q8_0", pre="gpt-2"), "a\n\n12") == ["a", "\u010a", "\u010a", "12"]
    assert pieces(write_gguf("Q8_0", pre="smollm"), "a\n\n12") == ["a", "\u010a\u010a", "1", "2"]
    assert pieces(write_gguf("Q8_0", pre="llama-bpe"), "a\n\n12") == ["a", "\u010a\u010a", "12"]
    assert pieces(write_gguf("Q8_0", pre="deepseek-coder"), "a\n\n12") == ["a", "\u010a", "\u010a", "1", "2"]
    with pytest.raises(ExportError, match=r"cuts texts as 'origami' does \(tokenizer.ggml.pre\)"):
        open_checkpoint(write_gguf("Q8_0", pre="origami"), "target")


def test_llama_3_s_texts_begin_with_a_token_unless_the_file_says_no(write_gguf: WriteGguf) -> None:
    for said, begins in ((None, True), (True, True), (False, False)):
        more = {} if said is None else {"tokenizer.ggml.add_bos_token": said}
        folder = open_checkpoint(write_gguf("Q8_0", pre="llama-bpe", more=more), "target").folder
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert (tokenizer.encode("ab").ids[0] == 1) is begins
        assert tokenizer.model.ignore_merges


def test_a_mark_that_was_cut_short_costs_nothing_but_time(write_gguf: WriteGguf) -> None:
    file = write_gguf("Q8_0")
    folder = open_checkpoint(file, "target").folder
    for content in ("", '{"file": "ti'):
        (folder / "made_from.json").write_text(content, encoding="utf-8")
        assert open_checkpoint(file, "target").folder == folder
