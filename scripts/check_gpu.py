"""The target on this machine's NVIDIA GPU, in one command: installs, exports, checks parity and exactness, measures.

python3 scripts/check_gpu.py [--small] [--device-map cuda-cpu] [--output gpu.json]

Makes an environment of its own (.venv-gpu, with onnxruntime-gpu), exports the sample pair in fp16, and in int8 and
int4 that compute in fp16, and a cost-scaled target of 1 B parameters in fp16 (--small leaves that out), then runs
bench/studies/gpu.py on them: one table, and a JSON of everything. In fp16, since ONNX Runtime's CUDA provider has
attention in fp16 and bf16 alone, and the processor that it is compared with none in bf16. Exit status: 0 if all is
fine, 1 if a check failed, 4 and the reason where there is no GPU to check.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import environment
from environment import ROOT, SetupError, ensure_environment, environment_command, run_here

SAMPLE = Path("samples") / "storyteller"
WORKPLACE = ROOT / ".gpu-check"
NO_DEVICE = 4
SCALE = ("--width", "6", "--depth", "4")
"""Sample's 10 M parameters to about 1 B: six times as wide, four times as deep."""
FREE_GIGABYTES = 12


def main() -> int:
    """Run the steps in order and stop at the first that fails."""
    options = parse_arguments(sys.argv[1:])
    reason = why_not()
    if reason:
        print(f"no GPU was checked: {reason}", file=sys.stderr)
        return NO_DEVICE
    environment.use_folder(ROOT / ".venv-gpu")
    try:
        ensure_environment({"cuda", "cli", "export"})
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bundles = [(precision, SAMPLE / "target") for precision in ("fp16", "int8", "int4")]
    if not options.small:
        large = WORKPLACE / "target-1b"
        if not (large / "model.safetensors").is_file():
            shutil.rmtree(large, ignore_errors=True)
            status = run_python("samples/scale_up.py", str(SAMPLE / "target"), str(large), *SCALE)
            if status:
                return status
        bundles.append(("fp16", large))
    return export_all(bundles) or run_python(
        "bench/studies/gpu.py",
        *map(str, bundle_paths(bundles)),
        "--device-map",
        options.device_map,
        *output(options.output),
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the script's own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="only the sample's own size")
    parser.add_argument("--device-map", default="cuda-cpu")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    return parser.parse_args(arguments)


def why_not() -> str:
    """Why no GPU can be checked here; empty if one can."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi was not found: there is no NVIDIA driver. Install it, or run this on a machine with a GPU"
    asked = subprocess.run(
        [tool, "--query-gpu=name,memory.free", "--format=csv,noheader"], capture_output=True, text=True
    )
    if asked.returncode or not asked.stdout.strip():
        said = (asked.stderr or asked.stdout).strip().splitlines()
        return f"nvidia-smi finds no GPU ({said[-1] if said else 'it says nothing'}). Check the driver"
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GIGABYTES:
        return f"{free:.0f} GB are free on this disk; environment and bundles need {FREE_GIGABYTES}"
    print(f"checking {asked.stdout.strip()}", flush=True)
    return ""


def bundle_paths(bundles: list[tuple[str, Path]]) -> list[Path]:
    """Where each bundle goes."""
    return [WORKPLACE / f"{target.parent.name}-{target.name}-{precision}.mirror" for precision, target in bundles]


def export_all(bundles: list[tuple[str, Path]]) -> int:
    """Export what is not there yet."""
    WORKPLACE.mkdir(exist_ok=True)
    for (precision, target), path in zip(bundles, bundle_paths(bundles), strict=True):
        if path.is_dir():
            continue
        pair = [str(target), "--draft", str(SAMPLE / "draft"), "-o", str(path), "--precision", precision]
        pair += [] if precision == "fp16" else ["--compute", "fp16"]
        status = run_here([str(environment_command("mirrorsd")), "export", *pair])
        if status:
            return status
    return 0


def run_python(script: str, *arguments: str) -> int:
    """Run one of the project's scripts in the environment."""
    return run_here([str(environment.environment_python()), script, *arguments])


def output(path: Path) -> list[str]:
    """Where the report goes, as options of bench/studies/gpu.py."""
    return ["--output", str(path.resolve())]


if __name__ == "__main__":
    sys.exit(main())
