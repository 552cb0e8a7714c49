from pathlib import Path

from mirrorsd.export.verify.draft import Tree
from mirrorsd.export.verify.text import PARITY_TEXT, parity_ids
from mirrorsd.export.verify.text_passes import plan_passes


def _word_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = dict.fromkeys([*PARITY_TEXT.split(), "only", "four", "short", "words"])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="The"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_the_built_in_text_is_long_enough_for_any_tokenizer(tmp_path: Path) -> None:
    """Even one id per word gives more than the 256 positions that parity wants."""
    assert len(PARITY_TEXT.split()) >= 256
    ids, name = parity_ids(_word_tokenizer(tmp_path), None, 256)
    assert (len(ids), name) == (256, "built-in")


def test_a_short_text_is_repeated(tmp_path: Path) -> None:
    ids, name = parity_ids(_word_tokenizer(tmp_path), "only four short words", 10)
    assert ids == (ids[:4] * 3)[:10]
    assert name == "given"


def test_passes_cover_every_row_once_and_feed_rows_that_are_rolled_back() -> None:
    ids = tuple(range(320))
    passes = list(plan_passes(ids))
    kept = [token for step in passes for token in step.ids[: step.num_kept]]
    assert kept == list(ids)
    assert all(step.start == step.ids[0] for step in passes)
    assert {step.num_kept for step in passes} == {160, 1, 6, 147}
    assert any(len(step.ids) > step.num_kept for step in passes)


def test_rows_of_a_tree_see_themselves_and_their_ancestors() -> None:
    tree = Tree((5, 6, 7, 8), (-1, 0, 0, 2))
    assert tree.sees().astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert tree.depths().tolist() == [0, 1, 1, 2]
