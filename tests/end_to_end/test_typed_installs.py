"""What a consumer's `mypy --strict` sees of an installed mirrorsd: the types, from a wheel and from a clone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline

def run(folder: str) -> str:
    with MirrorPipeline.load(folder, device_map="cpu") as pipe:
        result = pipe.generate("Once", GenerationConfig(max_new_tokens=3), temperature=0.5, stop_strings=["."])
        reveal_type(result)
        reveal_type(result.stats.tokens_per_second)
        for chunk in pipe.stream("Once", top_k=4):
            reveal_type(chunk.text)
        pipe.generate("Once", max_tokens=3)
        pipe.generate("Once", temperature="hot")
        return result.text
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_consumer_s_strict_mypy_sees_the_types(kind: str, tmp_path: Path) -> None:
    clone = tmp_path / "a clone"  # of any name, which is not that of the package
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "samples")
    shutil.copytree(ROOT, clone, ignore=left_out)
    environment = tmp_path / "environment"
    run_quietly([sys.executable, "-m", "venv", str(environment)])
    python = str(environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    editable = ["-e"] if kind == "editable" else []
    run_quietly([python, "-m", "pip", "install", "--quiet", "--no-deps", *editable, str(clone)])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, str(program)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path).stdout
    assert 'Revealed type is "mirrorsd.runtime.reporting.results.GenerationResult"' in said, said
    assert 'Revealed type is "float"' in said.replace("builtins.", ""), said
    assert 'Revealed type is "str"' in said.replace("builtins.", ""), said
    assert 'Unexpected keyword argument "max_tokens"' in said, said
    assert 'Argument "temperature" has incompatible type' in said, said
    assert "Found 2 errors in 1 file" in said, said


def run_quietly(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
