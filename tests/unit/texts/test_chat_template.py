"""Templates see conversations as transformers shows them, and in a form that they take."""

import importlib.util
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pydantic
import pytest
from tokenizers import Tokenizer, models

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, ConfigError, GenerationError
from mirrorsd.texts.tokenizer import BundleTokenizer

ROOT = Path(__file__).resolve().parents[3]
COLLECTION = os.environ.get("MIRRORSD_CHAT_TEMPLATES", "")
USER = {"role": "user", "content": "a"}
Make = Callable[..., BundleTokenizer]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}


def asking(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    said = {"role": "assistant", "tool_calls": [call(arguments)], **fields}
    return [USER, said, {"role": "tool", "content": "c"}]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A tokenizer whose folder has these templates and settings."""

    def make(template: str | None = None, settings: Any = None, **named: str) -> BundleTokenizer:
        folder = tmp_path / names.TOKENIZER_FOLDER
        folder.mkdir(exist_ok=True)
        Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
        if template is not None:
            (folder / names.CHAT_TEMPLATE_FILE).write_text(template)
        for name, text in named.items():
            (folder / names.NAMED_TEMPLATE_FILE.format(name)).write_text(text)
        return BundleTokenizer(tmp_path)

    return make


@pytest.fixture(scope="module")
def script() -> ModuleType:
    place = ROOT / "scripts/chat_templates.py"
    spec = importlib.util.spec_from_file_location("chat_templates", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OWN_TEMPLATES = {
    "chatml": "{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "tests for none": "{% for m in messages %}{% if m.content is not none %}{{ m.content }}{% endif %}{% endfor %}",
    "tests for absence": "{% for m in messages %}{{ m.content if 'content' in m else 'nothing' }}{% endfor %}",
    "needs a text": "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}",
    "must not have content": "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content is defined %}{{ raise_exception('content beside calls') }}{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "items of arguments": "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}",
    "json": "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}{{ tools | tojson(indent=2) }}"
    "{{ messages[0] | tojson(ensure_ascii=True) }}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}|{% endfor %}",
    "parts of users": "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p['text'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}|{% endfor %}",
    "parts are lost": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}|{% endfor %}",
    "reasoning": "{% for m in messages %}{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.thinking }}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}",
    "documents": "{% if documents %}{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}"
    "{% else %}{{ documents is none }}{% endif %}{{ messages[0].content }}",
    "tokens by name": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ mask_token is defined }}"
    "{{ messages[-1].content }}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "the day": "{{ strftime_now('%d %B %Y') }}{{ strftime_now(format='%H') }}{{ messages[0].content }}",
    "namespaces": "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}"
    "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['x'], 1) }}",
    "a hidden name": "{% set n = namespace(_a=1) %}{{ n._a }}",
    "a hidden attribute": "{{ messages.__class__.__mro__ }}",
    "a change": "{{ messages.append(1) }}",
    "blocks": "{%- if tools %}\n  tools\n{% endif %}\n   {% if true %}\nx\n{% endif %}\ny\n",
}


@pytest.mark.parametrize("name", OWN_TEMPLATES)
def test_every_case_is_rendered_as_transformers_renders_it(name: str, script: ModuleType) -> None:
    right = script.of_transformers(OWN_TEMPLATES[name])
    outcomes = dict(script.compared(OWN_TEMPLATES[name], right))
    assert {case for case, outcome in outcomes.items() if outcome == "different"} == set()
    is_refused = name in ("a hidden name", "a hidden attribute", "a change")
    assert ("the same" in outcomes.values()) != is_refused
    if is_refused:
        assert set(script.ours(OWN_TEMPLATES[name]).values()) == {None}


def test_a_difference_is_found(script: ModuleType) -> None:
    right = script.of_transformers("{{ messages[0].content }}")
    assert "different" in dict(script.compared("{{ messages[0].content }}.", right)).values()


@pytest.mark.skipif(not COLLECTION, reason="needs other people's templates: MIRRORSD_CHAT_TEMPLATES=FOLDER")
def test_other_peoples_templates_are_rendered_as_recorded(script: ModuleType) -> None:
    recorded = json.loads(script.RECORD.read_text(encoding="utf-8"))["templates"]
    texts = {script.hash_of(text): text for text in (p.read_text() for p in Path(COLLECTION).glob("*.jinja"))}
    known = set(texts) & set(recorded)
    assert len(known) >= 60
    for mark in known:
        assert "different" not in dict(script.compared(texts[mark], recorded[mark])).values()


def test_the_record_is_of_many_templates(script: ModuleType) -> None:
    recorded = json.loads(script.RECORD.read_text(encoding="utf-8"))["templates"]
    assert len(recorded) >= 60
    assert all(set(cases) == set(script.CASES) for cases in recorded.values())
    assert sum(cases["text"] is not None for cases in recorded.values()) >= 60


TELL_ARGUMENTS = "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"a": 1}, '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": {"b": [null, "é"]}}', '{"a": {"b": [null, "é"]}}'),
        ("", "{}"),
        (None, "{}"),
        ('{"half', '"{\\"half"'),
        ("[1]", '"[1]"'),
    ],
)
def test_arguments_that_are_a_json_object_are_one(make: Make, given: Any, told: str) -> None:
    assert make(TELL_ARGUMENTS).render_chat(asking(given)) == told


@pytest.mark.parametrize("given", [{"a": 1}, '{"a": 1}'])
def test_a_template_that_wants_text_gets_text(make: Make, given: Any) -> None:
    template = "{% for c in messages[1].tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    assert make(template).render_chat(asking(given)) == 'call {"a": 1}'


def test_arguments_of_other_places_are_objects_too(make: Make) -> None:
    told = make("{{ messages[1].function_call.arguments.a }}{{ messages[2].tool_calls[0].arguments.a }}")
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    bare = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 2}'}]}
    assert told.render_chat([USER, older, bare]) == "12"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages[1].content }}|", "|"),
        ("{{ 'none' if messages[1].content is none else messages[1].content + '.' }}", "."),
        ("{{ messages[1].content.split('</think>') }}", "['']"),
        ("{% if messages[1].content is defined %}{{ raise_exception('no') }}{% endif %}absent", "absent"),
        ("{% if messages[1].content is not none %}{{ raise_exception('no') }}{% endif %}none", "none"),
    ],
)
@pytest.mark.parametrize("lack", [{}, {"content": None}])
def test_content_that_is_missing_beside_calls(make: Make, template: str, told: str, lack: Any) -> None:
    assert make(template).render_chat(asking({}, **lack)) == told


def test_reasoning_without_content_is_enough(make: Make) -> None:
    said = {"role": "assistant", "content": None, "reasoning": "So."}
    assert make("{{ messages[1].thinking }}{{ messages[1].content }}").render_chat([USER, said]) == "So."


def test_null_fields_disappear(make: Make) -> None:
    asked = {**USER, "name": None, "tool_calls": None}
    assert make("{{ messages[0] | tojson }}").render_chat([asked]) == '{"role": "user", "content": "a"}'


def test_the_first_refusal_is_told(make: Make) -> None:
    template = "{{ raise_exception('first') if messages[1].content == '' else raise_exception('later') }}"
    with pytest.raises(GenerationError, match="refused the messages: first"):
        make(template).render_chat(asking({}))


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages[0].content }}", "one\ntwo"),
        ("{{ messages[0].content | trim }}", "one\ntwo"),
        ("{{ messages[0].content + '' }}", "one\ntwo"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", "one\ntwo"),
        ("{{ messages[0].content[0].text }}", "one"),
        ("{% for p in messages[0].content %}{{ p.text }}-{% endfor %}", "one-two-"),
        ("{{ messages[0].content | tojson }}", '"one\\ntwo"'),
        ("{{ messages[0].content | tojson(separators=(',', ':')) }}", '"one\\ntwo"'),
    ],
)
def test_parts_reach_templates_that_write_them_all(make: Make, template: str, told: str) -> None:
    assert make(template).render_chat([{"role": "user", "content": parts("one", "two")}]) == told


def test_no_parts_at_all_are_an_empty_text(make: Make) -> None:
    said = [{"role": "user", "content": []}, {"role": "user", "content": "a"}]
    assert make("{{ messages[0].content }}|{{ messages[1].content }}").render_chat(said) == "|a"


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SHORT_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}<{{ c.id }}>{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)
ONE_TEXT = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "[{{ m.thinking }}]{{ m.content }}{% endfor %}"
)


def test_a_system_message_that_a_template_refuses_is_told_by_the_user(make: Make) -> None:
    """Every editor sends one, and Gemma 2 has none."""
    said = [{"role": "system", "content": "S"}, {"role": "system", "content": parts("T")}, USER]
    said += [{"role": "assistant", "content": "b"}, {"role": "system", "content": "U"}]
    assert make(NO_SYSTEM).render_chat(said) == "[user]S\n\nT\n\na[assistant]b[user]U"
    assert make(NO_SYSTEM).render_chat([*said[:1], *said[3:4]]) == "[user]S[assistant]b"
    with pytest.raises(GenerationError, match="tools are refused"):
        make("{{ raise_exception('tools are refused') }}").render_chat(said)


def test_ids_that_a_template_refuses_become_short_and_stay_pairs(make: Make) -> None:
    said = [{**message, "tool_call_id": "call_1"} for message in asking({})]
    calls = [call({}) | {"id": "call_1"}, call({}) | {"id": "abcdefgh9"}]
    said[1] = {"role": "assistant", "content": "", "tool_calls": calls}
    written = make(SHORT_IDS).render_chat(said)
    found = re.fullmatch(r"(\w{9})<(\w{9})><abcdefgh9>(\w{9})", written)
    assert found is not None and len({*found.groups()}) == 1


def test_thoughts_that_a_template_refuses_beside_a_text_and_calls_are_said(make: Make) -> None:
    said = [USER, {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [call({})]}]
    assert make(ONE_TEXT).render_chat(said) == "[]a[]t\n\nb"


def test_calls_at_once_that_a_template_refuses_come_one_by_one_before_their_results(make: Make) -> None:
    """Llama's templates write one call at a time, and the history may be another model's."""
    single = "{% if m.tool_calls|length > 1 %}{{ raise_exception('one at once') }}{% endif %}"
    calls = "{% for c in m.tool_calls %}<{{ c.id }}>{% endfor %}"
    each = make(f"{{% for m in messages %}}{single}{calls}{{{{ m.content }}}};{{% endfor %}}")
    said = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": name} for name in "abc"]}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "bca"]
    assert each.render_chat([said, *results, {"role": "user", "content": "So?"}]) == "<a>I look.;a;<b>;b;<c>;c;So?;"
    unnamed = [{"role": "tool", "content": name} for name in "123"]
    assert each.render_chat([said, *unnamed]) == "<a>I look.;1;<b>;2;<c>;3;"


def test_what_parts_say_does_not_decide(make: Make) -> None:
    tokenizer = make("{% for p in messages[0].content %}{{ p.text | trim }};{% endfor %}")
    for text in ("", " ", "'text': 'x'", "same", 'a "quote"'):
        assert tokenizer.render_chat([{"role": "user", "content": parts(text, "same")}]) == f"{text.strip()};same;"
    assert tokenizer.render_chat([{"role": "user", "content": []}]) == ""


def test_values_of_richer_types_become_json(make: Make) -> None:
    class Kind(StrEnum):
        ONE = "one"

    @dataclass
    class Point:
        x: int

    class Model(pydantic.BaseModel):
        role: str = "user"
        content: str = "m"
        name: str | None = None

    told = make("{{ messages[0].more | tojson }}{{ messages[1] | tojson }}")
    more = {"kind": Kind.ONE, "point": Point(1), "count": np.int64(2), "is_so": np.bool_(False), "pair": (1.5, None)}
    rendered = told.render_chat([{**USER, "more": more}, Model()])  # type: ignore[list-item]
    first = '{"kind": "one", "point": {"x": 1}, "count": 2, "is_so": false, "pair": [1.5, null]}'
    assert rendered == first + '{"role": "user", "content": "m"}'


def test_values_that_are_no_json_are_refused(make: Make) -> None:
    tokenizer, loop = make("{{ messages }}"), []
    loop.append(loop)
    for value, found in ((object(), "allowed: JSON values"), (b"x", "allowed: JSON values"), (loop, "holds itself")):
        with pytest.raises(GenerationError, match=rf"messages\[0\].x.*{found}"):
            tokenizer.render_chat([{**USER, "x": value}])
    with pytest.raises(GenerationError, match=r"tools\[0\].x is .*allowed: JSON values"):
        tokenizer.render_chat([USER], [{"x": object()}])


def test_named_templates_are_chosen_as_transformers_chooses(make: Make) -> None:
    tokenizer = make("D", tool_use="T {{ tools | length }}", rag="R {{ documents[0].text }}")
    assert set(tokenizer.chat_templates) == {"default", "tool_use", "rag"}
    assert tokenizer.render_chat([USER]) == "D"
    assert tokenizer.render_chat([USER], [{"name": "look"}]) == "T 1"
    asked = {"chat_template": "rag", "documents": [{"text": "x"}]}
    assert tokenizer.render_chat([USER], variables=asked) == "R x"
    with pytest.raises(ConfigError, match=r"names the chat_template 'other'; allowed: default, rag, tool_use"):
        tokenizer.render_chat([USER], variables={"chat_template": "other"})


def test_without_a_default_one_must_be_chosen(make: Make) -> None:
    tokenizer = make(tool_use="T", rag="R")
    with pytest.raises(GenerationError, match="has the chat templates rag, tool_use and none that is the default"):
        tokenizer.render_chat([USER])
    assert tokenizer.render_chat([USER], [{"name": "look"}]) == "T"


def test_a_damaged_named_template_is_a_damaged_bundle(make: Make) -> None:
    with pytest.raises(BundleError, match=r"chat_template.tool_use.jinja cannot be read"):
        make("D", tool_use="{% for %}")


def test_tokens_of_any_name_reach_the_template(make: Make) -> None:
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "image_token": "<image>",
        "add_bos_token": True,
        "extra_special_tokens": {"boi_token": "<boi>"},
        "pad_token": None,
    }
    told = make(
        "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ boi_token }}{{ add_bos_token is defined }}"
        "{{ pad_token is defined }}",
        settings,
    )
    assert told.render_chat([USER]) == "<s></s><image><boi>FalseFalse"
    assert told.render_chat([USER], variables={"bos_token": ""}) == "</s><image><boi>FalseFalse"


def test_a_message_is_continued(make: Make) -> None:
    chatml = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{{ add_generation_prompt }}"
    said = [USER, {"role": "assistant", "content": "It is "}]
    tokenizer = make(chatml)
    assert tokenizer.render_chat(said, continue_final_message=True) == "[user]a[end][assistant]It is "
    assert tokenizer.render_chat(said, add_generation_prompt=False).endswith("[end]False")
    trimming = make(chatml.replace("m.content", "m.content | trim"))
    assert trimming.render_chat(said, continue_final_message=True) == "[user]a[end][assistant]It is"
    with pytest.raises(GenerationError, match="no content to go on with"):
        tokenizer.render_chat(asking({})[:2], continue_final_message=True)
    with pytest.raises(GenerationError, match="does not write the last message as it is"):
        make("{{ messages[0].content }}").render_chat(said, continue_final_message=True)
