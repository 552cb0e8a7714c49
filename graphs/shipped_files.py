"""Files that ship with the package beside its code: device maps, the page, texts; and what is said where they lack.

A program that is frozen without the package's hook has the code alone, and a copy by hand may lack them as well.
"""

from pathlib import Path

from mirrorsd.graphs.errors import ConfigError


def shipped(path: Path) -> Path:
    """The path of a file that ships with mirrorsd.

    Raises:
        ConfigError: it is not there.
    """
    if path.is_file():
        return path
    raise ConfigError(
        f"This installation of mirrorsd is not complete: {path} is missing. Install it again; a program that is frozen "
        "must take the package's data files along, as its hook for PyInstaller does (docs/installing.md)."
    )
