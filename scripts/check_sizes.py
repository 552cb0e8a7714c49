"""No file above 500 KB enters the repository: weights and the like live elsewhere. The commit hook and a test call it.

python3 scripts/check_sizes.py    prints what is too large, and ends with status 1 if anything is
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from environment import ROOT

MOST_BYTES = 500_000
EXCEPT = (
    "samples/smollm2/draft/model.safetensors",
    "samples/smollm2/draft/streams.safetensors",
    "samples/smollm2/draft/tokenizer.json",
    "samples/storyteller/draft/model.safetensors",
    "samples/storyteller/target/model.safetensors",
    "tests/end_to_end/axe/axe.min.js",
)
"""They were there before the rule, and stay as they are until they can live elsewhere."""


def too_large(root: Path) -> list[str]:
    """The tracked files, also those that are only staged, that are larger than the rule allows and no exception."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = [name for name in listed.split("\0") if name and name not in EXCEPT]
    return [name for name in paths if (root / name).is_file() and (root / name).stat().st_size > MOST_BYTES]


def main() -> int:
    """Print what is too large."""
    found = too_large(ROOT)
    for name in found:
        print(f"{name} is larger than {MOST_BYTES // 1000} KB: keep it elsewhere, and name it by address and SHA-256.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
