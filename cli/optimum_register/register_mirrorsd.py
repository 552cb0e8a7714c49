"""Tells `optimum-cli` of `export mirrorsd`; installed as `optimum/commands/register/register_mirrorsd.py`."""

from optimum.commands.export.base import ExportCommand

from mirrorsd.cli.optimum_command import MirrorExportCommand

REGISTER_COMMANDS = [(MirrorExportCommand, ExportCommand)]
