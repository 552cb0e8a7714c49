"""Make the peers' environment in a cache folder, and export checkpoints to the peers' own formats there.

    python bench/claims/peers/prepare.py CACHE --target scaled --draft plain-draft --precisions fp32,int8,int4

A GGUF file may stand for a folder: the exports begin with the numbers of its blocks (`ordinary_target.py`, in the
environment that runs this), and llama.cpp's int4 is the file itself. With `--quality TEXT`, `CACHE/quality.json` says
what each export keeps of its checkpoint (`quality.py`). With `--calibration`, openvino-genai's int4 model of the target
is fitted to that text (`fitted_int4.py`). llama.cpp's files are made where `--llama-cpp` names the folder of its
programs; where `llama-quantize` is not among them, the script that converts makes int8. A draft with streams, with a
head of low rank or with its target's embedding is written out as an ordinary model first (`ordinary_draft.py`).

Owns: the environment, the exporters' command lines and the composite folder that onnxruntime-genai wants for a draft.
Does not own: decoding (`cli/bench/peer_worker.py`), comparing (`compare.py`). Needs only the standard library.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
PRECISIONS = ("fp32", "int8", "int4")
PEERS = ("openvino", "onnxruntime", "llama.cpp")
"""Folders of the cache."""
QUALITY = "quality.json"
INT4_GROUP = 128
"""optimum-intel's own choice."""
FITTED_TO = "calibration.txt"
"""In a fitted model's folder: the text."""
LLAMA_CPP_KINDS = {"int8": "Q8_0", "int4": "Q4_0"}
"""Its names of the precisions; each has blocks of 32."""


def main() -> None:
    """Make what is missing; what is there is left alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint, a folder or a GGUF file")
    parser.add_argument("--draft", type=Path, help="the draft's; the peers' has its main rows alone")
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama.cpp's programs; without it, no GGUF files")
    parser.add_argument("--calibration", type=Path, help="a text that openvino-genai's int4 target is fitted to")
    parser.add_argument("--quality", type=Path, help="a text to compare each target's best tokens and perplexity on")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    options = parser.parse_args()
    python = make_environment(options.cache.resolve() / "env")
    keep_file(options.cache, options.target)
    options.target = folder_of(options.cache, options.target)
    options.draft = options.draft and folder_of(options.cache, options.draft)
    draft = options.draft and ordinary(python, options.cache, options.target, options.draft)
    whole = place(options.cache, "openvino", options.target, "int4")
    check_fitted(whole, options.calibration)
    if options.calibration:
        fit_openvino(python, options.target, options.calibration, whole)
    for precision in options.precisions.split(","):
        for checkpoint in [options.target] + ([draft] if draft else []):
            for peer, export in (("openvino", export_openvino), ("onnxruntime", export_onnxruntime)):
                export(python, checkpoint, place(options.cache, peer, checkpoint, precision), precision)
            if options.llama_cpp:
                output = place(options.cache, "llama.cpp", checkpoint, precision)
                export_llama_cpp(python, checkpoint, output.with_name(f"{output.name}.gguf"), options.llama_cpp)
        if draft:
            compose_onnxruntime(options.cache, options.target, draft, precision)
    if options.quality:
        models = exports_of(options.cache, options.target)
        words = (options.target.resolve(), options.quality.resolve(), *models, "--output", options.cache / QUALITY)
        run(Path(sys.executable), HERE / "quality.py", *words)


def folder_of(cache: Path, checkpoint: Path) -> Path:
    """The checkpoint as a folder: itself, or one of the file's name in the cache."""
    if checkpoint.suffix != ".gguf":
        return checkpoint
    output = cache.resolve() / "checkpoints" / checkpoint.stem
    if not output.is_dir():
        scratch = fresh(output)
        run(Path(sys.executable), HERE / "ordinary_target.py", checkpoint.resolve(), scratch)
        scratch.rename(output)
    return output


def keep_file(cache: Path, checkpoint: Path) -> None:
    """Have a GGUF file of four bits stand for llama.cpp's int4."""
    output = place(cache, "llama.cpp", checkpoint.with_suffix(""), "int4")
    output = output.with_name(f"{output.name}.gguf")
    if checkpoint.suffix == ".gguf" and not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        output.symlink_to(checkpoint.resolve())


def exports_of(cache: Path, checkpoint: Path) -> list[Path]:
    """Every peer's model of a checkpoint, composites and what was interrupted left out."""
    found = [path for peer in PEERS for path in (cache.resolve() / peer).glob(f"{checkpoint.name}-*")]
    names = {f"{checkpoint.name}-{precision}" for precision in PRECISIONS}
    return sorted(path for path in found if path.name.removesuffix(".gguf") in names)


def place(cache: Path, peer: str, checkpoint: Path, precision: str) -> Path:
    """Where a peer's export of a checkpoint is kept."""
    return cache.resolve() / peer / f"{checkpoint.name}-{precision}"


def make_environment(folder: Path) -> Path:
    """A virtual environment with both peers; returns its Python."""
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = (HERE / "requirements.txt").read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(folder, with_pip=True)
    run(python, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "optimum-intel==2.2.0")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def export_openvino(python: Path, checkpoint: Path, output: Path, precision: str) -> None:
    """Export with optimum-intel and its own defaults for each weight format: OpenVINO IR with a hidden cache."""
    if output.is_dir():
        return
    scratch = fresh(output)
    command = python.parent / "optimum-cli"
    task = ("--task", "text-generation-with-past", "--weight-format", precision)
    run(command, "export", "openvino", "-m", checkpoint.resolve(), *task, *fallback(checkpoint, precision), scratch)
    scratch.rename(output)


def fit_openvino(python: Path, checkpoint: Path, text: Path, output: Path) -> None:
    """Export the target in int4 with nncf's AWQ and scale estimation on `text`; `export_openvino` leaves it alone."""
    if output.is_dir():
        return
    scratch = fresh(output)
    run(python, HERE / "fitted_int4.py", checkpoint.resolve(), text.resolve(), scratch)
    shutil.copy(text, scratch / FITTED_TO)
    scratch.rename(output)


def check_fitted(output: Path, text: Path | None) -> None:
    """Refuse a model that is there already and was made in the other way, or by another text.

    Raises:
        SystemExit: it was.
    """
    if not output.is_dir():
        return
    stamp = output / FITTED_TO
    found = stamp.read_bytes() if stamp.is_file() else None
    if found != (text.read_bytes() if text else None):
        how = "fitted to another text or to none" if text else "fitted to a text; give it with --calibration"
        raise SystemExit(f"{output} is there already, {how}. Give another cache folder, or delete it")


def fallback(checkpoint: Path, precision: str) -> tuple[str, ...]:
    """What lets optimum-intel export int4 where some matrix's rows are no multiple of its groups; it refuses otherwise.

    Its groups are of 128 weights then too, and smaller in those matrices alone.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    heads = num_heads * (config.get("head_dim") or hidden // num_heads)
    sizes = (hidden, heads, config["intermediate_size"])
    is_needed = precision == "int4" and any(size % INT4_GROUP for size in sizes)
    return ("--group-size", str(INT4_GROUP), "--group-size-fallback", "adjust") if is_needed else ()


def export_onnxruntime(python: Path, checkpoint: Path, output: Path, precision: str) -> None:
    """Export with onnxruntime-genai's model builder and its own defaults (int4 and int8: symmetric blocks of 32)."""
    if output.is_dir():
        return
    scratch = fresh(output)
    builder = ("-m", "onnxruntime_genai.models.builder", "-i", checkpoint.resolve(), "-o", scratch)
    run(python, *builder, "-p", precision, "-e", "cpu", "-c", output.parent / "cache")
    scratch.rename(output)


def export_llama_cpp(python: Path, checkpoint: Path, output: Path, programs: Path) -> None:
    """Convert with llama.cpp's own script, and quantise with its own program and choices; fp32 stays as it is.

    Raises:
        SystemExit: int4 needs the program, and it is not there.
    """
    if output.is_file():
        return
    precision = output.stem.rsplit("-", 1)[1]
    if not (programs / "llama-quantize").is_file():
        if precision == "int4":
            raise SystemExit(f"{programs} has no llama-quantize: give a GGUF file of four bits, or leave int4 out")
        convert(python, checkpoint, output, {"fp32": "f32", "int8": "q8_0"}[precision])
        return
    whole = output.with_name(f"{checkpoint.name}-fp32.gguf")
    if not whole.is_file():
        convert(python, checkpoint, whole, "f32")
    if precision in LLAMA_CPP_KINDS:
        scratch = output.with_name(f".{output.name}.partial")
        run(programs / "llama-quantize", whole, scratch, LLAMA_CPP_KINDS[precision])
        scratch.rename(output)


def convert(python: Path, checkpoint: Path, output: Path, kind: str) -> None:
    """Convert with llama.cpp's own script, to floats or to its int8."""
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(f".{output.name}.partial")
    run(python, "-m", "convert_hf_to_gguf", "--outtype", kind, "--outfile", scratch, checkpoint.resolve())
    scratch.rename(output)


def ordinary(python: Path, cache: Path, target: Path, draft: Path) -> Path:
    """The draft as an ordinary model: itself, or, where it is none, one of the same name with its main rows."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    if not (config.get("shares_embedding") or config.get("head_rank") or (draft / "streams.safetensors").is_file()):
        return draft
    output = cache.resolve() / "ordinary" / draft.name
    if not output.is_dir():
        scratch = fresh(output)
        run(python, HERE / "ordinary_draft.py", target.resolve(), draft.resolve(), scratch)
        scratch.rename(output)
    return output


def compose_onnxruntime(cache: Path, target: Path, draft: Path, precision: str) -> None:
    """The target's folder again with `model.draft` in its configuration, as its page on speculative decoding asks.

    The page has the models in folders of their own; release 0.18 refuses paths that leave the folder, hence the links.
    """
    whole = place(cache, "onnxruntime", target, precision)
    small = place(cache, "onnxruntime", draft, precision)
    output = whole.with_name(f"{whole.name}+{draft.name}")
    if output.is_dir():
        return
    scratch = fresh(output)
    for folder, source in (("target", whole), ("draft", small)):
        (scratch / folder).mkdir(parents=True)
        for path in source.glob("model.onnx*"):
            os.link(path, scratch / folder / path.name)
    for path in whole.iterdir():
        if not path.name.startswith("model.onnx"):
            shutil.copy(path, scratch)
    config = json.loads((whole / "genai_config.json").read_text(encoding="utf-8"))
    of_draft = json.loads((small / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    config["model"]["decoder"]["filename"] = "target/model.onnx"
    config["model"]["draft"] = {**of_draft, "filename": "draft/model.onnx"}
    (scratch / "genai_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    scratch.rename(output)


def fresh(output: Path) -> Path:
    """An unused name beside `output`, cleared of what an interrupted run left."""
    scratch = output.with_name(f".{output.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    return scratch


def run(program: Path, *arguments: object) -> None:
    """Run a command; its own words are the error."""
    words = [str(program), *(str(argument) for argument in arguments)]
    print("==", " ".join(words), file=sys.stderr, flush=True)
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
