"""Texts of a given form: a JSON schema, a regular expression or a grammar says which tokens may come next.

The work is llguidance's (`pip install "mirrorsd[server]"`). What may come depends on the text before, so that the state
follows the tokens that the target has chosen, one by one, and every method comes to the same text. Rows of a window are
looked at ahead, while the devices work, and the state is rolled back.
"""

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import ConfigError, GenerationError
from mirrorsd.texts.config import CONSTRAINTS, GenerationConfig
from mirrorsd.texts.finite_schema import finite_schema
from mirrorsd.texts.tokenizer import BundleTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WORD_BITS = 32
_GBNF = re.compile(r"(?m)^\s*root\s*::=")
_ALONE = "\x02"
_GBNF_PIECE = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#.*|\.|[\w-]+')
"""A text in quotes, a class of characters, a comment, any character, or a name."""
_GBNF_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
_MOST_RULES = 256
"""Of a grammar in GBNF: translating it takes time with the square of them, a quarter of a second for so many."""
_LONGEST_REASON = 300
"""Characters of llguidance's errors, which show a grammar's line, however long it is."""


class Constraint:
    """Follows one text: what may come next. See `sampling.chooser.Mask`. Not thread-safe."""

    def __init__(self, matcher: "LLMatcher", num_words: int) -> None:
        """Take a matcher whose masks have `num_words` bits: at least one for each of the target's logits."""
        self._matcher, self._num_words = matcher, num_words
        self._ahead: list[NDArray[np.bool_]] = []  # what may come now, after the window's first token, ...
        self._window: list[int] = []

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may come now, `[V]`."""
        if not self._ahead:
            self._ahead = [self._look()]
        return self._ahead[0][:vocab_size]

    def look_ahead(self, window: NDArray[np.int64]) -> None:
        """Work out what may come now and after each token of a window, up to the first that may not come.

        Where the grammar allows `a b` and then anything, a window `a c d` is looked at for the first two rows: what
        comes after `c` is never asked, since the target cannot choose it.
        """
        self._window = window.tolist()
        self._ahead, num_consumed = [self._look()], 0
        for token in self._window:
            if not self._ahead[-1][token] or not self._matcher.try_consume_tokens([token]):
                break
            num_consumed += 1
            self._ahead.append(self._look())
        if num_consumed:
            self._matcher.rollback(num_consumed)
        self._check()

    def advance(self, token: int) -> None:
        """The text goes on with this token.

        Raises:
            GenerationError: the constraint's own limits are reached.
        """
        self._matcher.consume_token(token)
        self._check()
        is_expected = bool(self._window) and self._window[0] == token
        self._window, self._ahead = (self._window[1:], self._ahead[1:]) if is_expected else ([], [])

    def forced(self, most: int) -> NDArray[np.int64]:
        """The next tokens, at most so many, where there is one way on: a guess, since it may be spelled otherwise."""
        return np.array(self._matcher.compute_ff_tokens()[: max(most, 0)], dtype=np.int64)

    def num_allowed(self, window: NDArray[np.int64]) -> int:
        """How many of a window's leading tokens may come: what follows them could not be accepted."""
        return self._matcher.validate_tokens(window.tolist())

    def _look(self) -> NDArray[np.bool_]:
        words = np.zeros(-(-self._num_words // _WORD_BITS), dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"The constrained text cannot go on: {_reason(self._matcher)}")


class ConstraintCompiler:
    """Makes the constraints of one vocabulary; what that costs, about a second, is paid by the first one."""

    def __init__(self, tokenizer: BundleTokenizer, vocab_size: int, eos_ids: tuple[int, ...], context: int) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._context = context
        self._words: LLTokenizer | None = None

    def compile(self, config: GenerationConfig) -> Constraint | None:
        """The constraint that a request wants; None where it wants none.

        Raises:
            ConfigError: llguidance is not installed, the bundle names no end of a text, or the schema, expression or
                grammar is none that it takes, or that no text fits.
        """
        field = next((name for name in CONSTRAINTS if getattr(config, name) is not None), None)
        if field is None:
            return None
        if not self._eos_ids:
            raise ConfigError(f"GenerationConfig.{field} needs a model with an end-of-sequence token, to end the text.")
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError as error:
            raise ConfigError(
                f'GenerationConfig.{field} needs the package llguidance: pip install "mirrorsd[server]".'
            ) from error
        words = self._read_words()
        read: dict[str, Callable[[str], str]] = {
            "json_schema": lambda text: LLMatcher.grammar_from_json_schema(
                json.dumps(finite_schema(json.loads(text), self._context))
            ),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": lambda text: LLMatcher.grammar_from_lark(_as_lark(text)),
        }
        limits = LLParserLimits(verbose_errors=False)
        try:
            matcher = LLMatcher(words, read[field](getattr(config, field)), log_level=0, limits=limits)
        except UnicodeEncodeError as error:
            raise ConfigError(f"GenerationConfig.{field} has half of a character: {error.reason}.") from error
        except ConfigError as error:
            raise ConfigError(str(error).replace("The JSON schema", f"GenerationConfig.{field}", 1)) from error
        if matcher.is_error():
            raise ConfigError(f"GenerationConfig.{field} cannot be taken: {_reason(matcher)}")
        constraint = Constraint(matcher, words.vocab_size)
        try:
            constraint.look_ahead(np.zeros(0, np.int64))
        except GenerationError as error:
            raise ConfigError(f"GenerationConfig.{field} cannot be taken: there is no text that fits it.") from error
        return constraint

    def prepare(self) -> None:
        """Pay what the first constrained text would: nothing else of the program runs meanwhile."""
        if self._eos_ids and find_spec("llguidance") is not None:
            self._read_words()

    def _read_words(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._words is None:
            vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            try:
                self._words = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(self._eos_ids))
            except ValueError as error:
                raise ConfigError(f"llguidance cannot read this bundle's tokenizer ({error}).") from error
        return self._words


class _Vocabulary:
    """Tokens as llguidance asks for them: special are those that end a text or are left out of what is shown.

    Of a `tokenizer.json` it takes every added token in angle brackets for special, which text then cannot have: Qwen's
    `<think>` and `<tool_call>`, for example.
    """

    bos_token_id = None

    def __init__(self, tokenizer: BundleTokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(max(vocab_size, tokenizer.vocab_size))]
        self.special_token_ids = sorted({*tokenizer.special_tokens.values(), *eos_ids})

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text behind a character that merges with nothing: before a first word some put a space."""
        behind = _ALONE + (text if isinstance(text, str) else text.decode())
        first, ids = (self._tokenizer.encode(one, add_special_tokens=False) for one in (_ALONE, behind))
        return ids[len(first) :]


def _reason(matcher: "LLMatcher") -> str:
    """Why a matcher has failed."""
    reason = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's notation; one in llama.cpp's GBNF, which has a rule `root`, is translated.

    llguidance reads a rule that never comes back to itself as one expression, as far as it goes, but not the root: with
    `word ::= [a-z]+` the root `word "s"` would have no end. So the root gets another name, and is such a rule as well.

    >>> _as_lark('root ::= "yes" | "no"').split()[-6:]
    ['start:', 'ROOT_21', 'ROOT_21:', '"yes"', '|', '"no"']
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not _GBNF.search(grammar):
        return grammar
    if grammar.count("::=") > _MOST_RULES:
        raise ConfigError(f"GenerationConfig.grammar has more than {_MOST_RULES} rules; write it in Lark's notation.")
    root = f"root-{len(grammar)}"
    try:
        return str(
            gbnf_to_lark(f"root ::= {root}\n" + _GBNF_PIECE.sub(lambda piece: _rewritten(piece[0], root), grammar))
        )
    except Exception as error:  # its own errors, bare ones, and those of its recursion
        raise ConfigError(f"GenerationConfig.grammar cannot be taken: {str(error)[:_LONGEST_REASON]}") from error


def _rewritten(piece: str, root: str) -> str:
    """A piece of GBNF with this name of its root, line ends among "any character", and characters for their codes."""
    if piece == ".":
        return f"[\\x00-{chr(sys.maxunicode)}]"
    return root if piece == "root" else _GBNF_CODE.sub(_character, piece)


def _character(found: re.Match[str]) -> str:
    """The character of a code of four or eight digits, whose zeros llguidance would cut; other escapes as they are."""
    if found.lastindex is None:
        return found[0]
    code = int(found[found.lastindex], 16)
    return chr(code) if code > 0x7F else f"\\x{code:02x}"
