"""`mirrorsd pairs`: ready bundles and exportable pairs with sizes, by this machine's memory; without torch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import SHA, serve

from mirrorsd.cli.application import run
from mirrorsd.cli.commands import pairs as command
from mirrorsd.devices import containers
from mirrorsd.export.pairs import known_pairs

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def online(tmp_path: Path, bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "hub" / "tiny" / "pair"
    shutil.copytree(bundle, folder)
    (folder / "README.md").write_text("tags:\n- mirrorsd\n", encoding="utf-8")
    with serve(tmp_path / "hub") as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield folder


def with_memory(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    monkeypatch.setattr(containers, "total_memory", lambda: int(gigabytes * 1e9))


def test_what_a_machine_holds_follows_its_memory(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {pair.target: command.estimated_sizes(pair) for pair in known_pairs()}
    of_eight = sizes["Qwen/Qwen3-8B"]
    assert [size.precision for size in of_eight] == ["int8", "int4"]
    assert of_eight[0].disk_bytes > 1.5 * of_eight[1].disk_bytes
    assert command.holds_words(of_eight, 64 * 10**9).startswith("int8: 9.3 GB,")
    assert command.holds_words(of_eight, 10 * 10**9).startswith("int4: 5.6 GB,")
    assert command.holds_words(of_eight, 4 * 10**9).startswith("too large: ")


def test_a_pair_says_its_licence_and_why_it_has_no_draft() -> None:
    words = {pair.target: command.known_words(pair) for pair in known_pairs()}
    assert all(words[pair.target].endswith(pair.licence) for pair in known_pairs())
    assert "siblings have recurrent layers and cannot be drafts" in words["Qwen/Qwen3.5-9B"]


def test_ready_bundles_are_listed_with_size_and_memory(
    online: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    assert run(["pairs", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["ready"], before["online"]) == ([], []) and len(before["pairs"]) == len(known_pairs())
    assert run(["inspect", "hf:tiny/pair", "--json"]) == 0
    capsys.readouterr()
    with_memory(monkeypatch, 32)
    assert run(["pairs", "--json", "--online"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,), (other,) = found["ready"], found["online"]
    assert one["reference"] == f"hf:tiny/pair@{SHA}" and one["running_bytes"] > 10**8 > one["num_bytes"] > 0
    assert other["reference"] == "hf:tiny/pair" and other["num_bytes"] > one["num_bytes"]
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["pairs", "--online"]) == 0
    page = capsys.readouterr().out
    assert "with 32.0 GB of memory" in page and "to be fetched" in page
    with_memory(monkeypatch, 0.1)
    assert run(["pairs"]) == 0
    assert "fetched, too large for this machine" in capsys.readouterr().out


def test_neither_pairs_nor_references_need_what_only_the_exporter_does(own_cache: Path) -> None:
    code = "import sys; from mirrorsd.cli.application import run; run(['pairs', '--json']); run(['inspect', 'hf:a'])"
    check = (
        "found = {'torch', 'transformers', 'onnx', 'safetensors', 'gguf'} & set(sys.modules); assert not found, found"
    )
    finished = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_a_hub_that_does_not_answer_is_an_error(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run(["pairs", "--online"]) == 3
    assert "http://127.0.0.1:9 gives no list of bundles" in capsys.readouterr().err
