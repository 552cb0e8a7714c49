"""The command's own: it imports a sub-command only when that is asked for."""

from PyInstaller.utils.hooks import collect_submodules

hiddenimports = collect_submodules("mirrorsd.cli")
