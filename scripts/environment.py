"""The virtual environment that the scripts share: made once, installed into when the project's needs change.

Standard library only, and readable by older Pythons, so that those get a message instead of a traceback.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from ast import literal_eval
from datetime import date
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "mirrorsd-installed.json"
MINIMUM_PYTHON = (3, 11)
UV = "uv==0.13.9"
"""It installs in a third of pip's time, and resolves to the lowest versions, which pip cannot."""
FOR_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""What pip's settings are called there, and what stands between several values."""
ENDS = {"oldest": "lowest-direct", "newest": "highest"}
"""The packages at either end of what `pyproject.toml` allows, and what uv calls them."""
IMPLIED_EXTRAS = {"dev": {"dev", "cpu", "cli", "export", "compress", "plots", "optimum", "server"}}


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def ensure_environment(extras: set[str]) -> Path:
    """Make `.venv` hold the project (editable) with these extras; return its Python.

    Raises:
        SetupError: this Python is too old, or venv or pip failed.
    """
    make_environment()
    digest = needs_digest(ROOT)
    installed = installed_extras(STAMP, digest)
    if not extras <= installed:
        wanted = sorted(extras | installed)
        print(f"Installing mirrorsd[{','.join(wanted)}] (a few minutes the first time)", flush=True)
        _install(wanted)
        STAMP.write_text(json.dumps({"digest": digest, "extras": wanted}), encoding="utf-8")
    return environment_python()


def make_environment() -> None:
    """Make `.venv` with nothing but pip in it, where there is none that can be used.

    Raises:
        SetupError: this Python is too old, or venv failed.
    """
    check_python(sys.version_info[:2])
    if not _is_usable(environment_python()):
        print(f"Making a virtual environment in {ENVIRONMENT.name}", flush=True)
        _call([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], _VENV_ADVICE)


def ensure_end(end: str, extras: set[str]) -> Path:
    """Make an environment of its own hold the oldest or newest packages that are allowed, and no editable install.

    The newest ones are looked for anew every day. uv's own variables (`UV_OVERRIDE`, `UV_FIND_LINKS`, ..) go before
    pip's settings.

    Raises:
        SetupError: this Python is too old, two bounds do not fit together, or an installation failed.
    """
    check_python(sys.version_info[:2])
    use_folder(ROOT / f".venv-{end}")
    python, pins = environment_python(), ENVIRONMENT / f"{end}.txt"
    digest = needs_digest(ROOT) + (f"{date.today()}" if end == "newest" else "")
    if extras <= installed_extras(STAMP, digest):
        return python
    print(f"Making {ENVIRONMENT.name} with the {end} packages that pyproject.toml allows", flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], _VENV_ADVICE)
    _call([*_pip(python), UV], _PIP_ADVICE)
    uv, variables = [str(environment_command("uv")), "pip"], uv_variables(python)
    wanted = [word for extra in sorted(extras) for word in ("--extra", extra)]
    resolution = ["--resolution", ENDS[end], "--quiet", "--no-emit-package", "mirrorsd", "-o", str(pins)]
    _call([*uv, "compile", "pyproject.toml", *wanted, *resolution], _BOUNDS_ADVICE, variables)
    _call([*uv, "install", "--quiet", "--python", str(python), "-r", str(pins)], _PIP_ADVICE, variables)
    STAMP.write_text(json.dumps({"digest": digest, "extras": sorted(extras)}), encoding="utf-8")
    return python


def use_folder(folder: Path) -> None:
    """Make and use another environment than `.venv`: two flavours of ONNX Runtime do not fit into one."""
    global ENVIRONMENT, STAMP
    ENVIRONMENT, STAMP = folder, folder / STAMP.name


def environment_python() -> Path:
    """Where the environment's Python is on this system."""
    return ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def environment_command(name: str) -> Path:
    """Where a console command of the environment is on this system."""
    return ENVIRONMENT / (f"Scripts/{name}.exe" if os.name == "nt" else f"bin/{name}")


def check_python(version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old."""
    if version < MINIMUM_PYTHON:
        found, needed = (".".join(map(str, v)) for v in (version, MINIMUM_PYTHON))
        raise SetupError(f"This is Python {found}; mirrorsd needs {needed} or newer. Start the script with that one.")


def needs_digest(root: Path) -> str:
    """A digest of what decides the installed packages: this Python, `pyproject.toml`, the constraints, and the place.

    An environment that was copied along with its clone has the first clone's package in it.
    """
    digest = hashlib.sha256(repr((sys.version_info[:2], str(root.resolve()))).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def installed_extras(stamp: Path, digest: str) -> set[str]:
    """Extras that an earlier run installed for the same needs; empty where there was none or the needs changed."""
    try:
        document = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    if document.get("digest") != digest:
        return set()
    extras = set(document.get("extras", ()))
    return extras.union(*(IMPLIED_EXTRAS.get(extra, set()) for extra in extras))


def link_package(root: Path) -> None:
    """Make `.typing/mirrorsd` point at the root, so that mypy sees the folders under their import name."""
    link = root / ".typing" / "mirrorsd"
    if link.exists():
        return
    link.parent.mkdir(exist_ok=True)
    if os.name == "nt":
        # A junction, because symbolic links need a privilege on Windows.
        subprocess.run(["cmd", "/c", "mklink", "/J", str(link), str(root)], check=True, stdout=subprocess.DEVNULL)
    else:
        link.symlink_to("..", target_is_directory=True)


def run_here(
    command: list[str],
    extra_variables: dict[str, str] | None = None,
    output: IO[str] | None = None,
    limit_s: float | None = None,
) -> int:
    """Run a command in the project's folder and return its exit status; what it says goes to `output`, if given.

    One that takes longer than `limit_s` seconds is killed, which is said. Python keeps what it compiles, whatever the
    caller's variables say: packages are installed uncompiled, and each of hundreds of processes would compile them.
    """
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **(extra_variables or {})}
    settings: dict[str, Any] = {"stdout": output, "stderr": output, "timeout": limit_s}
    try:
        return subprocess.run(command, cwd=ROOT, env=variables, check=False, **settings).returncode
    except subprocess.TimeoutExpired:
        print(f"error: {' '.join(command[1:3])} had not ended after {limit_s:.0f} s", file=sys.stderr, flush=True)
        return OVERDUE


OVERDUE = 124
"""The status of a command that was killed as it took too long: that of `timeout`."""
_VENV_ADVICE = "python -m venv failed. On Debian and Ubuntu install the package python3-venv, then try again."
_BOUNDS_ADVICE = "Two lower bounds of pyproject.toml do not fit together (see above): raise the one that lies."
_PIP_ADVICE = "The packages could not be installed (see above). Check the network connection and try again."


def _is_usable(python: Path) -> bool:
    if not python.is_file():
        return False
    probe = [str(python), "-c", "import sys, pip; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _install(extras: list[str]) -> None:
    """Install uncompiled: Python compiles a file when it is first imported, which most of 14,000 never are.

    pip does what uv cannot: there may be none for this system, or an index that it does not understand.
    """
    python = environment_python()
    wanted = ["-c", "constraints.txt", "-e", f".[{','.join(extras)}]"]
    uv = [str(environment_command("uv")), "pip", "install", "--quiet", "--python", str(python)]
    if run_here([*_pip(python), UV]) or run_here([*uv, *wanted], uv_variables(python)):
        print("uv could not install the packages (see above): pip does", flush=True)
        _call([*_pip(python), *wanted], _PIP_ADVICE)


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]


def uv_variables(python: Path) -> dict[str, str]:
    """Variables that tell uv what pip's settings tell pip, and to choose among all indexes as pip does."""
    command = [str(python), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    told = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        if variable := FOR_UV.get(name.rpartition(".")[2]):
            told.setdefault(variable[0], variable[1].join(literal_eval(value).split()))
    return {name: value for name, value in told.items() if name not in os.environ}


def _call(command: list[str], advice: str, variables: dict[str, str] | None = None) -> None:
    if run_here(command, variables) != 0:
        raise SetupError(advice)
