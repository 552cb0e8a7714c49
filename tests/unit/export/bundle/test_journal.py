import json
from pathlib import Path

import pytest

from mirrorsd.export.bundle.journal import JOURNAL_FILE, Journal, digest_of, is_of
from mirrorsd.graphs.atomic_folder import atomic_folder, check_space
from mirrorsd.graphs.errors import ConfigError, ExportError, ParityError


def test_a_journal_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "asked")
    journal.record("prefix", True)
    journal.record("weights", {"size": 3})
    with (tmp_path / JOURNAL_FILE).open("a") as stream:
        stream.write('{"suffix": tr')
    again = Journal(tmp_path, "asked")
    assert (again.finished, again.get("weights"), again.get("suffix")) == (("prefix", "weights"), {"size": 3}, None)
    again.record("suffix", True)
    assert Journal(tmp_path, "asked").finished == ("prefix", "weights", "suffix")


def test_a_part_that_is_found_wrong_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "asked")
    journal.record("draft", True)
    journal.record("prefix", True)
    with pytest.raises(ParityError), journal.forgetting("prefix", "suffix"):
        raise ParityError
    again = Journal(tmp_path, "asked")
    assert (again.finished, again.get("prefix")) == (("draft",), None)
    with pytest.raises(ConfigError), again.forgetting("draft"):
        raise ConfigError
    assert is_of(tmp_path, "asked")
    again.record("draft", None)
    assert not is_of(tmp_path, "asked"), "nothing is left to go on from"


def test_what_a_clock_has_chosen_stays_chosen_and_is_no_part(tmp_path: Path) -> None:
    """Graphs that an earlier run has finished have the form that it chose."""
    journal = Journal(tmp_path, "asked")
    assert journal.chosen("integer products", lambda: True)
    assert not journal.chosen("rotated rows", lambda: False)
    assert not is_of(tmp_path, "asked")
    journal.record("prefix", True)
    again = Journal(tmp_path, "asked")
    assert again.chosen("integer products", pytest.fail)
    assert not again.chosen("rotated rows", pytest.fail)
    assert again.finished == ("prefix",)


def test_only_the_same_export_goes_on(tmp_path: Path) -> None:
    """The work folder of another export, or of one whose checkpoint has changed since, is thrown away."""
    checkpoint, final = tmp_path / "target", tmp_path / "out.mirror"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_text("weights")
    digest = digest_of([checkpoint], {"precision": "int4"})
    left = tmp_path / ".out.mirror.partial"
    left.mkdir()
    Journal(left, digest).record("prefix", True)
    assert is_of(left, digest_of([checkpoint], {"precision": "int4"}))
    assert not is_of(left, digest_of([checkpoint], {"precision": "int8"}))
    with atomic_folder(final, overwrite=False, goes_on=lambda folder: is_of(folder, digest)) as folder:
        assert Journal(folder, digest).finished == ("prefix",)
    (checkpoint / "model.safetensors").write_text("other weights")
    final.rename(left)
    changed = digest_of([checkpoint], {"precision": "int4"})
    with atomic_folder(final, overwrite=False, goes_on=lambda folder: is_of(folder, changed)) as folder:
        assert list(folder.iterdir()) == []
    assert not is_of(tmp_path, digest)


def test_a_disk_that_is_too_small_is_refused_beforehand(tmp_path: Path) -> None:
    check_space(tmp_path, 1000)
    with pytest.raises(
        ExportError, match=r"not enough space in .*: 1,000,000,000,000\.0 MB are needed, [\d,]+\.\d MB are free"
    ):
        check_space(tmp_path, 10**18)


def test_the_digest_is_one_line_of_json(tmp_path: Path) -> None:
    Journal(tmp_path, digest_of([], []))
    assert len(json.loads((tmp_path / JOURNAL_FILE).read_text())) == 64


def test_an_export_into_the_target_s_own_folder_goes_on(tmp_path: Path) -> None:
    """Its lock and its work folder are no part of the checkpoint; nor is another bundle, or a link to nothing."""
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "linked.json").symlink_to(tmp_path / "model.safetensors")
    final, digest = tmp_path / "out.mirror", digest_of([tmp_path], [])
    with (
        pytest.raises(ConfigError),
        atomic_folder(final, overwrite=False, goes_on=lambda folder: is_of(folder, digest)) as left,
    ):
        Journal(left, digest).record("prefix", True)
        raise ConfigError
    (tmp_path / "old.mirror").mkdir()
    (tmp_path / ".#config.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "config.json.link").symlink_to(tmp_path / "nothing")
    again = digest_of([tmp_path], [])
    assert is_of(left, again)
    with atomic_folder(final, overwrite=False, goes_on=lambda folder: is_of(folder, again)) as folder:
        assert Journal(folder, again).finished == ("prefix",)
        assert digest_of([tmp_path], []) == digest
    (tmp_path / "config.json").write_text("{}")
    assert digest_of([tmp_path], []) != digest


def test_where_finished_work_takes_the_space_that_lacks_it_is_named(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    with (
        pytest.raises(
            ExportError, match=r"are free\. Free some, or .*out\.mirror\.partial holds 3\.0 MB of what is fin"
        ),
        atomic_folder(final, overwrite=False, goes_on=lambda folder: is_of(folder, "asked")) as folder,
    ):
        (folder / "weights").write_bytes(bytes(3_000_000))
        Journal(folder, "asked").record("weights", True)
        check_space(folder, 10**18)
    assert [path.name for path in tmp_path.iterdir()] == [".out.mirror.partial"]
    with (
        pytest.raises(ExportError, match=r"or write the bundle elsewhere$"),
        atomic_folder(final, overwrite=False) as folder,
    ):
        check_space(folder, 10**18)
    assert list(tmp_path.iterdir()) == []
