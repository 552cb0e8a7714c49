"""Who may import whom: the table of the architecture, checked on the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRAINERS = {"numpy", "torch", "transformers", "safetensors", "tokenizers"}
COMPILERS = {"huggingface_hub", "onnx", "onnx_ir", "onnxscript", "optimum", "onnxruntime", "openvino", "nncf", "gguf"}
ALLOWED = {
    "freezing": {"PyInstaller"},
    "graphs": {"numpy", "filelock", "msgspec", "platformdirs"},
    "device_maps": {"mirrorsd.graphs"},
    "hub": {"mirrorsd.graphs", "huggingface_hub"},
    "families": {"mirrorsd.graphs", "torch", "transformers", "tokenizers", "huggingface_hub"},
    "export": {
        "mirrorsd.graphs",
        "mirrorsd.device_maps",
        "mirrorsd.devices",
        "mirrorsd.families",
        "mirrorsd.hub",
        "mirrorsd.texts",
        "psutil",
        *TRAINERS,
        *COMPILERS,
    },
    "texts": {"mirrorsd.graphs", "mirrorsd.device_maps", "numpy", "tokenizers", "jinja2", "llguidance"},
    "devices": {"mirrorsd.graphs", "mirrorsd.device_maps", "numpy", "onnxruntime", "openvino", "psutil"},
    "runtime": {
        *("mirrorsd.graphs", "mirrorsd.device_maps", "mirrorsd.hub", "mirrorsd.texts", "mirrorsd.devices"),
        *("numpy", "onnxruntime", "openvino", "packaging", "psutil"),
    },
    "machine": {
        *("mirrorsd.graphs", "mirrorsd.device_maps", "mirrorsd.texts", "mirrorsd.devices", "mirrorsd.runtime"),
        *("mirrorsd.hub", "numpy", "onnxruntime", "openvino", "packaging", "psutil"),
    },
    "testing": {"mirrorsd.devices", "mirrorsd.graphs", "mirrorsd.runtime", "numpy"},
    "training": {"mirrorsd.graphs", "mirrorsd.families", "matplotlib", *TRAINERS},
    "server": {
        *("mirrorsd", "mirrorsd.graphs", "mirrorsd.hub", "mirrorsd.texts", "mirrorsd.devices"),
        *("mirrorsd.machine", "mirrorsd.runtime"),
        *("starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "h11", "httpx2"),
    },
    "cli": {
        *("mirrorsd", "mirrorsd.graphs", "mirrorsd.device_maps", "mirrorsd.export", "mirrorsd.hub"),
        *(
            "mirrorsd.texts",
            "mirrorsd.devices",
            "mirrorsd.machine",
            "mirrorsd.runtime",
            "mirrorsd.server",
            "mirrorsd.training",
            "typer",
            "rich",
            "matplotlib",
            "optimum",
        ),
        *("prompt_toolkit", "numpy"),
        *("openvino", "openvino_genai", "onnxruntime_genai"),  # in the environments of other runtimes
    },
}
"""What each folder may import besides the standard library and itself."""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "mirrorsd":
            submodules = {alias.name for alias in node.names} & set(ALLOWED)
            yield from (f"mirrorsd.{name}" for name in submodules) if submodules else ("mirrorsd",)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def owner(module: str) -> str:
    """`mirrorsd.graphs.names` belongs to `mirrorsd.graphs`, `torch.nn` to `torch`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "mirrorsd" else parts[0]


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    allowed = ALLOWED[folder] | {f"mirrorsd.{folder}"} | sys.stdlib_module_names
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in imported_modules(path)
        if owner(module) not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ALLOWED)
def test_relative_imports_stay_in_their_folder(folder: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level > 1
    ]
    assert not wrong


def test_every_packaged_folder_is_in_the_table() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"bench"} == set(ALLOWED)


@pytest.mark.parametrize("path", sorted((ROOT / "samples").glob("*.py")), ids=lambda path: path.stem)
def test_samples_use_only_the_public_names(path: Path) -> None:
    own = [module for module in imported_modules(path) if module.split(".")[0] == "mirrorsd"]
    assert set(own) <= {"mirrorsd", "mirrorsd.graphs.errors"}
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100


def test_nothing_but_its_command_knows_the_server() -> None:
    knowing = {
        path.relative_to(ROOT).as_posix()
        for folder in ALLOWED
        for path in (ROOT / folder).rglob("*.py")
        if folder != "server" and any(owner(module) == "mirrorsd.server" for module in imported_modules(path))
    }
    assert knowing == {"cli/commands/serve.py", "cli/commands/front.py"}


def modules() -> dict[str, Path]:
    """Every module of the packaged folders by its dotted name inside the project."""
    paths = [path for folder in (*ALLOWED, "bench") for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def test_no_two_files_know_each_other() -> None:
    """Not even for types alone: what two files need of each other has a name of its own, below both."""
    known = modules()
    edges: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mirrorsd."):
                base = (node.module or "").removeprefix("mirrorsd.")
                wanted = {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
                edges[name] |= (wanted & known.keys()) - {name}
    free: set[str] = set()
    while more := {name for name in edges.keys() - free if edges[name] <= free}:
        free |= more
    assert not edges.keys() - free, "these files import each other, or what does"
