"""A text that is given as a file is read, or refused by name."""

from pathlib import Path

import pytest

from mirrorsd.cli.input.given_text import given_text
from mirrorsd.graphs.errors import ConfigError


def test_a_text_is_read_without_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\n")
    assert given_text(path, "--text") == "café\n"
    assert given_text(None, "--text") is None


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), (b"caf\xe9", "is not UTF-8 text"), (b" \n", "holds no text")]
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--text {path} {words}"):
        given_text(path, "--text")
