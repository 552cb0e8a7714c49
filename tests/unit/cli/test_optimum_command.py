"""`optimum-cli export mirrorsd`: found where Optimum looks, with the options of `mirrorsd export`, and handed on."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError

optimum_cli = pytest.importorskip("optimum.commands.optimum_cli", reason="optimum is not installed")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder as a wheel lays it out, where this project is not installed in a form that brings it."""
    installed = find_spec("optimum.commands.register")
    places = () if installed is None else installed.submodule_search_locations or ()
    if any((Path(place) / "register_mirrorsd.py").is_file() for place in places):
        return
    shutil.copytree(ROOT / "cli" / "optimum_register", tmp_path / "optimum" / "commands" / "register")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("optimum.commands.register")]:
        monkeypatch.delitem(sys.modules, name)


def run_optimum(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["optimum-cli", *words])
    with pytest.raises(SystemExit) as finished:
        optimum_cli.main()
    return int(finished.value.code or 0)


@pytest.mark.usefixtures("registered")
def test_help_lists_the_options_of_mirrorsd_export(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mirrorsd.cli.optimum_command import export_parameters

    assert run_optimum("export", "mirrorsd", "--help", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    options = [
        option for one in export_parameters() for option in (*one.opts, *one.secondary_opts) if option[:2] == "--"
    ]
    assert {"--draft", "--precision", "--head-precision", "--rounding", "--overwrite"} <= set(options)
    assert [option for option in options if option not in printed] == []


@pytest.mark.usefixtures("registered")
def test_no_command_of_optimum_fails_where_packages_of_ours_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may be installed without a command line; Optimum asks all commands for their options as it starts."""
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run_optimum("--help", monkeypatch=monkeypatch) == 0


@pytest.mark.usefixtures("registered")
def test_what_is_given_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[str]] = []
    monkeypatch.setattr("mirrorsd.cli.application.run", lambda words: handed.append(words) or 3)
    words = ("export", "mirrorsd", "--draft", "D", "-o", "OUT", "--precision", "int4", "--asymmetric", "TARGET")
    assert run_optimum(*words, monkeypatch=monkeypatch) == 3
    expected = ["export", "--draft", "D", "--output", "OUT", "--precision", "int4", "--asymmetric", "--", "TARGET"]
    assert handed == [expected]
    words = ("--draft", "D", "-o", "OUT", "--symmetric", "--no-batch-invariant", "--head", "A", "--head", "B", "TARGET")
    assert run_optimum("export", "mirrorsd", *words, monkeypatch=monkeypatch) == 3
    assert {"--symmetric", "--no-batch-invariant"} < {*handed[1]} and "--asymmetric" not in handed[1]
    assert [handed[1][place + 1] for place, word in enumerate(handed[1]) if word == "--head"] == ["A", "B"]


@pytest.mark.usefixtures("registered")
def test_a_missing_draft_is_optimum_s_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_optimum("export", "mirrorsd", "-o", "OUT", "TARGET", monkeypatch=monkeypatch) == 2
    assert "--draft" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("registered")
def test_a_bf16_bundle_by_way_of_optimum(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole export; what it wrote is for CUDA and refused elsewhere."""
    target, draft = tiny_pair
    bundle = tmp_path / "bf16.mirror"
    words = ("--draft", str(draft), "-o", str(bundle), "--precision", "bf16", "--context", "256", str(target))
    assert run_optimum("export", "mirrorsd", *words, monkeypatch=monkeypatch) == 0
    manifest = read_bundle(bundle)
    assert (manifest.target.precision, manifest.target.shape.dtype) == ("bf16", "bfloat16")
    assert all(result.top1_agreement > 0.9 for result in manifest.verify)
    with pytest.raises(DeviceError, match="computes in bfloat16, which CPUExecutionProvider"):
        MirrorPipeline.load(bundle, device_map="cpu")
