"""Names instead of folders, against a local server of the hub's protocol: fetched once, pinned, explained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import SHA, serve
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from mirrorsd.graphs.errors import ExportError
from mirrorsd.hub import asking
from mirrorsd.hub.checkpoints import locate, look_at, origin_of, parse_name


@pytest.fixture
def repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two repositories on the server's disk, and an empty cache of the hub's."""
    for name, files in {
        "tiny/target": (
            *("config.json", "model.safetensors", "picture.png", "consolidated.safetensors"),
            *("original/config.json", "original/model.safetensors"),
        ),
        "tiny/ggufs": ("a.gguf",),
    }.items():
        for file in files:
            (tmp_path / "hub" / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "hub" / name / file).write_text(f"content of {file}", encoding="utf-8")
    (tmp_path / "hub" / "tiny" / "gated").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hub"


@pytest.fixture
def asked(repositories: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with serve(repositories, gated=("tiny/gated",)) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield asked


def test_a_folder_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("tiny/target", print) == Path("tiny/target")
    assert locate("no-name-at-all", print) == Path("no-name-at-all")


def test_what_is_needed_is_fetched_once_and_pinned(asked: list[str]) -> None:
    told: list[str] = []
    folder = locate("tiny/target", told.append)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert origin_of(folder) == ("tiny/target", SHA)
    assert told == [f"tiny/target: fetching 1 MB, revision {SHA[:8]}"]
    asked.clear()
    assert locate(f"tiny/target@{SHA}", told.append) == folder
    assert not [line for line in asked if line.startswith("GET") and "resolve" in line]


@pytest.mark.parametrize("failure", [HTTPError("reset by peer"), RuntimeError("a worker of Xet has failed")])
def test_a_fetch_that_breaks_off_can_go_on(
    asked: list[str], failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = HfApi.snapshot_download

    def breaking(hub: HfApi, *words: str, **where: Any) -> Any:
        if where.get("dry_run"):
            return fetch(hub, *words, **where)
        raise failure

    monkeypatch.setattr(HfApi, "snapshot_download", breaking)
    with pytest.raises(
        ExportError, match=rf"broke off while tiny/target was fetched \({failure}\); what has come is kept"
    ):
        locate("tiny/target", print)


def test_a_file_of_a_repository_is_a_name_too(asked: list[str]) -> None:
    assert locate("tiny/ggufs/a.gguf", print).read_text(encoding="utf-8") == "content of a.gguf"


def test_without_the_hub_the_cache_serves(repositories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(repositories) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        folder = locate("tiny/target", print)
    told: list[str] = []
    assert locate("tiny/target", told.append) == folder
    assert told == [f"tiny/target: the hub does not answer; taking revision {SHA[:8]} from the cache"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert locate("tiny/target", told.append) == folder
    with pytest.raises(ExportError, match=r"tiny/ggufs is not in the hub's cache, and .* does not answer"):
        locate("tiny/ggufs/a.gguf", told.append)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny/nothing", "tiny/nothing is no folder here, and http.* has no model of that name, or it is private"),
        ("tiny/gated", "tiny/gated is gated: .* agree to terms first. Do so at http.*/tiny/gated, .*hf auth login"),
        ("tiny/target@v9", "tiny/target has no revision 'v9'"),
        ("tiny/target/b.gguf", "tiny/target has no file b.gguf"),
        ("tiny/ggufs", r"has no \*.safetensors.*it has a GGUF file: tiny/ggufs/a.gguf"),
    ],
)
def test_what_cannot_be_fetched_is_explained(asked: list[str], name: str, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        locate(name, print)


def test_a_full_disk_is_noticed_before_the_fetching(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.shutil, "disk_usage", lambda _: type("", (), {"free": 3})())
    with pytest.raises(ExportError, match=r"takes 1 MB, and 1 MB are free in .* HF_HOME"):
        locate("tiny/target", print)
    assert not [line for line in asked if line.startswith("GET") and "resolve" in line]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b/", ("a/b", None, None)),
        ("hf:a/b@main", ("a/b", None, "main")),
        ("a/b@refs/pr/3", ("a/b", None, "refs/pr/3")),
        ("a/b@feature/x", ("a/b", None, "feature/x")),
        ("a/b/Q4.GGUF", ("a/b", "Q4.GGUF", None)),
        ("a/b/q/Q4.gguf@refs/pr/3", ("a/b", "q/Q4.gguf", "refs/pr/3")),
        ("https://huggingface.co/a/b", ("a/b", None, None)),
        ("https://huggingface.co/a/b/", ("a/b", None, None)),
        ("https://huggingface.co/a/b/tree/main", ("a/b", None, "main")),
        ("https://huggingface.co/a/b/tree/refs%2Fpr%2F3", ("a/b", None, "refs/pr/3")),
        ("https://huggingface.co/a/b/blob/main/q/Q4.gguf", ("a/b", "q/Q4.gguf", "main")),
        ("https://huggingface.co/a/b/blob/refs%2Fpr%2F3/Q4.gguf", ("a/b", "Q4.gguf", "refs/pr/3")),
        ("https://huggingface.co/a/b/resolve/main/Q4.gguf?download=true", ("a/b", "Q4.gguf", "main")),
    ],
)
def test_names_and_the_addresses_of_their_pages(text: str, parts: tuple[str, str | None, str | None]) -> None:
    assert parse_name(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        *("qwen3", "./a/b", "/a/b", "a/b/c", "a/b@", "../a", "a\\b", "a/b/../c.gguf/", "a/b//", "a/b@x/", "a/b@/x"),
        *("https://example.com/a/b", "https://huggingface.co/a", "https://huggingface.co/a/b/blob/main/x.bin"),
    ],
)
def test_what_is_no_name(text: str) -> None:
    assert parse_name(text) is None


def test_a_path_leads_to_its_origin_or_to_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--o--n" / "snapshots" / SHA
    (snapshot / "part").mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    (snapshot / "a.gguf").symlink_to(tmp_path / "models--o--n" / "blobs" / "0")
    monkeypatch.chdir(snapshot)
    for path in (snapshot, snapshot / "part", tmp_path / "link", tmp_path / "link" / "a.gguf", Path(), Path("a.gguf")):
        assert origin_of(path) == ("o/n", SHA), path
    for path in (snapshot.parent, Path(".."), Path("../../../mine"), tmp_path):
        assert origin_of(path) is None, path


def test_what_travels_with_a_bundle_is_fetched_too(asked: list[str], repositories: Path) -> None:
    """All licences that an export carries over, and the text that it measures on."""
    small = {"LICENSE.txt", "LICENCE", "NOTICE", "README.md", "USE_POLICY.md", "calibration.txt", "chat_template.jinja"}
    for name in (*small, "vocab.txt"):
        (repositories / "tiny" / "target" / name).write_text(name, encoding="utf-8")
    fetched = {path.name for path in locate("tiny/target", print).iterdir()}
    assert fetched == small | {"config.json", "model.safetensors"}


def test_a_config_can_be_looked_at_alone(asked: list[str]) -> None:
    folder = look_at("tiny/target")
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert origin_of(folder) == ("tiny/target", SHA)
    assert [line.rpartition("/")[2] for line in asked if line.startswith("GET") and "resolve" in line] == [
        "config.json"
    ]
    assert look_at("tiny/ggufs/a.gguf") is None
    with pytest.raises(ExportError, match="tiny/ggufs has no"):
        look_at("tiny/ggufs")
    assert sorted(path.name for path in locate("tiny/target", print).iterdir()) == ["config.json", "model.safetensors"]


def test_there_is_nothing_to_look_at_without_the_hub(repositories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert look_at("tiny/target") is look_at("./a/folder") is look_at(str(repositories)) is None


def test_the_address_of_a_folder_within_a_repository_is_no_revision() -> None:
    assert parse_name("https://huggingface.co/o/n/tree/main/sub") is None
    assert parse_name("https://huggingface.co/o/n/tree/refs/pr/3") == ("o/n", None, "refs/pr/3")
