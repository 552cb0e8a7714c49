"""A tiny pair of random models that every end-to-end test shares: real checkpoints, exported once per run.

Nothing of what is shared may be changed: other processes of the run read it at the same time.
"""

import ctypes
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
from installed_wheel import InstalledWheel, find, make
from made_once import made_once

import mirrorsd  # before any test imports OpenVINO, which would report its import

assert mirrorsd.__version__
gc.disable()  # until all tests are imported: to look for garbage among modules takes a quarter of that time
TEXT = (
    "Once upon a time there was a little fox who lived at the edge of a dark forest. "
    "Every morning the fox went to the river and asked the old heron for news of the world."
)
TEMPLATE = (
    "{{ greeting }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {"context": 512, "buckets": ((8, 8), (16, 16), (64, 1)), "capacities": (256, 512)}


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and not among what was imported."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how long the tests of each folder took, all processes together."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind if hasattr(report, "duration")]
    seconds = Counter[str]()
    for report in reports:
        seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    terminalreporter.write_line(", ".join(f"{folder} {total:.0f} s" for folder, total in seconds.items()))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Name the test whose process died at once: the summary comes late, or never. `scripts/test.py` asks, too."""
    print(f"\nthe process of {crashitem} died", flush=True)
    if noted := os.environ.get("MIRRORSD_TESTS_DIED"):
        Path(noted).write_text(crashitem, encoding="utf-8")


class SignalStack(ctypes.Structure):
    """Where the kernel runs a thread's signal handlers: `stack_t` of Linux."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@pytest.fixture(autouse=True)
def signal_stack_is_kept() -> Iterator[None]:
    """No test leaves its thread with a stack for signals that a library made: once freed, it ends the process."""
    if sys.platform != "linux":
        yield
        return
    stacks = [SignalStack(), SignalStack()]
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stacks[0]))
    yield
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stacks[1]))
    assert stacks[0].place == stacks[1].place, "see devices/openvino/core.py"


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing is read from or left in the user's own cache, by tests and by the programs that they start."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MIRRORSD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def passes_without_times() -> Iterator[None]:
    """Windows are as long as they may be, as no clock of this machine says what a row costs."""
    from mirrorsd.runtime import loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "measure_passes", wraps(loading.measure_passes)(lambda *_: ()))
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test: copies of a bundle share what is kept about it."""
    monkeypatch.setenv("MIRRORSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a streaming draft that is made of the target's first layers."""
    folder = made_once(tmp_path_factory, "tiny_pair", _make_pair)
    return folder / "target", folder / "draft"


def _make_pair(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mirrorsd.training.models.streaming_draft import StreamingDraft

    torch.manual_seed(5)
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {**shape, **heads, **tokens, "tie_word_embeddings": True, "initializer_range": 0.2}
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)).eval()
    draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    draft.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    generation = folder / "target" / "generation_config.json"
    named = json.loads(generation.read_text(encoding="utf-8")) | {"do_sample": False}
    generation.write_text(json.dumps(named), encoding="utf-8")
    StreamingDraft(draft, num_streams=2, num_stream_layers=1).save(folder / "draft")
    for name in ("target", "draft"):
        _write_tokenizer(folder / name)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair as a bundle."""
    return _export_once(tiny_pair, tmp_path_factory, "tiny_bundle", "fp32")


@pytest.fixture(scope="session")
def half_bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair in 16 bits, which is what attention on an NVIDIA GPU takes."""
    return _export_once(tiny_pair, tmp_path_factory, "half_bundle", "fp16")


def _export_once(pair: tuple[Path, Path], factory: pytest.TempPathFactory, name: str, precision: str) -> Path:
    from mirrorsd.export import ExportOptions, export_pair

    options = ExportOptions(precision=precision, **SIZES)
    return made_once(factory, name, lambda made: export_pair(*pair, made / "tiny.mirror", options)) / "tiny.mirror"


@pytest.fixture(scope="session")
def headed_bundle(
    tiny_pair: tuple[Path, Path], tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int]]:
    """The tiny pair with two heads, and the ids of a text that the Medusa one knows by heart."""

    def make(folder: Path) -> None:
        from random_heads import HEADS, fitted_medusa, save_head

        from mirrorsd import MirrorPipeline
        from mirrorsd.export import ExportOptions, export_pair

        with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
            known = pipe.generate(TEXT, max_new_tokens=64, ignore_eos=True, method="plain")
        text = [*known.prompt_ids, *known.token_ids]
        networks = {"medusa": fitted_medusa(tiny_pair[0], text)}
        heads = [save_head(config, folder / kind, networks.get(kind)) for kind, config in HEADS.items()]
        options = ExportOptions(precision="fp32", heads=tuple(map(str, heads)), **SIZES)
        export_pair(*tiny_pair, folder / "headed.mirror", options)
        (folder / "text.json").write_text(json.dumps(text), encoding="utf-8")

    folder = made_once(tmp_path_factory, "headed_bundle", make)
    return folder / "headed.mirror", json.loads((folder / "text.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> InstalledWheel:
    """The wheel, its sources, and an environment that has it."""
    return find(made_once(tmp_path_factory, "installed_wheel", make))


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes `tiny.gguf`, a random Llama; the arguments are those of `gguf_writer.write_file`."""
    from gguf_writer import write_file

    return partial(write_file, tmp_path / "tiny.gguf")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "pad_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
