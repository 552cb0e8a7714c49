"""A bundle that lies elsewhere runs as one that lies here: by the library, on the terminal, behind the server."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from hub_server import serve

from mirrorsd import MirrorPipeline
from mirrorsd.graphs.errors import BundleError
from mirrorsd.server import Running, ServerSettings, named_folders

PROMPT = "Once upon a time"


@pytest.fixture
def asked(tiny_bundle: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    shutil.copytree(tiny_bundle, tmp_path / "hub" / "tiny" / "pair")
    with serve(tmp_path / "hub") as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield asked


def test_a_program_names_it(asked: list[str], tiny_bundle: Path) -> None:
    told: list[str] = []
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as here:
        expected = here.generate(PROMPT, max_new_tokens=12).token_ids
    load = MirrorPipeline.load
    with load("hf:tiny/pair", device_map="cpu", on_progress=lambda stage, share: told.append(stage)) as pipe:
        assert pipe.generate(PROMPT, max_new_tokens=12).token_ids == expected
    assert any(stage.startswith("fetching tiny/pair") for stage in told)
    with pytest.raises(BundleError, match="has no model of that name"):
        load("hf:tiny/nothing")


def test_the_terminal_and_the_server_name_it(asked: list[str], tiny_bundle: Path) -> None:
    words = ["generate", "hf:tiny/pair", PROMPT, "--max-new-tokens", "8", "--device-map", "cpu", "--json"]
    command = [sys.executable, "-m", "mirrorsd.cli", *words]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert finished.returncode == 0 and json.loads(finished.stdout)["num_tokens"] <= 8, finished.stderr
    asked.clear()
    folders = named_folders(["mine=hf:tiny/pair"])
    with Running(folders, ServerSettings(port=0, device_map="cpu")) as running:
        assert json.load(urlopen(f"{running.url.rstrip('/')}/v1/models"))["data"][0]["id"] == "mine"
    assert asked == [], "the command had fetched it"
