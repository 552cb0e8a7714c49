"""The official Node client, where npm can install it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mirrorsd.server import Running

VERSION = "7.57.0"


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no Node with npm here")
    folder = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"openai@{VERSION}"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not reach its registry in a minute")
    if finished.returncode:
        pytest.skip(f"npm cannot install openai: {finished.stderr.strip()[-200:]}")
    return folder


@pytest.mark.long
def test_the_node_client_takes_every_kind_of_answer(serving: Running, node_folder: Path) -> None:
    script = node_folder / "node_client.mjs"
    script.write_bytes((Path(__file__).parent / script.name).read_bytes())
    command = ["node", str(script), serving.url]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found["whole"] == found["streamed"] != ""
    assert found["usage"]["completion_tokens"] == found["logprobs"] == 24
    assert found["call"]["name"] == "weather"
    assert json.loads(found["call"]["arguments"])["city"] in ("Rome", "Oslo")
    assert found["finish"] == "tool_calls"
    assert found["place"] in ("river", "forest")
    assert found["response"]
    assert found["error"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found"}
