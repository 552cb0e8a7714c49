"""What AutoTokenizer takes from the files beside tokenizer.json is in the bundle, too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.export.checkpoints import carried_files
from mirrorsd.export.checkpoints.carried_files import copy_tokenizer, probe_texts
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import SourceModel
from mirrorsd.texts.tokenizer import BundleTokenizer

Make = Callable[..., Path]
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SIZE = 259


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}
    return {"content": content, **plain, **flags}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A folder with a byte-level tokenizer of 259 ids and these files beside it."""

    def make(settings: Any = None, **files: Any) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        special = ["<s>", "</s>", "<unk>"]
        vocabulary = {
            word: place for place, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
        }
        made = Tokenizer(models.BPE(vocabulary, []))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens(special)
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({**PLAIN, **(settings or {})}))
        for name, document in files.items():
            (folder / f"{name}.json").write_text(json.dumps(document))
        return folder

    return make


def carried(folder: Path, num_ids: int | None = None) -> BundleTokenizer:
    source = SourceModel(name="target", family="llama", licence="unknown", num_parameters=1)
    bundle = folder.parent / "bundle"
    bundle.mkdir(exist_ok=True)
    copy_tokenizer(Checkpoint(folder=folder, role="target", config={}, generation={}, source=source), bundle)
    return BundleTokenizer(bundle, num_ids)


SIDE_FILES: dict[str, dict[str, Any]] = {
    "added_tokens_decoder": {"settings": {"added_tokens_decoder": {str(SIZE): token("<think>", special=True)}}},
    "flags": {
        "settings": {
            "added_tokens_decoder": {
                str(SIZE): token("<l>", lstrip=True),
                str(SIZE + 1): token("<r>", rstrip=True, special=True),
                str(SIZE + 2): token("one", single_word=True),
                str(SIZE + 3): token("<N>", normalized=True),
            }
        }
    },
    "extra_special_tokens, a list": {"settings": {"extra_special_tokens": ["<a>", "<b>"]}},
    "extra_special_tokens, by name": {"settings": {"extra_special_tokens": {"image_token": "<image>"}}},
    "additional_special_tokens": {"settings": {"additional_special_tokens": ["<a>"]}},
    "a token of another name": {"settings": {"image_token": "<image>", "pad_token": "<pad>"}},
    "special_tokens_map": {
        "special_tokens_map": {"additional_special_tokens": ["<a>"], "pad_token": token("<pad>", lstrip=True)}
    },
    "added_tokens": {"added_tokens": {"<x>": SIZE, "<y>": SIZE + 1}},
    "split_special_tokens": {"settings": {"split_special_tokens": True, "extra_special_tokens": ["<a>"]}},
}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_tokens_of_side_files_are_carried_with_their_flags(name: str, make: Make) -> None:
    from transformers import AutoTokenizer

    folder = make(**SIDE_FILES[name])
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = carried(folder)
    added = {str(token) for token in theirs.added_tokens_decoder.values()}
    assert len(added) > 3
    for text in [*probe_texts(sorted(added)), "say <think> now", "one stone", " <l> <r> x", "</s>"]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    is_split = "split" in name
    assert (len(ours.encode("</s>")) > 1) == is_split


def test_texts_spell_every_token_in_every_surrounding() -> None:
    texts = probe_texts(["<a>", "{}"])
    assert len(texts) == 200 and len(set(texts)) == 200
    for one in ("<a>", "{}"):
        assert any(f"a{one}b" in text for text in texts) and any(f"\n{one}\n" in text for text in texts)
    whole = "".join(probe_texts([f"[{number}]" for number in range(500)]))
    assert all(f"a[{number}]b" in whole for number in range(500))


def test_other_ids_than_transformers_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = make({"extra_special_tokens": ["<a>"]}), carried_files._load_tokenizer

    def forgetful(target: Checkpoint) -> Any:
        found = real(target)
        found.save_pretrained = lambda place: [  # as a form of saving that loses what side files add
            Path(place, name).write_bytes((folder / name).read_bytes())
            for name in ("tokenizer.json", "tokenizer_config.json")
        ]
        return found

    monkeypatch.setattr(carried_files, "_load_tokenizer", forgetful)
    with pytest.raises(ExportError, match=r"cannot be carried over: of .*<a>.* transformers makes \[.*259\]"):
        carried(folder)


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "added_tokens"])
def test_a_damaged_side_file_is_named(name: str, make: Make) -> None:
    folder = make()
    (folder / f"{name}.json").write_text("{")
    with pytest.raises(ExportError, match=f"{name}.json"):
        carried(folder)


def test_a_tokenizer_that_transformers_cannot_load_is_refused(make: Make) -> None:
    folder = make({"added_tokens_decoder": {"x": 5}})
    with pytest.raises(ExportError, match=r"transformers cannot load the tokenizer of the target .*checkpoint"):
        carried(folder)


NAMED = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ tools | tojson }}"}
MESSAGES = [{"role": "user", "content": "a"}]


def listed(templates: dict[str, str]) -> dict[str, Any]:
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def test_named_templates_are_carried(make: Make) -> None:
    ours = carried(make(listed(NAMED)))
    assert ours.chat_templates == NAMED
    assert ours.render_chat(MESSAGES) == "D a"
    assert ours.render_chat(MESSAGES, [{"name": "f"}]) == 'T [{"name": "f"}]'


def test_named_templates_in_files_are_carried(make: Make) -> None:
    folder = make()
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(NAMED["tool_use"])
    assert carried(folder).chat_templates == NAMED


def test_the_only_template_is_used_whatever_its_name(make: Make) -> None:
    assert carried(make(listed({"chatml": "x"}))).render_chat(MESSAGES) == "x"


def test_a_template_in_the_settings_is_carried(make: Make) -> None:
    assert carried(make({"chat_template": "y"})).render_chat(MESSAGES) == "y"


def test_an_empty_list_of_templates_is_none(make: Make) -> None:
    assert carried(make({"chat_template": []})).chat_templates == {}


@pytest.mark.parametrize("template", ["{% if tools %}", "{{ messages", "{% endgeneration %}"])
def test_a_template_that_is_none_is_refused(make: Make, template: str) -> None:
    """A bundle with it could not be opened, and exporting again would not help."""
    with pytest.raises(ExportError, match=r"the chat template 'tool_use' of the target .* cannot be read \(.*correct"):
        carried(make(listed({"default": "a", "tool_use": template})))


def test_a_name_that_leaves_the_folder_is_refused(make: Make) -> None:
    with pytest.raises(ExportError, match=r"names a chat template '\.\./x'; allowed"):
        carried(make(listed({"default": "a", "../x": "b"})))


def test_templates_know_every_token_by_name(make: Make) -> None:
    settings = {"chat_template": "{{ image_token }}{{ boi_token }}{{ bos_token }}", "image_token": "<i>"}
    ours = carried(make({**settings, "extra_special_tokens": {"boi_token": "<boi>"}}))
    assert ours.render_chat(MESSAGES) == "<i><boi><s>"
