"""`mirrorsd train text`, `exit`, `draft` and `report` on the tiny pair, one after the other, and into a bundle."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mirrorsd.cli.application import run
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.compatibility import check_compatible
from mirrorsd.training.models.streaming_draft import StreamingDraft

SIZES = ("--batch", "2", "--length", "32")
DRAFT = ("--hidden", "64", "--layers", "1", "--streams", "2", "--stream-layers", "1", *SIZES)
QUICK = ("--seconds", "0.5", "--no-compile")


def sample(name: str) -> Any:
    """A program of `samples/`, as a module."""
    folder = str(Path(__file__).resolve().parents[2] / "samples")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def trained(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` (a copy), `work` and the corpus; the target has written its text."""
    folder = tmp_path_factory.mktemp("train")
    shutil.copytree(tiny_pair[0], folder / "target")
    chat = {"messages": [{"role": "user", "content": "Tell me of the heron."}]}
    lines = [json.dumps({"text": f"Once upon a time there was a little fox, {n} years old."}) for n in range(8)]
    (folder / "corpus.jsonl").write_text("\n".join([*lines, json.dumps(chat)]) + "\n", encoding="utf-8")
    command = ["train", "text", str(folder / "target"), "--corpus", str(folder / "corpus.jsonl")]
    assert run([*command, "--work", str(folder / "work"), "--texts", "2"]) == 0
    return folder


def test_exits_are_measured_trained_and_measured_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, work = str(trained / "target"), str(trained / "work")
    command = ["train", "exit", target, "--work", work, "--layers", "2", "--rank", "8", *SIZES, "--json"]
    assert run([*command, "--seconds", "0.3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["layers"]["2"]) == {"untrained", "adapter"}
    assert set(found["untrained_everywhere"]) == {"1", "2", "3"}
    assert (trained / "target" / "exit_coverage.png").stat().st_size > 1000
    written = json.loads((trained / "target" / "exit_coverage.json").read_text(encoding="utf-8"))
    assert written["layers"] == found["layers"]
    assert run([*command, "--seconds", "0.3"]) == 2
    assert "add --resume to go on" in capsys.readouterr().err


def test_exits_learn_on_documents_that_the_target_did_not_write(trained: Path, tmp_path: Path) -> None:
    work, target = tmp_path / "work", shutil.copytree(trained / "target", tmp_path / "target")
    command = ["train", "exit", str(target), "--work", str(work), "--layers", "2", "--rank", "8", *SIZES]
    documents = ["--corpus", str(trained / "corpus.jsonl"), "--texts", "2", "--document-share", "1"]
    assert run([*command, *documents, "--seconds", "0.2"]) == 0
    assert not (work / "text").exists(), "nothing is written to learn from"
    assert (work / "text_held_back").is_dir()
    assert (target / "exit_adapters.safetensors").is_file()


def test_a_draft_and_its_baseline(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_pair: tuple[Path, Path]
) -> None:
    target, work, output = str(trained / "target"), str(trained / "work"), tmp_path / "draft"
    command = ["train", "draft", target, "-o", str(output), "--work", work, *DRAFT, *QUICK, "--baseline", "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["windows"]["reference"] == "s=0, 6 passes"
    assert len(found["agreement"]["streams"]) == 2
    assert (output / "streams.safetensors").is_file()
    assert json.loads((output / "training.json").read_text(encoding="utf-8"))["seconds"] > 0
    assert not (tmp_path / "draft-s0" / "streams.safetensors").exists()
    prompts = tmp_path / "prompts.jsonl"
    question = {"question_id": 1, "category": "story", "turns": ["Tell me of the fox.", "And then?"]}
    prompts.write_text(json.dumps(question) + "\n", encoding="utf-8")
    report = ["train", "report", target, "--draft", str(output), "--prompts", str(prompts), "--whole"]
    assert run([*report, "--only", "misses,sampling", "-o", str(tmp_path / "report.json")]) == 0
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {"misses", "sampling", "machine"} <= set(written)
    assert "where the draft's best token is wrong" in capsys.readouterr().out


def test_a_head_is_trained_and_reported_beside_others(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, work, output = str(trained / "target"), str(trained / "work"), tmp_path / "head"
    command = ["train", "head", target, "-o", str(output), "--work", work, "--kind", "eagle3", *SIZES, *QUICK]
    shape = (
        "--taps",
        "1,final",
        "--guesses",
        "3",
        "--vocabulary",
        "reduced",
        "--tokens",
        "50",
        "--loss",
        "kl=0.8,hard=0.2",
    )
    assert run([*command, *shape, "--json"]) == 0
    assert json.loads((output / "training.json").read_text(encoding="utf-8"))["steps"] > 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "eagle3"
    assert len(found["agreement"]) == len(found["sampled"]["reaches"]) == 3
    assert json.loads((trained / "work" / "eagle3_report.json").read_text(encoding="utf-8")) == found
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["taps"] == [1, "final"]
    assert run([*command, *shape]) == 2
    assert "add --resume to go on" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "story", "turns": ["A fox."]}) + "\n")
    report = ["train", "report", target, "--prompts", str(prompts), "--whole"]
    assert run([*report, "--head", str(output), "-o", str(tmp_path / "report.json")]) == 0
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert set(written["heads"]["head"]["greedy"]["by_task"]) == {"story"}
    assert "tokens per step" in capsys.readouterr().out
    assert run(report) == 2
    assert "give --draft, --head or both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--taps", "low"), "--taps is 'low'"),
        (("--loss", "kl"), "--loss is 'kl'; expected shares"),
        (("--kind", "serpent"), "kind is 'serpent'"),
    ],
)
def test_a_head_that_cannot_be_is_refused(
    wrong: tuple[str, str], words: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "head", str(trained / "target"), "-o", str(tmp_path / "head"), "--work", str(tmp_path)]
    assert run([*command, *(() if wrong[0] == "--kind" else ("--kind", "medusa")), *wrong]) == 2
    assert words in capsys.readouterr().err


def test_a_draft_from_a_small_model_on_documents_too(
    trained: Path, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    shutil.copytree(tiny_pair[1], small)
    (small / "streams.safetensors").unlink()
    sizes = ("--streams", "1", "--stream-layers", "1", *SIZES)
    start = ("--from-model", str(small), "-o", str(tmp_path / "draft"), "--work", str(tmp_path / "work"))
    shutil.copytree(trained / "work", tmp_path / "work", ignore=shutil.ignore_patterns("draft*", "baseline", "exits"))
    documents = ("--document-share", "0.5", "--argmax-weight", "0", "--texts", "2")
    assert run(["train", "draft", str(trained / "target"), *start, *sizes, *QUICK, *documents]) == 2
    assert "give --corpus, where they are" in capsys.readouterr().err
    own = ("--corpus", str(trained / "corpus.jsonl"), "--stream-rank", "4", "--prompt-weight", "0.5", "--more-text")
    command = ["train", "draft", str(trained / "target"), *start, *sizes, *QUICK, *documents, *own]
    assert run([*command, str(tmp_path / "elsewhere")]) == 2
    assert "elsewhere/text holds no text" in capsys.readouterr().err.replace("\n", "").replace("\\", "/")
    assert run([*command, str(trained / "work")]) == 0
    assert len(StreamingDraft.load(tmp_path / "draft").adapters) == 2
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["num_hidden_layers"] == 2
    state = torch.load(tmp_path / "work" / "draft" / "last.pt", weights_only=True)
    assert min(stream["place"] for stream in state["text"].values()) > 0, "both were read"


def test_a_draft_with_another_vocabulary_is_refused(
    trained: Path, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    shutil.copytree(tiny_pair[1], small)
    document = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    document["model"]["vocab"]["fox!"] = document["model"]["vocab"].pop("fox", 299)
    (small / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    options = ["--from-model", str(small), "-o", str(tmp_path / "draft"), "--work", str(trained / "work")]
    assert run(["train", "draft", str(trained / "target"), *options]) == 3
    assert "the vocabularies of their tokenizers differ" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_a_bad_line_stops_before_anything_is_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"Once upon a time.\n\nThe end.\n")
    command = ["train", "text", str(trained / "target"), "--corpus", str(tmp_path / "corpus.txt")]
    assert run([*command, "--work", str(tmp_path / "work")]) == 2
    assert "corpus.txt, line 2: the line is empty" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_documents_stand_beside_text_that_began_with_others(trained: Path, tmp_path: Path) -> None:
    """`--corpus` is read as it is; what the target wrote comes from a folder that began with another corpus."""
    lines = [json.dumps({"text": f"abba ab baba {n} " * 20}) for n in range(20)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    work, output = tmp_path / "work", tmp_path / "draft"
    command = ["train", "draft", str(trained / "target"), "-o", str(output), "--work", str(work), *DRAFT, *QUICK]
    command += ["--corpus", str(tmp_path / "documents.jsonl"), "--document-share", "0.5"]
    assert run([*command, "--texts", "0", "--more-text", str(trained / "work")]) == 0
    assert not (work / "text").exists(), "only held-back text is written here"
    assert (output / "config.json").is_file()
    assert run([*command, "--texts", "0", "--resume"]) == 2, "nothing of the target's own is left to learn from"


def test_conversations_longer_than_asked_are_left_out(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": [{"role": "user", "content": "Tell me of the heron. " * n}]} for n in (3, 4)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    command = ["train", "text", str(trained / "target"), "--corpus", str(tmp_path / "corpus.jsonl"), "--texts", "1"]
    assert run([*command, "--work", str(tmp_path / "work"), "--longest-prompt", "16"]) == 2
    assert "a user's turn within the first 16" in capsys.readouterr().err
    assert run([*command, "--work", str(tmp_path / "work"), "--longest-prompt", "120"]) == 0


def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mirrorsd.machine.doctor.memory.free_memory", lambda device: 1 << 20)
    monkeypatch.setattr("mirrorsd.training.models.whole_model.load_whole", None)
    assert run(["train", "exit", str(trained / "target"), "--work", str(trained / "work")]) == 2
    assert "GB of memory" in capsys.readouterr().err


def test_a_draft_cut_from_a_gguf_file_trains_on_documents_alone(
    write_gguf: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target writes nothing but the held-back text; the draft shares its embedding, and goes on where it was."""
    file, work, output = write_gguf("Q8_0"), tmp_path / "work", tmp_path / "draft"
    lines = [json.dumps({"text": f"abba ab baba {n} " * 20}) for n in range(20)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["train", "draft", str(file), "-o", str(output), "--work", str(work), "--texts", "2", *SIZES, *QUICK]
    command += ["--corpus", str(tmp_path / "corpus.jsonl"), "--document-share", "1", "--loss", "lk", "--json"]
    start = ["--from-layers", "0,1", "--head-rank", "16", "--streams", "2", "--stream-layers", "1", "--device", "cpu"]
    assert run([*command, *start]) == 0
    assert not (work / "text").exists()
    assert len(json.loads(capsys.readouterr().out)["agreement"]["streams"]) == 2
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["shares_embedding"] is True
    further = ["--from-model", str(output), "--streams", "2", "--stream-layers", "1", "--stream-rank", "64"]
    second = [*command[:4], str(tmp_path / "second"), "--work", str(tmp_path / "work2"), *command[7:], *further]
    assert run(second) == 0
    assert run([*second, "--from-layers", "0"]) == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        ("draft", ("--layers", "0"), "--layers is 0"),
        ("draft", ("--hidden", "100"), "--hidden is 100"),
        ("draft", ("--streams", "-1"), "--streams is -1"),
        ("draft", ("--stream-layers", "5"), "--stream-layers is 5"),
        ("draft", ("--from-layers", "0,9"), "--from-layers is (0, 9)"),
        ("draft", ("--loss", "far"), "--loss is 'far'"),
        ("draft", ("--rate", "0"), "--rate is 0.0"),
        ("draft", ("--stream-weight", "2"), "--stream-weight is 2.0"),
        ("draft", ("--length", "0"), "--length"),
        ("draft", ("--batch", "0"), "--batch"),
        ("draft", ("--seconds", "-1"), "--seconds"),
        ("draft", ("--report-every", "0"), "--report-every"),
        ("draft", ("--device", "abacus"), "--device is 'abacus'"),
        ("draft", ("--length", "4096"), "--length 4096 needs 8193 tokens"),
        ("draft", ("--more-text", "nowhere"), "--more-text nowhere"),
        ("draft", ("--held-back", "nowhere.txt"), "nowhere.txt does not exist"),
        ("draft", ("--held-back", "SHORT"), "none of 1 documents gives a prompt"),
        ("draft", ("--output", "SHORT/draft"), "draft cannot be written"),
        ("draft", ("--head-rank", "8"), "--head-rank does nothing without --from-layers"),
        ("draft", ("--from-layers", "0,1"), "--hidden does nothing beside what the draft starts from"),
        ("draft", ("--streams", "0"), "--stream-layers does nothing with --streams 0"),
        ("exit", ("--rank", "0"), "--rank is 0"),
        ("exit", ("--rank", "65"), "--rank is 65; allowed are 1..64"),
        ("exit", ("--layers", "9"), "--layers names layer 9"),
        ("head", ("--taps", "9"), "--taps: tap 9"),
        ("head", ("--vocabulary", "large"), "--vocabulary is 'large'"),
        ("head", ("--guesses", "40"), "--length is 32"),
        ("head", ("--decay", "2"), "--decay"),
        ("head", ("--layers", "1"), "--layers is 1; a medusa head has 0"),
        ("head", ("--kind", "streaming", "--layers", "0"), "--layers is 0; a streaming head has 1 or more"),
        ("head", ("--kind", "streaming", "--layers", "2", "--taps", "1"), "--taps names 1 for --layers 2"),
        ("head", ("--taps", "1,final"), "--taps names 2; a medusa head reads one"),
        ("head", ("--loss", "kl=0"), "--loss is kl=0.0"),
        ("head", ("--loss", "far=1"), "--loss is 'far=1'"),
        ("head", ("--tokens", "50"), "--tokens does nothing without --vocabulary reduced"),
        ("head", ("--head-rank", "8"), "--head-rank does nothing without --vocabulary low-rank"),
    ],
)
def test_an_error_names_the_option_and_comes_before_any_text(
    kind: str, wrong: tuple[str, str], words: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = {"draft": ["-o", str(tmp_path / "out"), *DRAFT], "head": ["-o", str(tmp_path / "out"), *SIZES]}
    command = ["train", kind, str(trained / "target"), *output.get(kind, SIZES), "--work", str(tmp_path / "work")]
    corpus = ["--corpus", str(trained / "corpus.jsonl"), "--texts", "2"]
    (tmp_path / "short.txt").write_text("fox\n", encoding="utf-8")
    typed = [word.replace("SHORT", str(tmp_path / "short.txt")) for word in wrong]
    assert run([*command, *corpus, *(["--kind", "medusa"] if kind == "head" else []), *typed]) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "work" / "text").exists()


def test_documents_to_hold_back_want_a_corpus(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_back = ["--held-back", str(trained / "corpus.jsonl")]
    assert run(["train", "exit", str(trained / "target"), "--work", str(tmp_path), *SIZES, *held_back]) == 2
    assert "--held-back does nothing without --corpus" in capsys.readouterr().err


def test_a_report_on_no_text_is_refused(
    trained: Path, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["fox " * 4000]}))
    command = ["train", "report", str(trained / "target"), "--draft", str(tiny_pair[1])]
    command += ["--prompts", str(tmp_path / "long.jsonl")]
    for wrong, words in (((), "none of 1 questions fits"), (("--per-task", "-1"), "--per-task")):
        assert run([*command, *wrong]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_text_of_a_target_with_other_tokens_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other" / "text").mkdir(parents=True)
    columns = {"lengths": [99], "prompt_lengths": [1], "temperatures": [0.0]}
    np.savez(tmp_path / "other" / "text" / "batch_00000.npz", tokens=np.full(99, 70_000, np.uint32), **columns)
    command = ["train", "draft", str(trained / "target"), "-o", str(tmp_path / "draft"), "--work", str(tmp_path)]
    more = ["--corpus", str(trained / "corpus.jsonl"), "--texts", "2", "--more-text", str(tmp_path / "other")]
    assert run([*command, *DRAFT, *more]) == 2
    assert "text of another target: it has token 70000" in " ".join(capsys.readouterr().err.split())


def test_a_training_says_what_comes_and_how_far_it_is(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps between rows are many here: how far it is, is told all the same."""
    monkeypatch.setattr("mirrorsd.training.run.timed_run._SHOW_S", 0.0)
    shutil.copytree(trained / "work", tmp_path / "work", ignore=shutil.ignore_patterns("draft*", "baseline", "exits"))
    command = [
        "train",
        "draft",
        str(trained / "target"),
        "-o",
        str(tmp_path / "draft"),
        "--work",
        str(tmp_path / "work"),
    ]
    assert run([*command, *DRAFT, *QUICK, "--report-every", "100000"]) == 0
    said = capsys.readouterr().err
    assert "s of training (--seconds), then measuring" in said.replace("\n", " ")
    assert "step 1, " in said and "s left" in said


def test_a_draft_that_has_learned_nothing_fits_any_target(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = tiny_pair[0]
    blank_draft = sample("blank_draft")
    blank_draft.write_blank(target, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out", "draft")
    check_compatible(open_checkpoint(target, "target"), found)
    assert found.source.num_parameters < 100_000
    with pytest.raises(SystemExit, match=r"has no config\.json"):
        blank_draft.write_blank(tmp_path, tmp_path / "other")


def test_no_sample_writes_over_its_target(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = shutil.copytree(tiny_pair[0], tmp_path / "target")
    before = (target / "model.safetensors").read_bytes()
    for write in (sample("blank_draft").write_blank, partial(sample("cut_draft").cut, first=1, last=1)):
        with pytest.raises(SystemExit, match="target is the target itself, which would be lost"):
            write(target, tmp_path / "other" / ".." / "target")
    assert (target / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("is_file", [False, True])
def test_a_draft_is_cut_from_a_folder_and_from_a_gguf_file(
    is_file: bool, tiny_pair: tuple[Path, Path], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    target = write_gguf("Q8_0") if is_file else tiny_pair[0]
    cut_draft = sample("cut_draft")
    cut_draft.cut(target, tmp_path / "out", 1, 1)
    kept = open_checkpoint(tmp_path / "out", "draft")
    assert kept.config["num_hidden_layers"] == 2
    check_compatible(open_checkpoint(target, "target"), kept)
    with pytest.raises(SystemExit, match="--first 9"):
        cut_draft.cut(target, tmp_path / "out", 9, 1)
