"""What PyInstaller asks of the package: where the hooks lie that say what a frozen program takes along.

Owns: the hooks. Does not own: the files that they name. Found by the entry point `hook-dirs` of `pyinstaller40`.
"""

from pathlib import Path


def hook_folders() -> list[str]:
    """The folders with hooks."""
    return [str(Path(__file__).parent)]
