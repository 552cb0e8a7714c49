"""Intel's NPU compiler as a command: one static graph in, a blob and what the compiler says of it out.

OpenVINO has the compiler on Windows, and on Linux where its library lies beside the plugin; elsewhere any command that
takes `MODEL.xml BLOB PLATFORM KEY=VALUE...` will do (`scripts/npu_compiler` has one). No NPU is needed. Every figure
here is the compiler's estimate, never a measurement.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import openvino as ov

from mirrorsd.devices.openvino.draft_shapes import tile_options
from mirrorsd.devices.openvino.saved_graph import save_graph
from mirrorsd.graphs.errors import ConfigError, DeviceError

PLATFORM_BY_NAME = {"meteor-lake": "3720", "arrow-lake": "3720", "lunar-lake": "4000", "panther-lake": "5010"}
COMPILE_LIMIT_S = 300.0
_OWN = (sys.executable, "-m", "mirrorsd.machine.npu.own_compiler")
_TRACE = "compileTimeScheduleTrace.json"
_MOST_NODES = 8
_LEAST_WEIGHTS = 256
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LATENCY = re.compile(r"Estimated inference latency: ([0-9.]+) us in dpu frequency ([0-9.]+)")
_NOT_COSTED = re.compile(r"SHAVE operations are unsupported by VPUNN[^\[]*\[([^\]]*)\]")
_VERSION = re.compile(r"^OpenVINO (\S+)", re.MULTILINE)
_NO_COMPILER = (
    "OpenVINO has no NPU compiler here (its Linux wheel lacks the library): run scripts/npu_compiler/setup.sh of the "
    "project and give its command as --npu-compiler, or compile under Windows."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """What the schedule spends on one node of our graph: `unit` is "transfer", "matrix" or "kernel"."""

    node: str
    unit: str
    microseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeReport:
    """What the compiler says of one shape on one platform; times are its estimates, in microseconds.

    Attributes:
        error: the compiler's own words where it refused; empty where it compiled.
        estimated_us: one inference; None where refused. Kernels in `not_costed` count as nothing in it.
        transfers_us, matrix_us, kernels_us: sums over units that work side by side, so more than `estimated_us`.
        is_kept: whether the bundle keeps the blob.
    """

    shape: str
    platform: str
    weight_bytes: int
    error: str = ""
    estimated_us: float | None = None
    frequency_mhz: float | None = None
    blob_bytes: int = 0
    transfers_us: float = 0.0
    matrix_us: float = 0.0
    kernels_us: float = 0.0
    not_costed: tuple[str, ...] = ()
    costliest: tuple[NodeCost, ...] = ()
    openvino: str = ""
    is_kept: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether there is a blob."""
        return not self.error


def platforms_of(text: str) -> tuple[str, ...]:
    """The platforms that `text` names, by number or by machine, separated by commas.

    >>> platforms_of("arrow-lake,4000,3720")
    ('3720', '4000')

    Raises:
        ConfigError: one of them is not known.
    """
    numbers = set(PLATFORM_BY_NAME.values())
    found: list[str] = []
    for word in (part.strip().lower() for part in text.split(",")):
        platform = PLATFORM_BY_NAME.get(word, word)
        if platform not in numbers:
            known = ", ".join((*sorted(numbers), *PLATFORM_BY_NAME))
            raise ConfigError(f"--npu has {word!r}, which is no NPU that mirrorsd knows; known are {known}.")
        if platform not in found:
            found.append(platform)
    return tuple(found)


class NpuCompiler:
    """The compiler of this machine, or a command that the user names."""

    def __init__(self, command: str | None = None) -> None:
        """Choose the compiler.

        Raises:
            ConfigError: none is given, and OpenVINO has none here.
        """
        if command is not None and not command.split():
            raise ConfigError("--npu-compiler is empty; expected the command of a compiler.")
        if command is None and not has_own_compiler():
            raise ConfigError(_NO_COMPILER)
        self._command = _from_here(shlex.split(command)) if command else _OWN

    def compile(self, model: ov.Model, shape: str, platform: str, blob: Path) -> ShapeReport:
        """Compile a static graph for `platform` into the file `blob`, which is missing where it is refused.

        Raises:
            DeviceError: the command cannot be run, or is no such compiler.
        """
        with tempfile.TemporaryDirectory(prefix="mirrorsd-npu-") as scratch:
            path, made = Path(scratch) / "draft.xml", Path(scratch) / "draft.blob"
            save_graph(model, path, in_fp16=True)
            options = tile_options(model) | {"NPU_COMPILATION_MODE_PARAMS": "enable-schedule-trace=true"}
            properties = (f"{name}={value}" for name, value in options.items())
            said, status = self._run((str(path), str(made), platform, *properties), Path(scratch))
            error = _error_in(said)
            if not (status or error or made.is_file()):
                raise DeviceError(
                    f"{shlex.join(self._command)} ended with 0 and wrote no blob: it is no compiler that takes "
                    "MODEL.xml BLOB PLATFORM KEY=VALUE... Check --npu-compiler."
                )
            head: dict[str, Any] = {"shape": shape, "platform": platform, "weight_bytes": weight_bytes(model)}
            if status or not made.is_file():
                return ShapeReport(**head, error=error or f"exit status {status}: {said.strip()[-300:]}")
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(made.read_bytes())
            trace = Path(scratch) / _TRACE
            schedule = _schedule(json.loads(trace.read_text(encoding="utf-8"))) if trace.is_file() else {}
            return ShapeReport(**head, blob_bytes=blob.stat().st_size, **_estimate(said), **schedule)

    def _run(self, words: Sequence[str], folder: Path) -> tuple[str, int]:
        """What the compiler says and its status; one that does not end in time is ended, with all that it has begun."""
        try:
            ran = subprocess.Popen(
                [*self._command, *words],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceError(
                f"The NPU compiler {self._command[0]!r} cannot be run ({error.strerror}). Check --npu-compiler."
            ) from error
        with ran:
            try:
                out, err = ran.communicate(timeout=COMPILE_LIMIT_S)
            except subprocess.TimeoutExpired:
                _end(ran)
                return f"[ERROR] 0 [mirrorsd] the compiler did not end within {COMPILE_LIMIT_S:g} s", 1
            except BaseException:
                _end(ran)
                raise
        said = (out + b"\n" + err).decode(errors="replace")
        return _COLOURS.sub("", said), ran.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was begun in a session of its own, and what it has begun (Wine and its programs)."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _from_here(words: list[str]) -> tuple[str, ...]:
    """The command with the whole path of a program in a folder, since it is called from another one.

    >>> _from_here(["npu-compiler", "--quiet"])
    ('npu-compiler', '--quiet')
    """
    program, *others = words
    return (str(Path(program).absolute()) if Path(program).parent != Path() else program, *others)


def weight_bytes(model: ov.Model) -> int:
    """Bytes of a graph's weights as they reach the device: sixteen bits where they are not integers."""
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    sizes = [
        2 * prod(node.get_output_shape(0)) if node.get_element_type().is_real() else node.get_byte_size()
        for node in constants
        if prod(node.get_output_shape(0)) >= _LEAST_WEIGHTS
    ]
    return int(sum(sizes))


def has_own_compiler() -> bool:
    """Whether this OpenVINO comes with the NPU's compiler."""
    libraries = Path(ov.__file__).parent / "libs"
    return any(
        path.exists()
        for path in libraries.glob(f"*openvino_intel_npu_compiler*{'.dll' if os.name == 'nt' else '.so*'}")
    )


def _estimate(said: str) -> dict[str, Any]:
    latency, unknown, version = (pattern.search(said) for pattern in (_LATENCY, _NOT_COSTED, _VERSION))
    return {
        "estimated_us": float(latency[1]) if latency else None,
        "frequency_mhz": float(latency[2]) if latency else None,
        "not_costed": tuple(unknown[1].split(", ")) if unknown else (),
        "openvino": version[1] if version else "",
    }


def _error_in(said: str) -> str:
    """What the compiler's lines of errors say, each once."""
    lines = [line.split("]", 2)[-1].strip() for line in said.splitlines() if line.startswith("[ERROR]")]
    return "; ".join(dict.fromkeys(filter(None, lines)))[:600]


_UNITS = {"DMA": "transfer", "Shave": "kernel", "DPU": "matrix"}


def _schedule(trace: dict[str, Any]) -> dict[str, Any]:
    """Sums and the costliest nodes of the compiler's trace of its schedule (Chrome's trace format)."""
    events = trace["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    by_node: dict[tuple[str, str], float] = defaultdict(float)
    sums: dict[str, float] = dict.fromkeys(_UNITS.values(), 0.0)
    for event in events:
        name = threads.get((event["pid"], event.get("tid")), processes.get(event["pid"], ""))
        unit = _UNITS.get(name.split(" ")[0])
        if event.get("ph") == "X" and unit:
            sums[unit] += event["dur"]
            by_node[unit, event["name"].split("?")[0]] += event["dur"]
    costliest = sorted(by_node.items(), key=lambda pair: -pair[1])[:_MOST_NODES]
    return {
        "transfers_us": round(sums["transfer"], 2),
        "matrix_us": round(sums["matrix"], 2),
        "kernels_us": round(sums["kernel"], 2),
        "costliest": tuple(NodeCost(node=node, unit=unit, microseconds=round(us, 2)) for (unit, node), us in costliest),
    }
