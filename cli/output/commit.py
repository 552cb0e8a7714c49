"""Which commit this program is of: what its package says, or its clone."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMIT_FILE = "commit.txt"
"""In a wheel and in a source distribution, whose builds write it (`scripts/editable_types.py`)."""
_LIMIT_S = 5


def source_commit(root: Path = ROOT) -> str:
    """Return the commit, with a `+` where files were changed since; empty where nobody knows."""
    noted = root / COMMIT_FILE
    if noted.is_file():
        return noted.read_text(encoding="ascii").strip()
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.check_output(command, text=True, timeout=_LIMIT_S, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
