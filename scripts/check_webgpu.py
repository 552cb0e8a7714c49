"""The target on ONNX Runtime's WebGPU provider, in one command: on this machine's GPU, or on a Vulkan made of software.

python3 scripts/check_webgpu.py [-k texts]

Makes an environment of its own (.venv-webgpu, with onnxruntime-webgpu), finds SwiftShader where there is no other
Vulkan (Debian's packages `chromium` and `libvulkan1` bring it; a C compiler is needed for the driver in front of it,
`software_gpu/without_subgroups.c`), then runs tests/device/test_webgpu.py. A software GPU proves placement, copies,
order and texts, no speed. Exit status: pytest's; 4 and the reason where there is nothing to check on.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import environment
from environment import ROOT, SetupError, ensure_environment, environment_python, run_here

NO_DEVICE = 4
WORKPLACE = ROOT / ".webgpu-check"
SOURCE = ROOT / "scripts" / "software_gpu" / "without_subgroups.c"
SOFTWARE = (
    Path("/usr/lib/chromium/libvk_swiftshader.so"),
    Path("/usr/lib/chromium-browser/libvk_swiftshader.so"),
    Path("/opt/google/chrome/libvk_swiftshader.so"),
)


def main() -> int:
    """Set up and run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only tests whose name holds this")
    only = parser.parse_args().k
    try:
        tests = ensure_environment({"dev"})
        environment.use_folder(ROOT / ".venv-webgpu")
        ensure_environment({"webgpu"})
        variables = {"MIRRORSD_WEBGPU_PYTHON": str(environment_python()), **gpu_variables()}
    except SetupError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return NO_DEVICE
    command = [str(tests), "-m", "pytest", "tests/device/test_webgpu.py", "-q", *(["-k", only] if only else [])]
    return run_here(command, variables)


def gpu_variables() -> dict[str, str]:
    """What the environment must say: nothing where the system has a Vulkan of its own, else the software one."""
    if sys.platform != "linux" or any(Path("/usr/share/vulkan/icd.d").glob("*.json")):
        return {}
    software = next((path for path in SOFTWARE if path.is_file()), None)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if ctypes.util.find_library("vulkan") is None or software is None or compiler is None:
        raise SetupError(
            "there is no Vulkan. Install a graphics driver, or for a GPU made of software: "
            "apt install chromium libvulkan1 gcc"
        )
    WORKPLACE.mkdir(exist_ok=True)
    driver, card = WORKPLACE / "without_subgroups.so", WORKPLACE / "icd.json"
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(driver), str(SOURCE), "-ldl"], check=False)
    if built.returncode:
        raise SetupError(f"{SOURCE.name} does not compile here (see above)")
    icd = {"library_path": str(driver), "api_version": "1.0.5"}
    card.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}), encoding="utf-8")
    print(f"no GPU with a Vulkan driver: on {software} instead", flush=True)
    folder = os.environ.get("XDG_RUNTIME_DIR", str(WORKPLACE))
    return {"VK_ICD_FILENAMES": str(card), "SOFTWARE_VULKAN": str(software), "XDG_RUNTIME_DIR": folder}


if __name__ == "__main__":
    sys.exit(main())
