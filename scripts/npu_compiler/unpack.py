"""Take the libraries and the C headers out of OpenVINO's Windows wheels: `unpack.py WHEELS LIBRARIES HEADERS`."""

import sys
import zipfile
from pathlib import Path, PurePosixPath

_HEADERS = PurePosixPath("openvino/include")
_FILES = ("cache.json", "openvino_c.lib")


def unpack(wheels: Path, libraries: Path, headers: Path) -> None:
    """Unpack what the compiler needs of every wheel in `wheels`."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (target := _target(PurePosixPath(name), libraries, headers)) is not None:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))


def _target(inside: PurePosixPath, libraries: Path, headers: Path) -> Path | None:
    if inside.suffix == ".dll" or inside.name in _FILES:
        return libraries / inside.name
    return headers / inside.relative_to(_HEADERS) if inside.is_relative_to(_HEADERS / "openvino" / "c") else None


if __name__ == "__main__":
    unpack(*map(Path, sys.argv[1:4]))
