"""What is refused before anything is lost: bad corpora, folders in use, damaged checkpoints, too little memory."""

import errno
import io
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from mirrorsd.cli.commands.train.draft import DraftPlan, _check_head_tokens, check_output
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.training.heads.head_folder import load_head
from mirrorsd.training.models.model_folder import finished_folder
from mirrorsd.training.run.checkpoints import load_checkpoint, save_checkpoint
from mirrorsd.training.run.loss_curve import plot_losses
from mirrorsd.training.run.memory_need import check_memory, training_bytes
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import LOSSES_FILE, RunConfig, TimedRun
from mirrorsd.training.text.corpus import Document, read_documents, split_held_back
from mirrorsd.training.text.document_text import document_tokens
from mirrorsd.training.text.self_prompts import cut_prompts, load_tokenizer
from mirrorsd.training.text.self_text import SelfTextConfig
from mirrorsd.training.text.text_folder import PLAN_FILE, load_texts, write_self_text

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
        ("a.jsonl", b'{"text": "a \\ud83e fox"}\n', r"line 1: '\\ud83e' is half of a character"),
        ("a.jsonl", MESSAGES.replace("Hi", "\\udd8a").encode(), "line 1: .* half of a character"),
        ("a.jsonl", b"[" * 100_000, "line 1: nested too deep"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_documents(path)


def test_both_forms_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once.\nTwice.\n", encoding="utf-8-sig")  # as editors of Windows do
    (tmp_path / "a.jsonl").write_text(f'{{"text": "Once."}}\n{MESSAGES}\n', encoding="utf-8-sig")
    assert read_documents(tmp_path / "a.txt") == [Document("Once."), Document("Twice.")]
    assert read_documents(tmp_path / "a.jsonl")[1].messages == ({"role": "user", "content": "Hi"},)
    with pytest.raises(ConfigError, match="does not exist"):
        read_documents(tmp_path / "b.txt")


def test_some_documents_are_trained_on_and_some_held_back() -> None:
    alike = split_held_back([Document(f"text {number}") for number in range(1000)])[1][0]
    for documents in ([alike] * 3, [Document("Once."), Document("Twice.")]):
        rest, held_back = split_held_back(documents)
        assert rest and held_back and len(rest) + len(held_back) == len(documents)
    with pytest.raises(ConfigError, match="--corpus has one document: there is none to hold back"):
        split_held_back([alike])


def test_a_conversation_that_the_template_refuses_is_named(tiny_pair: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(tiny_pair[0])
    odd = Document(messages=({"role": "zebra", "content": "Hi"}, {"role": "user", "content": "Hi"}))
    tokenizer.chat_template = "{{ raise_exception('Unknown role') }}"
    message = r"template does not take a conversation of zebra, user \(Unknown role\)"
    with pytest.raises(ConfigError, match=message):
        cut_prompts([odd], tokenizer, 1, seed=0)
    with pytest.raises(ConfigError, match=message):
        document_tokens([odd], tokenizer, 0)


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_file_of_texts_that_is_not_whole_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "batch_00000.npz"
    np.savez(path, tokens=np.arange(3, dtype=np.uint16), lengths=[3], prompt_lengths=[1], temperatures=[0.0])
    assert load_texts(tmp_path)[0].tokens == [0, 1, 2]
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ConfigError, match=r"batch_00000\.npz is not a whole file of texts .*remove it"):
        load_texts(tmp_path)


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


def test_a_head_without_a_config_that_is_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_head(tmp_path, nn.Linear(2, 2))  # type: ignore[arg-type]


class FullDisk(io.BytesIO):
    """Takes no more than a beginning."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_full_disk_is_named_and_leaves_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 3})
    monkeypatch.setattr("mirrorsd.graphs.whole_file._opened", lambda *_: FullDisk())
    with pytest.raises(OSError, match=r"No space left on device: '.*last\.pt'"):
        save_checkpoint(path, {"weight": torch.ones(2000), "step": 4})
    assert load_checkpoint(path) == {"step": 3}
    with pytest.raises(ExportError, match="draft cannot be written: no space"), finished_folder(tmp_path / "draft"):
        raise SafetensorError("no space")


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


def test_a_table_that_a_full_disk_left_empty_is_begun_anew(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.save("last.pt")
    run._lock.release()
    table = tmp_path / LOSSES_FILE
    table.touch()
    run = run_in(tmp_path)
    run._report({"loss": 0.5}, 1.0, is_row=True)
    assert table.read_text(encoding="utf-8").splitlines()[0] == "step,tokens,seconds,loss"


def test_a_table_without_rows_gives_no_picture(tmp_path: Path) -> None:
    """As a training has that is resumed near its end."""
    (tmp_path / LOSSES_FILE).write_text("step,tokens,seconds,loss\n", encoding="utf-8")
    plot_losses(tmp_path / LOSSES_FILE, tmp_path / "losses.png")
    assert not (tmp_path / "losses.png").exists()


def test_a_deadline_that_is_over_trains_nothing(tmp_path: Path) -> None:
    schedule = WarmStableDecay(budget_s=10, warm_steps=0, decay_s=0)
    config = RunConfig(out=tmp_path, schedule=schedule, deadline=1000.0)
    with pytest.raises(ConfigError, match="--deadline is over before the first step"):
        TimedRun(config, {}).run(lambda share: (0, {}), lambda: None)
    none = replace(config, schedule=replace(schedule, budget_s=0), deadline=time.time() + 1000)
    TimedRun(none, {}).run(lambda share: (0, {}), lambda: None)  # free again; no seconds are no late deadline


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


def test_a_folder_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--output \. is no name of a folder"):
        check_output(Path())
