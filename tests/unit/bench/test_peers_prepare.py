"""Peers' models for the comparison: made once, of checkpoints and of GGUF files, without the peers' own programs."""

import importlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).resolve().parents[3] / "bench" / "claims" / "peers"


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("prepare")


@pytest.fixture
def ran(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Programs that were asked for, with their arguments. Each leaves an empty GGUF file, or else a folder."""
    found: list[list[str]] = []

    def run(program: Path, *arguments: object) -> None:
        words = [str(program), *map(str, arguments)]
        found.append(words)
        files = [Path(word) for word in words if word.endswith(".gguf.partial")]
        for file in files:
            file.touch()
        if not files:
            Path(words[-1]).mkdir(parents=True)

    monkeypatch.setattr(prepare, "run", run)
    return found


def test_without_llama_cpp_s_program_its_script_makes_int8_and_a_gguf_file_is_its_own_int4(
    prepare: ModuleType, ran: list[list[str]], tmp_path: Path
) -> None:
    file, folder = tmp_path / "big.Q4_1.gguf", tmp_path / "llama.cpp"
    file.write_bytes(b"GGUF")
    prepare.keep_file(tmp_path, file)
    for precision in ("int8", "int4"):
        output = folder / f"big.Q4_1-{precision}.gguf"
        prepare.export_llama_cpp(Path("python"), tmp_path / "big.Q4_1", output, tmp_path / "bin")
    assert [words[words.index("--outtype") + 1] for words in ran] == ["q8_0"]
    assert (folder / "big.Q4_1-int4.gguf").read_bytes() == b"GGUF"
    with pytest.raises(SystemExit, match="has no llama-quantize"):
        prepare.export_llama_cpp(Path("python"), tmp_path / "other", folder / "other-int4.gguf", tmp_path / "bin")


def test_a_gguf_file_becomes_a_folder_once(prepare: ModuleType, ran: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "big.Q4_1.gguf"
    folders = [prepare.folder_of(tmp_path, file) for _ in range(2)]
    assert folders == [tmp_path / "checkpoints" / "big.Q4_1"] * 2
    assert [words[:3] for words in ran] == [[sys.executable, str(FOLDER / "ordinary_target.py"), str(file)]]
    assert prepare.folder_of(tmp_path, tmp_path / "small") == tmp_path / "small"


def test_quality_is_measured_of_every_peer_s_model_of_the_target_alone(prepare: ModuleType, tmp_path: Path) -> None:
    for name in ("big-int8", "big-int8+small", "small-int8", ".big-int4.partial"):
        (tmp_path / "onnxruntime" / name).mkdir(parents=True)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "big-int8.gguf").touch()
    found = prepare.exports_of(tmp_path, Path("elsewhere") / "big")
    assert {f"{path.parent.name}/{path.name}" for path in found} == {"onnxruntime/big-int8", "llama.cpp/big-int8.gguf"}


@pytest.mark.parametrize("rank", [None, 2])
def test_a_draft_is_written_out_with_its_target_s_embedding_and_a_whole_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int | None
) -> None:
    target, draft, output = tmp_path / "target", tmp_path / "draft", tmp_path / "ordinary"
    rng = np.random.default_rng(3)
    drawn = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES[rank].items()}
    embedding = rng.standard_normal((5, 4), dtype=np.float32)
    for folder, weights in ((target, {"model.embed_tokens.weight": embedding}), (draft, drawn)):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
    save_file({"link": embedding}, draft / "streams.safetensors")
    config = {"hidden_size": 4, "head_rank": rank, "shares_embedding": True}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["ordinary_draft.py", str(target), str(draft), str(output)])
    runpy.run_path(str(FOLDER / "ordinary_draft.py"), run_name="__main__")
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((output / "config.json").read_text(encoding="utf-8")) == {"hidden_size": 4}
    found = load_file(output / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], embedding)
    head = drawn["lm_head.weight"] @ drawn["model.norm.down.weight"] if rank else drawn["lm_head.weight"]
    np.testing.assert_allclose(found["lm_head.weight"], head, rtol=1e-6)
    assert set(found) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


SHAPES: dict[int | None, dict[str, tuple[int, ...]]] = {
    None: {"model.norm.weight": (4,), "lm_head.weight": (5, 4)},
    2: {"model.norm.norm.weight": (4,), "model.norm.down.weight": (2, 4), "lm_head.weight": (5, 2)},
}
"""Of a draft without layers, with a head of its own and with one of rank 2."""


def test_a_draft_that_is_ordinary_already_is_left_alone(prepare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert prepare.ordinary(Path("python"), tmp_path, tmp_path, tmp_path) == tmp_path
    (tmp_path / "streams.safetensors").touch()
    (tmp_path / "ordinary" / tmp_path.name).mkdir(parents=True)
    assert prepare.ordinary(Path("python"), tmp_path, tmp_path, tmp_path) == tmp_path / "ordinary" / tmp_path.name


def test_an_int4_model_is_fitted_to_a_text_once(prepare: ModuleType, ran: list[list[str]], tmp_path: Path) -> None:
    """And the export of int4 with default settings, which comes next, leaves it alone."""
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("one")
    other.write_text("two")
    output = prepare.place(tmp_path, "openvino", tmp_path / "big", "int4")
    for _ in range(2):
        prepare.check_fitted(output, text)
        prepare.fit_openvino(Path("python"), tmp_path / "big", text, output)
    for given in (other, None):
        with pytest.raises(SystemExit, match="is there already, fitted to"):
            prepare.check_fitted(output, given)
    prepare.export_openvino(Path("python"), tmp_path / "big", output, "int4")
    assert output.is_dir()
    assert [words[1:4] for words in ran] == [
        [str(FOLDER / "fitted_int4.py"), str(tmp_path / "big"), str(tmp_path / "text.txt")]
    ]


def test_a_gguf_file_is_converted_once_and_quantised_by_llama_cpp_s_own_programs(
    prepare: ModuleType, ran: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-quantize").touch()
    for precision in ("fp32", "int8", "int4", "int4"):
        output = tmp_path / "llama.cpp" / f"big-{precision}.gguf"
        prepare.export_llama_cpp(Path("python"), tmp_path / "big", output, tmp_path / "bin")
        assert output.is_file()
    assert [words[0] for words in ran] == ["python", *[str(tmp_path / "bin" / "llama-quantize")] * 2]
    assert [words[-1] for words in ran] == [str(tmp_path / "big"), "Q8_0", "Q4_0"]
    assert sorted(path.name for path in (tmp_path / "llama.cpp").iterdir()) == [
        f"big-{precision}.gguf" for precision in ("fp32", "int4", "int8")
    ]


@pytest.mark.parametrize(
    ("sizes", "is_adjusted"),
    [((576, 9, 1536), True), ((384, 6, 896), False), ((512, 8, 1000), True)],
    ids=["hidden size", "neither", "intermediate size"],
)
def test_int4_groups_are_adjusted_where_128_does_not_divide(
    prepare: ModuleType, tmp_path: Path, sizes: tuple[int, int, int], *, is_adjusted: bool
) -> None:
    names = ("hidden_size", "num_attention_heads", "intermediate_size")
    config = dict(zip(names, sizes, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ("--group-size", "128", "--group-size-fallback", "adjust")
    assert prepare.fallback(tmp_path, "int4") == (words if is_adjusted else ())
    assert prepare.fallback(tmp_path, "int8") == ()


def test_the_draft_is_put_beside_the_target_without_copying_weights(prepare: ModuleType, tmp_path: Path) -> None:
    for name, layers in (("big-int8", 6), ("small-int8", 3)):
        folder = tmp_path / "onnxruntime" / name
        folder.mkdir(parents=True)
        config = {"model": {"decoder": {"filename": "model.onnx", "num_hidden_layers": layers}}}
        (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.onnx.data").write_bytes(name.encode())
    prepare.compose_onnxruntime(tmp_path, Path("big"), Path("small"), "int8")
    made = tmp_path / "onnxruntime" / "big-int8+small"
    model = json.loads((made / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert model["decoder"] == {"filename": "target/model.onnx", "num_hidden_layers": 6}
    assert model["draft"] == {"filename": "draft/model.onnx", "num_hidden_layers": 3}
    assert (made / "draft" / "model.onnx.data").samefile(tmp_path / "onnxruntime" / "small-int8" / "model.onnx.data")
