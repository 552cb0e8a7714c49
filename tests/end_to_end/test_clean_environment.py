"""Generating needs neither PyTorch nor anything else that only the exporter uses."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPORT_ONLY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "optimum", "nncf", "safetensors", "matplotlib")
BLOCKED_RUN = f"""
import sys

class WithoutExporter:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_blocked = name.split(".")[0] in {EXPORT_ONLY!r}
        return None if is_blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutExporter(finder) for finder in sys.meta_path]
from mirrorsd.cli.application import run
sys.exit(run(sys.argv[1:]))
"""


SERVES = """
import sys
from pathlib import Path
from urllib.request import urlopen
from mirrorsd.server import Running, ServerSettings

with Running({"tiny": Path(sys.argv[1])}, ServerSettings(port=0, device_map="cpu")) as running:
    for path in ("/", "/page/app.js", "/page/vendor/katex.js", "/page/vendor/fonts/KaTeX_Main-Regular.woff2"):
        assert urlopen(running.url.rstrip("/") + path).status == 200
"""


def arguments_for(bundle: Path, method: str) -> list[str]:
    settings = ["--method", method, "--max-new-tokens", "16", "--device-map", "cpu", "--json"]
    return ["generate", str(bundle), "Once upon a time", *settings]


def token_ids(command: list[str]) -> list[int]:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    ids = json.loads(finished.stdout)["token_ids"]
    assert ids
    return list(ids)


def test_generate_with_the_exporter_s_packages_blocked(tiny_bundle: Path) -> None:
    blocked, usual = ([sys.executable, "-c", BLOCKED_RUN], [sys.executable, "-m", "mirrorsd.cli"])
    ids = token_ids([*blocked, *arguments_for(tiny_bundle, "mirror")])
    assert ids == token_ids([*usual, *arguments_for(tiny_bundle, "plain")])


WITHOUT_CLI = """
import runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_blocked = name.split(".")[0] in ("typer", "rich", "click", "prompt_toolkit", "pydantic")
        return None if is_blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.argv = sys.argv[1:]
"""


def test_without_the_command_s_packages_there_is_one_sentence() -> None:
    code = WITHOUT_CLI + "runpy.run_module('mirrorsd', run_name='__main__')"
    finished = subprocess.run(
        [sys.executable, "-c", code, "mirrorsd", "devices"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    assert finished.stderr == (
        'error: This command needs the package typer, which is not installed: pip install "mirrorsd[cli]".\n'
    )


def test_a_program_generates_without_the_command_s_packages(tiny_bundle: Path) -> None:
    code = WITHOUT_CLI + (
        "import mirrorsd\n"
        "with mirrorsd.MirrorPipeline.load(sys.argv[0], device_map='cpu') as pipe:\n"
        "    print(len(pipe.generate('Once', max_new_tokens=5, ignore_eos=True).token_ids))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tiny_bundle)], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stdout) == (0, "5\n"), finished.stderr


def test_export_says_what_to_install(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, tiny_pair)
    command = ["export", target, "--draft", draft, "-o", str(tmp_path / "out.mirror")]
    finished = subprocess.run(
        [sys.executable, "-c", BLOCKED_RUN, *command], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    assert "pip install 'mirrorsd[cpu,export]'" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_generate_from_the_wheel_in_a_fresh_environment(tiny_bundle: Path, tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    data = ("export/verify/calibration.txt", "export/pairs.toml", "device_maps/cpu.toml", "py.typed", "__main__.py")
    wanted = {"optimum/commands/register/register_mirrorsd.py", *(f"mirrorsd/{name}" for name in data)}
    page = [path.relative_to(ROOT).as_posix() for path in (ROOT / "server" / "page").rglob("*") if path.is_file()]
    assert wanted | {f"mirrorsd/{name}" for name in page} <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sources:
        assert set(page) <= {name.partition("/")[2] for name in sources.getnames()}
    environment = tmp_path / "environment"
    run_quietly([sys.executable, "-m", "venv", str(environment)])
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    pins = ["-c", str(ROOT / "constraints.txt")]
    run_quietly([str(scripts / "python"), "-m", "pip", "install", "--quiet", *pins, f"{wheel}[cpu,server]"])
    for package in EXPORT_ONLY:
        module = "optimum.exporters" if package == "optimum" else package  # our wheel adds a command below `optimum`
        probe = subprocess.run([str(scripts / "python"), "-c", f"import {module}"], capture_output=True, check=False)
        assert probe.returncode != 0, f"{package} is installed"
    assert len(token_ids([str(scripts / "mirrorsd"), *arguments_for(tiny_bundle, "mirror")])) <= 16
    packed, bundle = tmp_path / "pair.zip", str(tiny_bundle)
    commands = (
        ["devices"],
        ["doctor", bundle],
        ["pairs"],
        ["pack", bundle, "-o", str(packed)],
        ["inspect", str(packed)],
    )
    for words in commands:
        run_quietly([str(scripts / "mirrorsd"), *words])
    chat = [str(scripts / "mirrorsd"), "chat", str(packed), "--greedy", "--max-new-tokens", "8"]
    answers = subprocess.run(chat, input="Hello\nAnd?\n", capture_output=True, text=True, check=False)
    assert answers.returncode == 0 and answers.stdout, answers.stderr
    run_quietly([str(scripts / "python"), "-c", SERVES, str(tiny_bundle)])


def build_wheel(folder: Path) -> Path:
    """Build it of the source distribution of a copy, so that neither an old `build` folder nor stray files get in."""
    source = folder / "source"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "samples")
    shutil.copytree(ROOT, source, ignore=ignore)
    run_quietly([sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(source)])
    return next(folder.glob("*.whl"))


def run_quietly(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
