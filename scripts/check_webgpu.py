"""The target on ONNX Runtime's WebGPU provider, in one command: on this machine's GPU, or on a Vulkan made of software.

python3 scripts/check_webgpu.py [-k texts] [--quick] [--install] [--prepare]

Makes an environment of its own (.venv-webgpu, with onnxruntime-webgpu), finds SwiftShader where there is no GPU
(Debian's packages `chromium` and `libvulkan1` bring it, --install installs them as root; a C compiler is needed for
the driver in front of it, `software_gpu/driver.c`), then runs tests/device/test_webgpu.py; --quick leaves out what the
plain test command leaves out, --prepare runs no test and prints what they must be told. A software GPU proves
placement, copies, order and texts, no speed. Exit status: pytest's; 4 and the reason where nothing was checked.
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
SOURCE = ROOT / "scripts" / "software_gpu" / "driver.c"
PACKAGES = ("chromium", "libvulkan1", "gcc", "libc6-dev")
INSTALL_LIMIT_S = 150
GPUS = ("dri/renderD*", "nvidiactl", "dxg")
"""What a GPU's driver puts into /dev; Mesa's drivers may be installed without one."""
SOFTWARE = (
    Path("/usr/lib/chromium/libvk_swiftshader.so"),
    Path("/usr/lib/chromium-browser/libvk_swiftshader.so"),
    Path("/opt/google/chrome/libvk_swiftshader.so"),
)


def main() -> int:
    """Set up and run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only tests whose name holds this")
    parser.add_argument("--quick", action="store_true", help="without the long tests")
    parser.add_argument("--install", action="store_true", help="install a GPU made of software where one is missing")
    parser.add_argument("--prepare", action="store_true", help="run no test")
    options = parser.parse_args()
    try:
        gpu = gpu_variables(may_install=options.install)
        tests = environment_python() if options.prepare else ensure_environment({"dev"})
        environment.use_folder(ROOT / ".venv-webgpu")
        ensure_environment({"webgpu"})
        variables = {"MIRRORSD_WEBGPU_PYTHON": str(environment_python()), **gpu}
    except SetupError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return NO_DEVICE
    if options.prepare:
        print(json.dumps(variables))
        return 0
    chosen = (["-k", options.k] if options.k else []) + (["-m", "not long"] if options.quick else [])
    return run_here([str(tests), "-m", "pytest", "tests/device/test_webgpu.py", "-q", *chosen], variables)


def gpu_variables(*, may_install: bool) -> dict[str, str]:
    """What the environment must say: nothing where there is a GPU, else the software one.

    Raises:
        SetupError: there is neither.
    """
    if sys.platform != "linux" or any(any(Path("/dev").glob(pattern)) for pattern in GPUS):
        return {}
    if may_install and not all(_software_parts()):
        install_packages()
    software, compiler, has_loader = _software_parts()
    if software is None or compiler is None or not has_loader:
        raise SetupError(
            f"there is no GPU. For one that is made of software (Debian, Ubuntu): apt-get install {' '.join(PACKAGES)}"
        )
    WORKPLACE.mkdir(exist_ok=True)
    driver, card = WORKPLACE / "driver.so", WORKPLACE / "icd.json"
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(driver), str(SOURCE), "-ldl"], check=False)
    if built.returncode:
        raise SetupError(f"{SOURCE.name} does not compile here (see above)")
    icd = {"library_path": str(driver), "api_version": "1.0.5"}
    card.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}), encoding="utf-8")
    print(f"no GPU: on {software} instead", flush=True)
    folder = os.environ.get("XDG_RUNTIME_DIR", str(WORKPLACE))
    return {"VK_ICD_FILENAMES": str(card), "SOFTWARE_VULKAN": str(software), "XDG_RUNTIME_DIR": folder}


def _software_parts() -> tuple[Path | None, str | None, bool]:
    """The software's library, a C compiler, and whether there is a Vulkan loader."""
    software = next((path for path in SOFTWARE if path.is_file()), None)
    return software, shutil.which("gcc") or shutil.which("cc"), ctypes.util.find_library("vulkan") is not None


def install_packages() -> None:
    """Install what the software GPU needs, as root and with apt-get; does nothing elsewhere.

    Raises:
        SetupError: it takes too long.
    """
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        return
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    try:
        for command in (["apt-get", "update", "-qq"], install):
            subprocess.run(command, check=False, timeout=INSTALL_LIMIT_S, env=variables, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{' '.join(PACKAGES)} were not installed within {INSTALL_LIMIT_S} s") from error


if __name__ == "__main__":
    sys.exit(main())
