#!/usr/bin/env bash
# Sets up the NPU compiler and holds drafts of the tests' sizes against it: about 3 minutes on a fresh machine with two cores.
#   scripts/npu_compiler/check.sh [PYTHON]      PYTHON has the project with its dev extra; default: the environment's own
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${1:-$here/../../.venv/bin/python}
"$here/setup.sh"
cd "$here/../.."
exec "$python" -m pytest -m npu_compiler tests/device/test_npu_compiler.py
