"""What a bundle is called that was given no name."""

from pathlib import Path

import pytest

from mirrorsd.cli.commands.export import model_name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (".", "my@model"),
        ("..", "models"),
        ("./", "my@model"),
        ("../my@model", "my@model"),
        ("../my@model/big.Q4@x.gguf", "big.Q4@x"),
        ("link", "link"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen3-8B@main", "Qwen3-8B"),
        ("o/n/q/Q4_K.gguf@main", "Q4_K"),
    ],
)
def test_a_bundle_has_the_name_of_what_was_named(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "my@model"
    folder.mkdir(parents=True)
    (folder / "big.Q4@x.gguf").write_bytes(b"GGUF")
    (folder / "link").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    assert model_name(target) == name
