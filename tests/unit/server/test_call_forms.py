"""How a template writes calls is read out of it; what comes by that form is allowed and read, wherever it is cut."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server.answers.tools import CallReader, Wish, plan_tools
from mirrorsd.server.bundles.call_forms import ID_MARK, OWN, CallForm, Speech, read_form, told_plainly
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import Tool
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import Constraint, ConstraintCompiler
from mirrorsd.texts.tokenizer import BundleTokenizer

END, CONTEXT = "<|end|>", 1024
SPECIALS = (END, "[CALLS]", "<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>")
TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"
SAID = "<{{ m.role }}>{{ m.content or '' }}"
ENDED = END + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
NAME, GIVEN = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


def template(calls: str, told: str = TOLD) -> str:
    return f"{told}{{% for m in messages %}}{SAID}{{% if m.tool_calls %}}{calls}{{% endif %}}{ENDED}"


def each(call: str, between: str = "") -> str:
    return f"{{% for c in m.tool_calls %}}{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"


ONLY = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
LINE = "{{ '\\n' }}"
TAGGED = f'{LINE}<tool_call>\n{{"name": "{NAME}", "arguments": {GIVEN}}}\n</tool_call>'
LISTED = f'{{"name": "{NAME}", "arguments": {GIVEN}, "id": "{{{{ c.id }}}}"}}'
FENCED = f"<|call|>function<|sep|>{NAME}\n```json\n{GIVEN}\n```<|/call|>"
ITEMS = "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
SPELLED = f"<function={NAME}>{ITEMS}"
TEMPLATES = {
    "in tags": template(each(TAGGED)),
    "a list behind a special token": template(f"[CALLS][{each(LISTED, ', ')}]"),
    "JSON alone": template(ONLY + each(f'{{"name": "{NAME}", "parameters": {GIVEN}}}')),
    "fenced between special tokens": template(f"<|calls|>{each(FENCED, LINE)}<|/calls|>"),
    "parameters as elements": template(each(SPELLED)),
    "no end before the results": template(each(TAGGED)).replace(END, f"{{% if not m.tool_calls %}}{END}{{% endif %}}"),
    "tools are not told": template(each(TAGGED), told=""),
    "tools are refused": "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + template(""),
}
FORMS = {
    "in tags": CallForm(
        '<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>"
    ),
    "a list behind a special token": CallForm(
        '[CALLS][{"name": "', '", "arguments": ', f', "id": "{ID_MARK}"}}, {{"name": "', f', "id": "{ID_MARK}"}}]'
    ),
    "JSON alone": CallForm('{"name": "', '", "parameters": ', None, "}"),
    "fenced between special tokens": CallForm(
        "<|calls|><|call|>function<|sep|>",
        "\n```json\n",
        "\n```<|/call|>\n<|call|>function<|sep|>",
        "\n```<|/call|><|/calls|>",
    ),
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "look", "parameters": parameters}})
    for parameters in [{"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}]
] + [Tool.model_validate({"type": "function", "function": {"name": "wait"}})]
CALLS = [("look", {"at": "a </tool_call> in it, é"}), ("wait", {})]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BundleTokenizer]:
    """A tokenizer of single bytes and special tokens, with a template."""

    return lambda template: byte_tokenizer(tmp_path_factory.mktemp("bundle"), SPECIALS, template)


def form_of(tokenizer: BundleTokenizer) -> CallForm:
    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
        return tokenizer.render_chat(messages, tools, add_generation_prompt=is_prompt)

    return read_form(render, [END])


@pytest.fixture(scope="module")
def speak(make: Callable[[str], BundleTokenizer]) -> Callable[[CallForm], tuple[Speech, ConstraintCompiler]]:
    """What the server knows about a bundle with a form, and who compiles its grammars."""
    tokenizer = make("")
    end = tokenizer.special_tokens[END]
    compiler = ConstraintCompiler(tokenizer, 256 + len(SPECIALS), (end,), CONTEXT)
    return lambda form: (Speech(form, tokenizer.special_tokens, [end], CONTEXT), compiler)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_form_is_read_out_of_a_template_else_it_is_ours(make: Callable[[str], BundleTokenizer], kind: str) -> None:
    assert form_of(make(TEMPLATES[kind])) == FORMS.get(kind, OWN)


def test_a_mark_is_whole_where_a_prompt_ends_with_another(make: Callable[[str], BundleTokenizer]) -> None:
    """Templates of models that always think open `<think>`, and a history's turn begins with `<tool_call>`."""
    thinking = template(each(TAGGED.removeprefix(LINE), LINE)).removesuffix("{% endif %}") + "<think>{% endif %}"
    assert form_of(make(thinking)) == FORMS["in tags"]


def test_tools_may_be_told_before_the_last_question_alone(make: Callable[[str], BundleTokenizer]) -> None:
    """Templates of Mistral's models do: then a prompt and a history differ long before the call."""
    told = "{% if tools and loop.index0 == last.at %}{{ tools | tojson }}{% endif %}"
    count = "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    listed = template(f"[CALLS][{each(LISTED, ', ')}]", told="").replace(SAID, told + SAID)
    mistrals = make("{% set last = namespace(at=-1) %}" + count + listed)
    assert form_of(mistrals) == FORMS["a list behind a special token"]


def test_calls_with_their_results_between_them_are_one_at_once(make: Callable[[str], BundleTokenizer]) -> None:
    several = make(template(ONLY + each(TAGGED)))
    assert form_of(several) == replace(FORMS["in tags"], separator=None)


def written(form: CallForm, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return form.written([(name, json.dumps(given, ensure_ascii=False)) for name, given in calls]).replace(
        ID_MARK, "abc123XYZ"
    )


def read_all(reader: CallReader, text: str, size: int) -> tuple[str, list[tuple[str, Any]], list[str]]:
    found, calls = "", []
    for read in [*(reader.push(text[at : at + size]) for at in range(0, len(text), size)), reader.finish()]:
        found += read.text
        calls += read.calls
    return found, [(call.name, json.loads(call.arguments)) for call in calls], [call.id for call in calls]


def count_of(form: CallForm) -> int:
    return 1 if form.separator is None else 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 500])
@pytest.mark.parametrize("form", [*FORMS.values(), OWN], ids=[*FORMS, "ours"])
def test_calls_are_found_wherever_the_text_is_cut(form: CallForm, size: int) -> None:
    calls = CALLS[: count_of(form)]
    lead = "I look.\n" if form.marker else ""
    text = lead + written(form, calls)
    found, read, ids = read_all(CallReader(form, SPECIALS), text, size)
    assert (found, read) == (lead.rstrip("\n"), calls)
    assert len(set(ids)) == len(ids) or ids == ["abc123XYZ"] * 2
    assert (ID_MARK in form.closing) == (ids[0] == "abc123XYZ")


def test_a_long_call_is_parsed_only_where_it_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token it would take time with the square of its length, and that of the thread that serves all."""
    parsed, parse = list[int](), json.JSONDecoder.raw_decode

    def counted(decoder: json.JSONDecoder, text: str, place: int = 0, **named: int) -> Any:
        parsed.append(1)
        return parse(decoder, text, named.get("idx", place))

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    long = [("look", {"at": "line\n" * 200, "rows": [{"n": number} for number in range(50)]})]
    for form in (OWN, FORMS["a list behind a special token"], FORMS["fenced between special tokens"]):
        assert read_all(CallReader(form), written(form, long), 1)[:2] == ("", long)
    assert len(parsed) == 2 * 3  # by the reader, and by this test


@pytest.mark.parametrize("text", ["a < b", "<tool", '<tool_call>\n{"name": "look", "argu', "</tool_call>", "so\n\n"])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_is_no_call_stays_text(text: str, size: int) -> None:
    assert read_all(CallReader(OWN), text, size) == (text, [], [])


def test_an_answer_in_json_is_no_call_where_calls_have_no_mark() -> None:
    form = FORMS["JSON alone"]
    for text in ('{"names": ["a"]}', 'It is {"name": "look", "parameters": {}}', '{"name": 5}'):
        assert read_all(CallReader(form), text, 3) == (text, [], [])


def test_a_last_call_may_lack_what_closes_it() -> None:
    text = written(OWN, CALLS[1:])
    assert read_all(CallReader(OWN), text.removesuffix(OWN.closing), 3)[:2] == ("", CALLS[1:])


@pytest.mark.parametrize("size", [1, 500])
def test_line_ends_behind_a_call_belong_to_it(size: int) -> None:
    text = written(OWN, CALLS)
    assert read_all(CallReader(OWN), text + "\n\n", size)[:2] == ("", CALLS)
    assert read_all(CallReader(OWN), text + "\nSo.", size)[:2] == ("\nSo.", CALLS)


def steps(constraint: Constraint, tokens: Sequence[int], vocab_size: int) -> Iterator[bool]:
    """Whether each token may come after those before it."""
    for token in tokens:
        may_come = bool(constraint.allowed(vocab_size)[token])
        yield may_come
        if not may_come:
            return
        constraint.advance(token)


def is_allowed(speak: Any, form: CallForm, text: str, **wish: Any) -> bool:
    """Whether the grammar of a wish allows a whole answer and its end."""
    speech, compiler = speak(form)
    plan = plan_tools(Wish(**{"tools": TOOLS, **wish}), speech, Limits(), wish.pop("answer", None))
    constraint = compiler.compile(GenerationConfig(grammar=plan.grammar))
    assert constraint is not None
    tokens = [*(compiler._tokenizer.encode(text) if text else ()), speech.eos_ids[0]]
    return all(steps(constraint, tokens, 256 + len(SPECIALS)))


@pytest.mark.parametrize("form", [*FORMS.values(), OWN], ids=[*FORMS, "ours"])
def test_a_grammar_allows_calls_of_its_form_and_text(speak: Any, form: CallForm) -> None:
    one, calls = written(form, CALLS[:1]), CALLS[: count_of(form)]
    assert is_allowed(speak, form, one)
    assert is_allowed(speak, form, one, choice="required")
    assert is_allowed(speak, form, one, choice="required", names=("look",))
    for choice in ("required", "auto"):
        assert not is_allowed(speak, form, one, choice=choice, names=("wait",))
    assert is_allowed(speak, form, "Only words, 1 < 2.")
    assert is_allowed(speak, form, "")
    assert not is_allowed(speak, form, "Only words.", choice="required")
    assert is_allowed(speak, form, written(form, calls), is_parallel=True)
    assert is_allowed(speak, form, written(form, calls), is_parallel=False) == (len(calls) == 1)
    if form.marker:
        assert is_allowed(speak, form, f"I look.\n{one}")


@pytest.mark.parametrize("form", [*FORMS.values(), OWN], ids=[*FORMS, "ours"])
@pytest.mark.parametrize("call", [("look", {}), ("look", {"at": "a", "more": 1}), ("other", {}), ("wait", {"at": "a"})])
def test_a_call_that_has_begun_has_a_name_and_its_schema(speak: Any, form: CallForm, call: Any) -> None:
    assert not is_allowed(speak, form, written(form, [call]))
    assert not is_allowed(speak, form, written(form, [call]), choice="required")


@pytest.mark.parametrize("form", [*FORMS.values(), OWN], ids=[*FORMS, "ours"])
@pytest.mark.parametrize("marks", ["<|sep|>", "<|sep|><|/call|>"])
def test_a_call_behind_special_tokens_is_held_to_its_tool(speak: Any, form: CallForm, marks: str) -> None:
    """Llama's models write `<|python_tag|>` before some: it is not shown, so that a call behind it is read as one."""
    assert is_allowed(speak, form, marks + written(form, CALLS[:1]))
    assert not is_allowed(speak, form, marks + written(form, [("other", {})]))
    for text in (marks, f"{marks}Words", f"Words{marks}", f"Words {marks} and words", f"{marks}{{"):
        assert is_allowed(speak, form, text)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "required": []}])
def test_a_tool_without_named_parameters_takes_none_but_one_of_them_may_be_any_object(
    speak: Any, parameters: Any
) -> None:
    def may_say(parameters: Any, arguments: Any) -> bool:
        tool = Tool.model_validate({"type": "function", "function": {"name": "look", "parameters": parameters}})
        return is_allowed(speak, OWN, written(OWN, [("look", arguments)]), tools=[tool])

    assert may_say(parameters, {}) and not may_say(parameters, {"a": 1})
    inner = {"type": "object", "properties": {"o": parameters}}
    assert parameters is None or (may_say(inner, {"o": {"a": 1}}) and not may_say(inner, {"a": 1}))


OPEN = [{"role": "user", "content": "Is it wet?"}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x"}}}]}
RESULTS = [{"role": "tool", "content": "wet"}, {"role": "tool", "content": [{"type": "text", "text": "cold"}]}]


def test_a_template_that_knows_no_tools_gets_them_as_words() -> None:
    tools = [tool.model_dump(exclude_none=True) for tool in TOOLS]
    messages = [*OPEN, CALLED, *RESULTS, {"role": "user", "content": "So?"}]
    found = told_plainly(messages, tools, OWN)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in found)
    assert '"name":"wait"' in found[0]["content"]
    assert found[2]["content"] == '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert [part in found[3]["content"] for part in ("wet", "cold", "So?")] == [True] * 3
    assert messages[0] == OPEN[0]


def test_a_system_message_keeps_its_words_and_may_be_none() -> None:
    tools = [TOOLS[1].model_dump(exclude_none=True)]
    both = told_plainly([{"role": "system", "content": "Be brief."}, *OPEN], tools, OWN)
    assert both[0]["content"].startswith("Be brief.\n\n")
    assert len(both) == 2


def test_a_template_without_system_messages_tells_tools_too(make: Callable[[str], BundleTokenizer]) -> None:
    refusing = make("{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + template("", ""))
    assert form_of(refusing) == OWN
    tools = [TOOLS[1].model_dump(exclude_none=True)]
    text = refusing.render_chat(told_plainly(OPEN, tools, OWN))
    assert text.startswith("<user>You can call") and text.endswith("Is it wet?<|end|><assistant>")


def test_a_tool_whose_branches_overlap_is_taken_where_it_is_not_strict(speak: Any) -> None:
    """Servers of tools describe alternatives so, and OpenAI's own takes them."""
    branches = [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("a", "b")]
    parameters = {"type": "object", "oneOf": [*branches, {"properties": {"a": {"type": "string"}}}]}
    tool = {"name": "find", "parameters": parameters}
    for strict in (False, True):
        asked = Wish([Tool.model_validate({"type": "function", "function": {**tool, "strict": strict}})])
        speech, compiler = speak(OWN)

        def compiled(asked: Wish = asked, speech: Speech = speech, compiler: Any = compiler) -> Any:
            return compiler.compile(GenerationConfig(grammar=plan_tools(asked, speech, Limits()).grammar))

        if strict:
            with pytest.raises(ConfigError, match="oneOf"):
                compiled()
        else:
            assert compiled() is not None


def test_arguments_come_as_they_were_written(speak: Any) -> None:
    form = FORMS["in tags"]
    given = '{"a": 12345678901234567.25, "b": 1000000000000000000.000000000}'
    assert [call.arguments for call in CallReader(form).push(form.written([("look", given)])).calls] == [given]
