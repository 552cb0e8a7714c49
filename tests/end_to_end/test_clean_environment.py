"""Generating needs neither PyTorch nor anything else that only the exporter uses."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed_wheel import ROOT, InstalledWheel, run_quietly

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
def test_generate_from_the_wheel_in_a_fresh_environment(
    tiny_bundle: Path, installed_wheel: InstalledWheel, tmp_path: Path
) -> None:
    data = ("export/verify/calibration.txt", "export/pairs.toml", "device_maps/cpu.toml", "py.typed", "__main__.py")
    wanted = {"optimum/commands/register/register_mirrorsd.py", *(f"mirrorsd/{name}" for name in data)}
    page = [path.relative_to(ROOT).as_posix() for path in (ROOT / "server" / "page").rglob("*") if path.is_file()]
    assert wanted | {f"mirrorsd/{name}" for name in page} <= set(zipfile.ZipFile(installed_wheel.wheel).namelist())
    with tarfile.open(installed_wheel.sources) as sources:
        assert set(page) <= {name.partition("/")[2] for name in sources.getnames()}
    programs = installed_wheel.programs
    modules = ["optimum.exporters" if name == "optimum" else name for name in EXPORT_ONLY]
    # Our wheel adds a command below `optimum`; a module whose parent is missing is missing, too.
    finding = f"[print(name) for name in {modules!r} if find_spec(name.split('.')[0]) and find_spec(name)]"
    probe = [str(programs / "python"), "-c", f"from importlib.util import find_spec; {finding}"]
    assert subprocess.run(probe, capture_output=True, text=True, check=True).stdout == "", "these are installed"
    assert len(token_ids([str(programs / "mirrorsd"), *arguments_for(tiny_bundle, "mirror")])) <= 16
    packed, bundle = tmp_path / "pair.zip", str(tiny_bundle)
    commands = (
        ["devices"],
        ["doctor", bundle],
        ["pairs"],
        ["pack", bundle, "-o", str(packed)],
        ["inspect", str(packed)],
    )
    for words in commands:
        run_quietly([str(programs / "mirrorsd"), *words])
    chat = [str(programs / "mirrorsd"), "chat", str(packed), "--greedy", "--max-new-tokens", "8"]
    answers = subprocess.run(chat, input="Hello\nAnd?\n", capture_output=True, text=True, check=False)
    assert answers.returncode == 0 and answers.stdout, answers.stderr
    run_quietly([str(programs / "python"), "-c", SERVES, str(tiny_bundle)])
