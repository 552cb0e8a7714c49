"""A regular expression made finite: every text that it matches ends.

Owns: how often what a pattern repeats without a bound may come, and how much may stand beside a pattern that has no
anchors. Does not own: what a pattern means, which is llguidance's; a pattern that cannot be read here is left to it.

>>> finite_pattern("^[a-z]+$", 64)
'^(?:[a-z]{1,64})$'
>>> finite_pattern("_id$|^x", 64)
'^(?:(?s:.){0,64}_id|x(?s:.){0,64})$'
>>> finite_pattern("^([a-z]+[.])*$", 64)
'^(?:([a-z]{1,8}[.]){0,64})$'
"""

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from math import isqrt

_OPENING = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?")
_ATOM = re.compile(r"\\[pPxu]\{[^}]*\}|\\.|\(\?[a-zA-Z-]+\)|[^\\()\[\]|]", re.DOTALL)
_TIMES = re.compile(r"\{(\d+),\}")
_REPEATED = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})+")
_BEGINNINGS, _ENDS = ("^", r"\A"), ("$", r"\z")


@dataclass
class _Part:
    """A piece of a pattern with what says how often it comes; a group has alternatives, each a list of parts."""

    text: str
    times: str = ""
    alternatives: list[list["_Part"]] = field(default_factory=list)


class _UnreadableError(Exception):
    """Not a pattern as it is read here."""


def any_text(most: int, names: Iterable[str] = ()) -> str:
    r"""The pattern of any text that is not empty, and none of these names.

    >>> any_text(64), any_text(3, ["ab"])
    ('^(?s:.){1,64}$', '^(?:[^\\x{61}](?s:.){0,2}|\\x{61}(?:[^\\x{62}](?s:.){0,1}|\\x{62}(?s:.){1,1})?)$')
    """
    return f"^{_unlike({'', *(name for name in names if len(name) <= most)}, most)}$"


def _unlike(names: Set[str], most: int) -> str:
    """A pattern of texts of so many characters that are none of these names."""
    rests: dict[str, set[str]] = {}
    for name in filter(None, names):
        rests.setdefault(name[0], set()).add(name[1:])
    if not rests:
        return f"(?s:.){{1,{most}}}"
    codes = {first: f"\\x{{{ord(first):x}}}" for first in rests}
    found = [f"[^{''.join(codes.values())}](?s:.){{0,{most - 1}}}"]
    found += [codes[first] + _unlike(rest, most - 1) for first, rest in rests.items() if most > 1]
    return f"(?:{'|'.join(found)}){'' if '' in names else '?'}"


def finite_pattern(pattern: str, most: int) -> str:
    """The pattern with at most so many repetitions of whatever it repeats without a bound, and anchored at both ends.

    Within what is repeated the root of that many are allowed.

    Args:
        pattern: a regular expression that may match anywhere in a text, as in a JSON schema.
        most: see there.
    """
    try:
        read, end = _alternatives(pattern, 0)
    except _UnreadableError:
        return pattern
    if end < len(pattern):
        return pattern
    return f"^(?:{_joined(read, most, is_first=True, is_last=True)})$"


def _alternatives(pattern: str, place: int) -> tuple[list[list[_Part]], int]:
    """What stands up to the end or the closing parenthesis, and where that is."""
    found: list[list[_Part]] = [[]]
    while place < len(pattern) and pattern[place] != ")":
        if pattern[place] == "|":
            found.append([])
            place += 1
            continue
        part, place = _part(pattern, place)
        times = _REPEATED.match(pattern, place)
        if times:
            part.times, place = times[0], times.end()
        found[-1].append(part)
    return found, place


def _part(pattern: str, place: int) -> tuple[_Part, int]:
    if pattern[place] == "[":
        end = _end_of_class(pattern, place)
        return _Part(pattern[place:end]), end
    if atom := _ATOM.match(pattern, place):
        return _Part(atom[0]), atom.end()
    opening = _OPENING.match(pattern, place)
    if opening is None:
        raise _UnreadableError
    alternatives, end = _alternatives(pattern, opening.end())
    if end == len(pattern):
        raise _UnreadableError
    return _Part(opening[0], alternatives=alternatives), end + 1


def _end_of_class(pattern: str, place: int) -> int:
    """Behind the bracket that closes a class; classes may stand in classes, and one that comes first is a letter."""
    place += 2 if pattern.startswith("[^", place) else 1
    first = place
    while place < len(pattern):
        letter = pattern[place]
        if letter == "]" and place > first:
            return place + 1
        place = _end_of_class(pattern, place) if letter == "[" else place + (2 if letter == "\\" else 1)
    raise _UnreadableError


def _joined(alternatives: Sequence[list[_Part]], most: int, *, is_first: bool, is_last: bool) -> str:
    """The alternatives as text; anything may stand before the first part and behind the last one, without an anchor."""
    return "|".join(_anchored(parts, most, is_first=is_first, is_last=is_last) for parts in alternatives)


def _anchored(parts: list[_Part], most: int, *, is_first: bool, is_last: bool) -> str:
    flags = list(takewhile(lambda part: part.text.startswith("(?") and not part.alternatives, parts))
    rest = parts[len(flags) :]
    has_begun, has_ended = not is_first, not is_last
    while is_first and rest and rest[0].text in _BEGINNINGS:
        has_begun, rest = True, rest[1:]
    while is_last and rest and rest[-1].text in _ENDS:
        has_ended, rest = True, rest[:-1]
    asks = [not has_begun and number == 0 and _has_anchor(part) for number, part in enumerate(rest)]
    asks_back = [not has_ended and number == len(rest) - 1 and _has_anchor(part) for number, part in enumerate(rest)]
    around = f"(?s:.){{0,{most}}}"
    said = "".join(
        _text(part, most, is_first=first, is_last=last) for part, first, last in zip(rest, asks, asks_back, strict=True)
    )
    before = "" if has_begun or any(asks) else around
    behind = "" if has_ended or any(asks_back) else around
    return "".join(part.text for part in flags) + before + said + behind


def _text(part: _Part, most: int, *, is_first: bool, is_last: bool) -> str:
    times = _TIMES.sub(lambda found: f"{{{found[1]},{max(most, int(found[1]))}}}", part.times)
    times = re.sub(r"[*+](?!\})", lambda found: f"{{{int(found[0] == '+')},{most}}}", times)
    if not part.alternatives:
        return part.text + times
    within = max(isqrt(most), 2) if times != part.times else most
    return f"{part.text}{_joined(part.alternatives, within, is_first=is_first, is_last=is_last)}){times}"


def _has_anchor(part: _Part) -> bool:
    """Whether a group that comes once has an anchor of its own."""
    return not part.times and any(inner.text in (*_BEGINNINGS, *_ENDS) for inner in _within(part))


def _within(part: _Part) -> Iterator[_Part]:
    for parts in part.alternatives:
        for inner in parts:
            yield inner
            yield from _within(inner)
