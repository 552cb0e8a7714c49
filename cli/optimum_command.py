"""`optimum-cli export mirrorsd`: the same command as `mirrorsd export`, where users of Optimum look for it.

Owns: turning the options of `mirrorsd export` into those of Optimum's parser, so that there is one list of them.
Does not own: what they do (`export.py`), how Optimum finds this (`optimum_register/`).
"""

import sys
from argparse import ArgumentParser
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


def export_parameters() -> list[Any]:
    """The arguments and options of `mirrorsd export`, as click describes them."""
    import typer

    from mirrorsd.cli.application import application

    group: Any = typer.main.get_command(application("export"))
    return [parameter for parameter in group.commands["export"].params if parameter.name != "help"]


class MirrorExportCommand(BaseOptimumCLICommand):  # type: ignore[misc] # optimum has no types
    """A target and a draft to a mirror bundle."""

    COMMAND = CommandInfo(name="mirrorsd", help="A target and a draft, for mirror speculative decoding.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Add every argument and option of `mirrorsd export`; none where its packages are missing.

        Optimum asks whenever `optimum-cli` starts, whatever for: nobody else's command may fail of ours.
        """
        try:
            parameters = export_parameters()
        except ModuleNotFoundError:  # which `run` tells
            return
        for parameter in parameters:
            words: dict[str, Any] = {"help": str(parameter.help or "").replace("%", "%%")}
            if parameter.param_type_name == "argument":
                parser.add_argument(parameter.name, **words)
                continue
            words |= {"dest": parameter.name, "default": None}
            if parameter.is_flag:
                words["action"] = "store_true"
                if parameter.secondary_opts:
                    parser.add_argument(*parameter.secondary_opts, **words | {"action": "store_false"})
            else:
                words |= {"required": parameter.required, "metavar": parameter.name.upper()}
                words |= {"action": "append"} if parameter.multiple else {}
            parser.add_argument(*parameter.opts, **words)

    def run(self) -> None:
        """Run `mirrorsd export` with what was given."""
        from mirrorsd.cli.application import run

        positional, options = [], []
        for parameter in export_parameters():
            value = getattr(self.args, parameter.name)
            if parameter.param_type_name == "argument":
                positional.append(value)
            elif isinstance(value, bool):
                options.append((parameter.opts if value else parameter.secondary_opts)[-1])
            elif value is not None:
                for one in value if parameter.multiple else [value]:
                    options += [parameter.opts[-1], one]
        sys.exit(run(["export", *options, "--", *positional]))
