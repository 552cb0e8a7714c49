"""What a constrained text may say: row by row of a window, rolled back, and after every chosen token."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import Constraint, ConstraintCompiler
from mirrorsd.texts.tokenizer import BundleTokenizer

VOCAB, CONTEXT = 261, 512
END, AB, ABC, THINK = 256, 257, 258, 259


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> ConstraintCompiler:
    """All single bytes (ids in the order of the byte-level alphabet), an end, the words `ab` and `abc`, and a mark."""
    folder = tmp_path_factory.mktemp("bundle")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: place for place, letter in enumerate(letters)} | {"ab": AB, "abc": ABC}
    tokenizer = Tokenizer(models.BPE({**words, "<end>": END}, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["<think>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return ConstraintCompiler(BundleTokenizer(folder), VOCAB, (END,), CONTEXT)


def constraint_of(compiler: ConstraintCompiler, **settings: str) -> Constraint:
    found = compiler.compile(GenerationConfig(**settings))
    assert found is not None
    return found


def ids_of(compiler: ConstraintCompiler, text: str) -> list[int]:
    return compiler._tokenizer.encode(text)


def allowed(constraint: Constraint) -> set[int]:
    return set(np.flatnonzero(constraint.allowed(VOCAB)).tolist())


def test_a_text_without_a_form_has_no_constraint(compiler: ConstraintCompiler) -> None:
    assert compiler.compile(GenerationConfig()) is None


def test_a_mark_that_is_shown_is_text(compiler: ConstraintCompiler) -> None:
    """Qwen's `<think>` and `<tool_call>` are added tokens, and not special."""
    constraint = constraint_of(compiler, regex="(?s:.*)")
    assert {THINK, AB, END} <= allowed(constraint)
    constraint = constraint_of(compiler, regex="<think>x|<end>")
    assert allowed(constraint) == {THINK, ids_of(compiler, "<")[0]}
    constraint.advance(THINK)
    assert allowed(constraint) == set(ids_of(compiler, "x"))


SPACED: dict[str, tuple[Any, Any]] = {
    "prepend": (normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), None),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
}


@pytest.mark.parametrize("kind", SPACED)
def test_what_is_forced_gets_no_space_before_it(kind: str, tmp_path: Path) -> None:
    """Vocabularies like Llama 2's put a space before a text's first word."""
    words = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.BPE({w: n for n, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    normalizer, pre_tokenizer = SPACED[kind]
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<end>"])
    (tmp_path / "tokenizer").mkdir()
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    tokenizer = BundleTokenizer(tmp_path)
    compiler = ConstraintCompiler(tokenizer, len(words), (1,), CONTEXT)
    for regex in ("yes", "[0-9]{3} yes"):
        constraint, found = constraint_of(compiler, regex=regex), []
        while 1 not in (may := np.flatnonzero(constraint.allowed(len(words))).tolist()):
            constraint.forced(8)
            found.append(int(may[0]))
            constraint.advance(found[-1])
        assert re.fullmatch(regex, b"".join(map(tokenizer.token_bytes, found)).decode())


def test_a_grammar_of_open_brackets_is_refused_at_once(compiler: ConstraintCompiler) -> None:
    started = time.process_time()
    for grammar in ("root ::= " + "[" * 60_000, "root ::= " + '"' + '\\"' * 30_000):
        with pytest.raises(ConfigError):
            compiler.compile(GenerationConfig(grammar=grammar))
    assert time.process_time() - started < 10


def test_the_state_follows_the_chosen_tokens_to_the_end(compiler: ConstraintCompiler) -> None:
    a, b, x = (ids_of(compiler, letter)[0] for letter in "abx")
    constraint = constraint_of(compiler, regex="[ab]x?")
    assert allowed(constraint) == {a, b}
    constraint.advance(a)
    assert allowed(constraint) == {x, END}
    constraint.advance(x)
    assert allowed(constraint) == {END}
    constraint.advance(END)
    assert allowed(constraint) == {END}


def test_looking_ahead_changes_nothing_but_when_the_work_is_done(compiler: ConstraintCompiler) -> None:
    """For every window: one that fits, one that leaves the form, one that ends the text, and none."""
    a, b, c, x = (ids_of(compiler, letter)[0] for letter in "abcx")
    for window in ([a, b, c, x], [AB, x, c], [a, x], [ABC, x, END, x], []):
        plain, ahead = (constraint_of(compiler, regex="(abc|x){1,9}") for _ in range(2))
        for token in (ABC, a, b, c, x, AB, c):
            ahead.look_ahead(np.array(window, dtype=np.int64))
            assert allowed(ahead) == allowed(plain)
            for constraint in (plain, ahead):
                constraint.advance(token)
            window = window[1:] if window[:1] == [token] else window
        assert allowed(ahead) == allowed(plain)


def test_forced_tokens_and_allowed_ones_are_guesses_that_move_nothing(compiler: ConstraintCompiler) -> None:
    a, x = (ids_of(compiler, letter)[0] for letter in "ax")
    constraint = constraint_of(compiler, regex="x(abc){4}")
    before = allowed(constraint)
    assert constraint.forced(3)[0] == x
    assert len(constraint.forced(2)) == 2
    assert constraint.forced(0).tolist() == constraint.forced(-1).tolist() == []
    assert constraint.num_allowed(np.array([x, ABC, a, a])) == 3
    assert constraint.num_allowed(np.array([a])) == 0
    assert allowed(constraint) == before


def test_ids_that_no_word_has_never_come(compiler: ConstraintCompiler) -> None:
    assert max(allowed(constraint_of(compiler, regex="(?s:.*)"))) == THINK


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 3}])
def test_a_choice_is_the_best_of_what_may_come(compiler: ConstraintCompiler, sampling: dict) -> None:
    """Whatever the logits: the mask comes before filters and penalties, and raw log-probabilities do not know it."""
    config = GenerationConfig(regex="(abc|x)+", presence_penalty=0.5, logprobs=True, **sampling)
    constraint = compiler.compile(config)
    chooser, random = TokenChooser(config, 1, constraint), np.random.default_rng(4)
    text = [5]
    for position in range(1, 12):
        logits = random.normal(scale=3.0, size=VOCAB).astype(np.float32)
        logits[END] = -50
        assert constraint is not None
        may_come = allowed(constraint)
        token = chooser.choose(logits, position, np.array(text)).token
        assert token in may_come
        found = chooser.take_logprob(position)
        assert found is not None
        assert found.value == pytest.approx(logits[token] - np.log(np.exp(logits.astype(np.float64)).sum()), abs=1e-4)
        text.append(token)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "yes[^\\x00-\\x{10FFFF}]"}, "GenerationConfig.regex cannot be taken: there is no text that fits it"),
        ({"regex": "(["}, "GenerationConfig.regex cannot be taken: .*invalid regex"),
        ({"grammar": "start: missing"}, "GenerationConfig.grammar cannot be taken: .*unknown name"),
        ({"grammar": r'root ::= "\ud800"'}, "GenerationConfig.grammar (cannot be taken|has half of a character)"),
        ({"grammar": r'root ::= "\UFFFFFFFF"'}, "GenerationConfig.grammar cannot be taken"),
        ({"json_schema": {"type": "nonsense"}}, "GenerationConfig.json_schema cannot be taken: .*nonsense"),
        ({"json_schema": {"unevaluatedProperties": False}}, "json_schema cannot be taken: Unimplemented keys"),
        (
            {"json_schema": {"required": ["a"], "properties": {"a": False}, "type": "object"}},
            "json_schema cannot .*no value",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(compiler: ConstraintCompiler, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiler.compile(GenerationConfig(**settings))


GBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "a rule ends where the next begins": ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx", "abxx"], ["x", "ab"]),
    "a word begins like a rule": (
        'root ::= (item ",")* item\nitem ::= [a-z]+ | "the" [0-9]',
        ["thex,the1,th"],
        ["the,"],
    ),
    "codes of characters": (
        r'root ::= "\u00e9a" [\u00e0-\u00ff] "\u0022\x41" [\u005d] "\U0001F600" "\\u00e9"',
        ['éaÿ"A]\U0001f600\\u00e9'],
        ["éa"],
    ),
    "any character": ('root ::= . "a" .{2}', ["\na\n\U0001f600", "aabb"], ["a\n"]),
    "dots and roots elsewhere": (
        'root ::= "." [.] root-b "root"? # a root.\nroot-b ::= "\\"." root2\nroot2 ::= "b"',
        ['..".b', '..".broot'],
        ['..".', "xx"],
    ),
    "a rule within itself": ('root ::= "a" | "(" root ")"', ["a", "((a))"], ["(a", "()"]),
    "nothing": ("root ::= [a-z]*", ["", "ab"], ["1"]),
}


@pytest.mark.parametrize("kind", GBNF)
def test_a_grammar_of_llama_cpp_means_what_it_means_there(compiler: ConstraintCompiler, kind: str) -> None:
    grammar, good, bad = GBNF[kind]
    for text in (*good, *bad):
        constraint, is_allowed = constraint_of(compiler, grammar=grammar), True
        for token in (*(ids_of(compiler, text) if text else []), END):
            is_allowed = is_allowed and bool(constraint.allowed(VOCAB)[token])
            if is_allowed:
                constraint.advance(token)
        assert is_allowed == (text in good), text


def test_without_the_package_the_error_names_what_installs_it(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'regex needs the package llguidance: pip install "mirrorsd\[server\]"'):
        compiler.compile(GenerationConfig(regex="a"))


def test_a_model_without_an_end_cannot_end_a_form(compiler: ConstraintCompiler) -> None:
    endless = ConstraintCompiler(compiler._tokenizer, VOCAB, (), CONTEXT)
    with pytest.raises(ConfigError, match="regex needs a model with an end-of-sequence token"):
        endless.compile(GenerationConfig(regex="a"))


def test_a_vocabulary_that_is_smaller_than_the_tokenizer_is_cut(compiler: ConstraintCompiler) -> None:
    small = ConstraintCompiler(compiler._tokenizer, 200, (END,), CONTEXT)
    constraint = small.compile(GenerationConfig(regex="abc"))
    assert constraint is not None
    assert constraint.allowed(200).shape == (200,)
