"""What is refused before anything is lost: bad corpora, folders in use, damaged checkpoints, too little memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mirrorsd.cli.commands.train.draft import DraftPlan, _check_head_tokens
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.model_folder import finished_folder
from mirrorsd.training.run.checkpoints import load_checkpoint, save_checkpoint
from mirrorsd.training.run.memory_need import check_memory, training_bytes
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import LOSSES_FILE, RunConfig, TimedRun
from mirrorsd.training.text.corpus import Document, read_documents
from mirrorsd.training.text.self_text import SelfTextConfig
from mirrorsd.training.text.text_folder import PLAN_FILE, write_self_text

MESSAGES = '{"messages": [{"role": "user", "content": "Hi"}]}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\ntwo\n", r"a\.txt, line 2: the line is empty"),
        ("a.txt", b"one\ntwo \xff\n", r"a\.txt, line 2: not UTF-8 .* at byte 4\); re-encode"),
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b'{"text": "x"}\n{"text":\n', "line 2: not JSON"),
        ("a.jsonl", b'{"words": "x"}\n', r'line 1: expected \{"text"'),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "line 1: expected"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_documents(path)


def test_both_forms_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once.\nTwice.\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(f'{{"text": "Once."}}\n{MESSAGES}\n', encoding="utf-8")
    assert read_documents(tmp_path / "a.txt") == [Document("Once."), Document("Twice.")]
    assert read_documents(tmp_path / "a.jsonl")[1].messages == ({"role": "user", "content": "Hi"},)
    with pytest.raises(ConfigError, match="does not exist"):
        read_documents(tmp_path / "b.txt")


@pytest.mark.parametrize(
    ("count", "layers", "message"), [(9, (), "give that, too"), (51, (0, 1), "this target has 50 tokens")]
)
def test_tokens_that_no_head_can_name_are_refused(count: int, layers: tuple[int, ...], message: str) -> None:
    _check_head_tokens(50, (0, 1), 50)
    with pytest.raises(ConfigError, match=message):
        _check_head_tokens(count, layers, 50)


def run_in(folder: Path, width: int = 3) -> TimedRun:
    schedule = WarmStableDecay(budget_s=10, warm_steps=0, decay_s=0)
    return TimedRun(RunConfig(out=folder, schedule=schedule), {"model": nn.Linear(2, width)})


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first = run_in(tmp_path)
    with pytest.raises(ConfigError, match=r"written by another training \(process \d+, which holds run\.lock\)"):
        run_in(tmp_path)
    first.clock.trained_s = 10.0
    first.run(lambda share: (0, {}), lambda: None)
    assert run_in(tmp_path).step == 0  # free again


def test_half_a_checkpoint_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"weight": torch.ones(200), "step": 3})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"last\.pt is not a whole checkpoint .*cut short"):
        load_checkpoint(path)
    assert path.exists()


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path).save("last.pt")
    with pytest.raises(ConfigError, match="belongs to a training of another kind or size"):
        run_in(tmp_path, width=5)


def test_rows_after_the_checkpoint_are_dropped_from_the_table(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.step = 4
    run.save("last.pt")
    run._lock.release()
    (tmp_path / LOSSES_FILE).write_text("step,loss\n2,0.5\n4,0.4\n6,0.3\n8,0", encoding="utf-8")
    assert run_in(tmp_path).step == 4
    assert (tmp_path / LOSSES_FILE).read_text(encoding="utf-8") == "step,loss\n2,0.5\n4,0.4\n"


def test_a_target_that_does_not_fit_is_refused() -> None:
    needed = training_bytes(fixed=8_000_000_000, trained=100_000_000, tokens=6144, vocab_size=128_000)
    assert 33e9 < needed < 60e9
    with pytest.raises(ConfigError, match=r"the target needs about .* GB of memory .*, 16\.0 GB are free"):
        check_memory("the target", needed, 16_000_000_000)
    check_memory("the target", needed, None)
    check_memory("the target", needed, 1 << 40)


def test_a_model_folder_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "draft"
    with pytest.raises(RuntimeError), finished_folder(final) as partial:
        (partial / "config.json").write_text("{}")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    for content in ("1", "2"):
        with finished_folder(final) as partial:
            (partial / "config.json").write_text(content)
    assert (final / "config.json").read_text() == "2"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(ConfigError, match="not a model's folder"), finished_folder(tmp_path / "photos"):
        pass


@pytest.mark.parametrize(
    ("changed", "num_streams", "has_baseline", "message"),
    [
        ({"source": None}, 3, False, "it wants --from-model and streams"),
        ({}, 0, False, "it wants --from-model and streams"),
        ({}, 3, True, "and no --baseline"),
        ({"stream_rank": 0, "link_rank": 0}, 3, False, "give --stream-rank or --link-rank above 0"),
    ],
)
def test_streams_alone_want_something_to_train(
    changed: dict, num_streams: int, has_baseline: bool, message: str
) -> None:
    sizes = {"hidden": 64, "layers": 2, "stream_layers": 2, "stream_rank": 8, "link_rank": 8}
    plan = DraftPlan(**(sizes | {"source": Path("draft"), "streams_only": True} | changed))
    with pytest.raises(ConfigError, match=message):
        plan.check(Path("target"), num_streams, has_baseline)


def test_the_plan_of_a_folder_of_texts_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = nn.Linear(2, 2)

    def write() -> None:
        write_self_text(target, [], tmp_path, SelfTextConfig(ends=(1,)))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write()
    assert not list(tmp_path.iterdir())
    write()
    plan = tmp_path / PLAN_FILE
    for damaged in (plan.read_bytes()[:40], b"[]", b"\xff"):
        plan.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
            write()
