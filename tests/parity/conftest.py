"""Random checkpoints with the features that matter (grouped and wide heads, tied, streams), and their bundles."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_once import made_once
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from traced_once import traced_anew, traced_once

from mirrorsd.export import ExportOptions
from mirrorsd.export.verify.text import PARITY_TEXT
from mirrorsd.graphs.bundle_files import read_bundle

VOCABULARY = 320
CONTEXT = 384
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 96,
}

HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

__all__ = ["traced_anew", "traced_once"]

MakeCheckpoint = Callable[..., Path]
PROGRESS = "progress.json"
KILLED_AT = ("export suffix", "carry over")
"""Stages at which an export of the Llama pair is taken to be killed."""


@pytest.fixture(scope="session")
def knows_integer_kernels() -> bool:
    """Whether this processor's integer kernels are those that were found to be batch-invariant (docs/exactness.md)."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "avx512_vnni" in cpuinfo.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PARITY_TEXT], trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def make_checkpoint(tokenizer_json: str) -> MakeCheckpoint:
    """Save a random model of `family` with a tokenizer; streams and `adapter_layers` add the files beside it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from mirrorsd.bench.claims.models.families import randomise

    def make(
        folder: Path,
        family: str,
        *,
        seed: int,
        num_streams: int = 0,
        stream_rank: int = 0,
        link_rank: int = 0,
        adapter_layers: tuple[int, ...] = (),
        **sizes: Any,
    ) -> Path:
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **(SIZES | sizes))
        model = AutoModelForCausalLM.from_config(config).eval()
        randomise(model)
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        settings = {"eos_token": "<|end|>", "chat_template": "{{ messages[0]['content'] }}"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        width = config.hidden_size
        if num_streams:
            kind = f"mirrorsd-streams-{3 if link_rank else 2 if stream_rank else 1}"
            metadata = {"format": kind, "num_streams": str(num_streams), "num_stream_layers": "2"}
            tensors = {"stream_embeddings": torch.randn(num_streams, width) * 0.3}
            for place in range(3 if stream_rank else 0):
                tensors[f"adapters.{place}.down.weight"] = torch.randn(stream_rank, width) * 0.3
                tensors[f"adapters.{place}.up.weight"] = torch.randn(width, stream_rank) * 0.3
            if link_rank:
                into = {name: torch.randn(link_rank, width) * 0.3 for name in ("down", "last", "earlier")}
                tensors |= {f"link.{name}.weight": matrix for name, matrix in into.items()}
                tensors["link.up.weight"] = torch.randn(width, link_rank) * 0.3
            save_file(tensors, folder / "streams.safetensors", metadata)
        if adapter_layers:
            tensors = {
                f"layers.{layer}.{part}.weight": torch.randn((8, width) if part == "down" else (width, 8)) * 0.1
                for layer in adapter_layers
                for part in ("down", "up")
            }
            save_file(tensors, folder / "exit_adapters.safetensors", {"format": "mirrorsd-exit-1"})
        return folder

    return make


@pytest.fixture(scope="session")
def gptq_options() -> ExportOptions:
    """Int4 by GPTQ, with a draft of one shape."""
    return ExportOptions(
        precision="int4",
        rounding="gptq",
        context=CONTEXT,
        num_exit_candidates=4,
        num_draft_candidates=4,
        buckets=((8, 8),),
        capacities=(CONTEXT,),
    )


class ExportedPair:
    """Two checkpoint folders, their bundle, its manifest, and the progress that the export reported.

    `killed_at` holds copies of the work folder by stage: what was on disk when the export first reported that stage,
    and so what it would have left had it been killed there.
    """

    def __init__(self, folder: Path) -> None:
        self.target, self.draft, self.bundle = folder / "target", folder / "draft", folder / "pair.mirror"
        self.progress = [tuple(told) for told in json.loads((folder / PROGRESS).read_text(encoding="utf-8"))]
        self.killed_at = {stage: folder / "killed" / str(number) for number, stage in enumerate(KILLED_AT)}
        self.manifest = read_bundle(self.bundle)


def export_and_watch(folder: Path, options: ExportOptions, killed_at: tuple[str, ...] = ()) -> None:
    """Export what an `ExportedPair` of that folder reads."""
    from mirrorsd.export import export_pair  # PyTorch, which only the processes that run tests need

    progress: list[tuple[str, float]] = []
    bundle = folder / "pair.mirror"

    def watch(stage: str, share: float) -> None:
        progress.append((stage, share))
        copy = folder / "killed" / str(killed_at.index(stage)) if stage in killed_at else None
        if copy is not None and not copy.exists():
            shutil.copytree(bundle.with_name(f".{bundle.name}.partial"), copy)

    export_pair(folder / "target", folder / "draft", bundle, options, watch)
    (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


@pytest.fixture(scope="session")
def llama_pair(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> ExportedPair:
    """Tied Llama of 4 layers with scaled rope and an adapter; 3 linked streams in the top 2 of the draft's 3."""

    def make(folder: Path) -> None:
        make_checkpoint(
            folder / "target",
            "llama",
            seed=1,
            num_hidden_layers=4,
            adapter_layers=(2,),
            tie_word_embeddings=True,
            rope_parameters=SCALED_ROPE,
        )
        streams = {"num_streams": 3, "stream_rank": 8, "link_rank": 8}
        make_checkpoint(folder / "draft", "llama", seed=2, num_hidden_layers=3, tie_word_embeddings=True, **streams)
        (folder / "target" / "README.md").write_text("---\nlicense: mit\n---\n")
        generation = {"eos_token_id": [0, 5], "temperature": 0.7, "top_k": 20}
        for role in ("target", "draft"):
            (folder / role / "generation_config.json").write_text(json.dumps(generation))
        (folder / "target" / "exit_coverage.json").write_text('{"positions": 3}')
        export_and_watch(folder, ExportOptions(precision="fp32"), KILLED_AT)

    return ExportedPair(made_once(tmp_path_factory, "llama_pair", make))


@pytest.fixture(scope="session")
def qwen3_pair(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> ExportedPair:
    """Untied Qwen3 of 3 layers with wide heads and two exits; an ordinary Qwen3 draft with 64 ids of padding."""

    def make(folder: Path) -> None:
        sizes = {"head_dim": 32, "tie_word_embeddings": False}
        make_checkpoint(folder / "target", "qwen3", seed=3, num_hidden_layers=3, **sizes)
        padded = {"head_dim": 32, "tie_word_embeddings": True, "vocab_size": VOCABULARY + 64}
        make_checkpoint(folder / "draft", "qwen3", seed=4, num_hidden_layers=2, **padded)
        export_and_watch(folder, ExportOptions(precision="fp32", exit_layers=(1, 2), context=320))

    return ExportedPair(made_once(tmp_path_factory, "qwen3_pair", make))


@pytest.fixture(scope="session")
def hybrid_pair(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> ExportedPair:
    """Untied Qwen3.5 in int8, three of its four layers recurrent, with its own head; a draft with 3 linked streams."""

    def make(folder: Path) -> None:
        make_checkpoint(folder / "target", "qwen3_5_text", seed=5, tie_word_embeddings=False, **HYBRID)
        add_own_head(folder / "target")
        streams = {"num_streams": 3, "stream_rank": 8, "link_rank": 8}
        make_checkpoint(folder / "draft", "llama", seed=2, num_hidden_layers=3, tie_word_embeddings=True, **streams)
        export_and_watch(folder, ExportOptions(precision="int8", exit_layers=(2,), context=CONTEXT))

    return ExportedPair(made_once(tmp_path_factory, "hybrid_pair", make))


def add_own_head(folder: Path) -> None:
    """Write a random head for further tokens into a Qwen3.5 checkpoint, as published ones have it."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors, hidden, inner = load_file(path), SIZES["hidden_size"], SIZES["intermediate_size"]
    width, (heads, groups) = HYBRID["head_dim"], (SIZES["num_attention_heads"], SIZES["num_key_value_heads"])
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (2 * heads * width, hidden),
        "layers.0.self_attn.k_proj": (groups * width, hidden),
        "layers.0.self_attn.v_proj": (groups * width, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * width),
        "layers.0.self_attn.q_norm": (width,),
        "layers.0.self_attn.k_norm": (width,),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
        **{f"layers.0.{name}_layernorm": (hidden,) for name in ("input", "post_attention")},
        **dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (hidden,)),
    }
    tensors |= {f"mtp.{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    save_file(tensors, path, {"format": "pt"})
