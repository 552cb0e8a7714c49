"""What the server says about itself, and to a machine that lacks what it needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import post, raw, served

CHAT = "/v1/chat/completions"


def get(running: Running, path: str) -> tuple[int, Any]:
    answer = raw(
        running, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nConnection: close\r\n\r\n".encode()
    )
    head, body = answer.split(b"\r\n\r\n", 1)
    return int(head.split()[1]), json.loads(body) if b"application/json" in head else body.decode()


def ask(running: Running, path: str, body: dict[str, Any]) -> Any:
    return json.loads(raw(running, post(running, path, json.dumps(body).encode())).split(b"\r\n\r\n", 1)[1])


def test_properties_and_seats(serving: Running) -> None:
    status, props = get(serving, "/props?model=tiny")
    assert status == 200
    assert props["context"] == 512
    assert props["bytes_per_slot"] > 0
    assert props["system_fingerprint"].startswith("bundle-")
    assert set(props["sources"]) == {"window", "lookup", "correction", "plain"}
    _, slots = get(serving, "/slots")
    assert [slot["is_processing"] for slot in slots] == [False, False]
    assert get(serving, "/props?model=other")[0] == 404


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/openapi.json", "/v1/models/tiny"])
def test_a_path_is_there_in_each_of_its_spellings(serving: Running, path: str) -> None:
    bare = path.removeprefix("/v1")
    for spelled in (bare, f"/v1{bare}", f"{path}/", f"/{path}", f"/v1/{bare}//", path.replace("/", "//")):
        assert get(serving, spelled) == get(serving, path), spelled
    assert get(serving, f"/v1/v1{bare}")[0] == 404


def test_a_folder_that_is_away_hides_no_other_model(tiny_bundle: Path, tmp_path: Path) -> None:
    away = tmp_path / "away.mirror"
    shutil.copytree(tiny_bundle, away)
    with served({"tiny": tiny_bundle, "away": away}) as running:
        shutil.rmtree(away)
        status, models = get(running, "/v1/models")
        assert status == 200 and [model["id"] for model in models["data"]] == ["tiny", "away"]
        assert get(running, "/v1/models/away")[0] == 200
        asked = {"model": "away", "messages": [{"role": "user", "content": "fox"}]}
        assert ask(running, CHAT, asked)["error"]["code"] == "bundle_unusable"


def test_metrics_count_what_drafts_saved(tiny_bundle: Path) -> None:
    with served({"tiny": tiny_bundle}, seats=1) as running:
        body = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 30, "ignore_eos": True}
        answer = ask(running, CHAT, {**body, "method": "serial"})
        _, text = get(running, "/metrics")
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found['mirrorsd:generation_tokens_total{model="tiny"}']) == 30
    drafted = float(found['mirrorsd:spec_decode_num_draft_tokens_total{model="tiny"}'])
    accepted = float(found['mirrorsd:spec_decode_num_accepted_tokens_total{model="tiny"}'])
    assert (drafted, accepted) == (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"])
    by_place = [float(value) for name, value in found.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(by_place) == accepted
    assert float(found['mirrorsd:requests_total{path="/v1/chat/completions",status="200"}']) == 1


def test_what_passes_before_the_first_chunk_is_no_gap_between_two(tiny_bundle: Path) -> None:
    """A request that waits for a seat, and whose prompt is read, would look like a stream that falters."""
    with served({"tiny": tiny_bundle}, seats=1) as running:
        body = {"messages": [{"role": "user", "content": "fox"}], "ignore_eos": True, "method": "plain"}
        for most in (1, 4):
            ask(running, CHAT, {**body, "max_tokens": most})
        _, text = get(running, "/metrics")
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found["mirrorsd:chunk_gap_seconds_count"]) == 1 + 4, "each text ends with a chunk without tokens"
    assert float(found["mirrorsd:time_to_first_token_seconds_count"]) == 2


def test_text_to_tokens_and_back(serving: Running) -> None:
    tokens = ask(serving, "/tokenize", {"content": "the old heron"})["tokens"]
    assert ask(serving, "/detokenize", {"tokens": tokens})["content"] == "the old heron"
    pieces = ask(serving, "/tokenize", {"content": "the old heron", "with_pieces": True})["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "the old heron"
    assert ask(serving, "/tokenize", {"content": ""})["tokens"] == []
    halves = ask(serving, "/tokenize", {"content": " \N{OLD PERSIAN NUMBER ONE}", "with_pieces": True})["tokens"]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (half["piece"] for half in halves)) == (
        " \N{OLD PERSIAN NUMBER ONE}".encode()
    )
    written = ask(serving, "/apply-template", {"messages": [{"role": "user", "content": "fox"}]})["prompt"]
    assert written == "<|user|>fox<|assistant|>"


def test_tokens_of_special_kinds_are_added_where_they_are_asked_for(
    serving: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = serving.service.shelf.loaded["tiny"].tokenizer._tokenizer
    name = tokenizer.id_to_token(0)
    before = tokenizer.post_processor
    tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 0)])
    try:
        bare = ask(serving, "/tokenize", {"content": "fox"})["tokens"]
        assert ask(serving, "/tokenize", {"content": "fox", "add_special": True})["tokens"] == [0, *bare]
        assert 0 not in bare
    finally:
        tokenizer.post_processor = before


def test_every_path_is_there_with_and_without_v1(serving: Running) -> None:
    for path in ("/models", "/health", "/props", "/slots"):
        assert get(serving, path)[0] == get(serving, f"/v1{path}")[0] == 200
    body = {"prompt": "fox", "max_tokens": 1, "messages": [{"role": "user", "content": "fox"}], "content": "fox"}
    for path in ("/chat/completions", "/completions", "/tokenize", "/apply-template"):
        given = {name: value for name, value in body.items() if name in NEEDED[path]}
        bare, versioned = ask(serving, path, given), ask(serving, f"/v1{path}", given)
        assert bare.keys() == versioned.keys()
        assert "error" not in bare


NEEDED = {
    "/chat/completions": ("messages", "max_tokens"),
    "/completions": ("prompt", "max_tokens"),
    "/tokenize": ("content",),
    "/apply-template": ("messages",),
}


def test_every_route_is_in_the_document(serving: Running) -> None:
    _, document = get(serving, "/openapi.json")
    assert {"/v1/chat/completions", "/v1/responses", "/health", "/slots"} <= set(document["paths"])
    assert "ChatRequest" in document["components"]["schemas"]


def test_without_its_packages_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; from mirrorsd.cli.application import run; "
        "sys.exit(run(['serve', 'x.mirror']))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    assert "pip install 'mirrorsd[server]'" in finished.stderr


@pytest.mark.parametrize("given", ["nowhere.mirror", "=x", "a=nowhere"])
def test_folders_that_are_no_bundles_are_refused_at_once(given: str) -> None:
    from mirrorsd.cli.application import run

    assert run(["serve", given]) in (2, 3)
