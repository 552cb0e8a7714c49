"""Help pages: every word and every option's whole name, however narrow the terminal."""

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import typer

from mirrorsd.cli.application import application, run
from mirrorsd.cli.input import options
from mirrorsd.cli.output import failures, help_pages, readiness
from mirrorsd.device_maps import card
from mirrorsd.export.options import DRAFT_PRECISIONS, PART_PRECISIONS, TARGET_PRECISIONS
from mirrorsd.texts import config

GROUP: Any = typer.main.get_command(application())


def commands(group: Any = GROUP, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


PAGES = dict(commands())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "mirrorsd")
def test_nothing_is_lost_or_cut(
    path: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([*path, "--help"]) == 0
    page = capsys.readouterr().out
    assert "…" not in page
    assert "..." not in re.sub(r"[^ ]\.\.\.", "", page), "arguments that may be repeated aside"
    assert max(map(len, page.splitlines())) <= width
    shown = re.sub(r"\s+", "", page)
    for parameter in PAGES[path].params:
        if not getattr(parameter, "hidden", False):
            missing = [word for word in (parameter.help or "").split() if word not in shown]
            missing += [name for name in parameter.opts + parameter.secondary_opts if name not in shown]
            assert not missing, (parameter.name, missing)
    assert all(word in shown for word in (PAGES[path].help or "").replace("\b", "").split())


def test_help_has_a_short_name_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for path in PAGES:
        assert run([*path, "-h"]) == 0
        assert "Usage: mirrorsd" in capsys.readouterr().out


def test_every_command_has_examples_that_parse() -> None:
    for path, command in PAGES.items():
        lines = (command.epilog or "").replace("\\\n", "").replace("\b", "").split("\n")[2:]
        assert lines or hasattr(command, "commands"), path
        for line in lines:
            assert line.split()[: 1 + len(path)] == ["mirrorsd", *path], line
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert all(word in known for word in line.split() if re.match(r"-+[A-Za-z]", word)), line


def test_choices_are_those_that_the_rest_of_the_program_knows() -> None:
    assert set(options.METHODS) == set(config.METHODS)
    assert get_args(options.TargetPrecision) == TARGET_PRECISIONS
    assert get_args(options.PartPrecision) == PART_PRECISIONS
    assert get_args(options.DraftPrecision) == ("auto", *DRAFT_PRECISIONS)
    layouts = next(kind for kind in get_args(get_args(options.Layout)[0]) if get_args(kind))
    assert get_args(layouts) == card.LAYOUTS
    assert set(options._SPEED_SETTINGS) <= set(config.SpeculationConfig.__dataclass_fields__)


def test_the_rare_settings_stand_in_a_panel_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.index("Text:") < page.index("Speed (changes no token):") < page.index("Options:")
    assert "--gamma" not in page


@pytest.mark.parametrize(
    ("typed", "offered"), [("generate b p --method ", "mirror"), ("generate b p -S ", "gamma="), ("gen", "generate")]
)
def test_the_shell_is_told_what_may_come_next(typed: str, offered: str) -> None:
    environment = {**os.environ, "_MIRRORSD_COMPLETE": "complete_bash", "COMP_WORDS": f"mirrorsd {typed}"}
    environment["COMP_CWORD"] = str(len(f"mirrorsd {typed}".split(" ")) - 1)
    code = "from mirrorsd.cli.application import run; raise SystemExit(run([]))"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert offered in found.stdout.split(), found.stderr


def test_worked_examples() -> None:
    for module in (failures, help_pages, options, readiness):
        tested = doctest.testmod(module)
        assert tested.attempted > 0
        assert tested.failed == 0
