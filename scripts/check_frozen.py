"""A program that is frozen with PyInstaller from the wheel, in one command: does it run at the first try?

python3 scripts/check_frozen.py [--prepare]

Runs tests/device/test_frozen.py, which builds the wheel, installs it with PyInstaller in an environment of its own, and
freezes a program that loads a bundle and generates, and the command `mirrorsd` itself. --prepare runs no test and
prints what it must be told. Exit status: pytest's; 4 and the reason where nothing was checked.
"""

from __future__ import annotations

import json
import subprocess
import sys

from environment import SetupError, ensure_environment, run_here

NOTHING_TO_CHECK = 4
VARIABLE = "MIRRORSD_FREEZES"


def main() -> int:
    """Set up and run the tests."""
    try:
        if subprocess.run([sys.executable, "-c", "import ensurepip"], check=False).returncode:
            raise SetupError("this Python makes no environments with pip (Debian: python3-venv)")
        if "--prepare" in sys.argv[1:]:
            print(json.dumps({VARIABLE: "1"}))
            return 0
        tests = ensure_environment({"dev"})
    except SetupError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return NOTHING_TO_CHECK
    return run_here([str(tests), "-m", "pytest", "tests/device/test_frozen.py", "-q", "-n", "0"], {VARIABLE: "1"})


if __name__ == "__main__":
    sys.exit(main())
