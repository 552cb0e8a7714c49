#!/usr/bin/env bash
# Sets up the NPU compiler and holds drafts of the tests' sizes against it: about 3 minutes on a fresh machine with two cores.
#   scripts/npu_compiler/check.sh [PYTHON]      PYTHON has the project with its dev extra; default: the environment's own
# Exit status: pytest's; 4 and the reason where the compiler cannot be set up within SETUP_LIMIT_S seconds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${1:-$here/../../.venv/bin/python}
limit=${SETUP_LIMIT_S:-600}
if ! timeout "$limit" "$here/setup.sh"; then
    echo "nothing was checked: $here/setup.sh did not set the compiler up within $limit s (see above)" >&2
    exit 4
fi
cd "$here/../.."
exec "$python" -m pytest -q -m npu_compiler tests/device/test_npu_compiler.py
