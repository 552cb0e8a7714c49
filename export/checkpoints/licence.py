"""Which licence a checkpoint's folder says that it has.

Owns: where that is said: the model card's front matter, else the words of a licence's text. Does not own: which files
travel with a bundle (`carried_files.py`), what a GGUF file says (`gguf_file.py`).
"""

import re
from pathlib import Path

_MARKS = {"Apache License": "Apache-2.0", "MIT License": "MIT", "BSD 3-Clause": "BSD-3-Clause"}
_TEXTS = ("LICENSE*", "LICENCE*")
_FRONT = re.compile(r"---[ \t]*\r?\n(.*?)\n---", re.DOTALL)
_LINE = re.compile(r"^license:[ \t]*(?P<here>[^\r\n]*)(?P<items>(?:\r?\n(?:[ \t]*-)?[ \t]+[^\r\n]*)*)", re.MULTILINE)
_NOTHING = ("~", "null")
_FOLDED = (">", ">-", "|", "|-")
"""What stands in place of a word that comes in the next line."""
_ITEM = re.compile(r"^(?:[ \t]*-)?[ \t]+(.*)", re.MULTILINE)


def find_licence(folder: Path) -> str:
    """SPDX ids from the model card or the text of a licence, several with a comma between them; else "unknown"."""
    card = folder / "README.md"
    if card.is_file() and (named := licences_in(card.read_text(encoding="utf-8", errors="replace"))):
        return ", ".join(named)
    for path in (path for pattern in _TEXTS for path in sorted(folder.glob(pattern)) if path.is_file()):
        text = path.read_text(encoding="utf-8", errors="replace")
        for mark, licence in _MARKS.items():
            if mark in text:
                return licence
    return "unknown"


def licences_in(card: str) -> list[str]:
    r"""What the front matter of a model card has as `license`: one word, a list in a line or a list of lines.

    >>> licences_in("---\nlicense: mit # as before\n---"), licences_in("---\nlicense:\n- apache-2.0\n- mit\n---")
    (['mit'], ['apache-2.0', 'mit'])
    >>> licences_in("---\nlicense: ['mit']\n---"), licences_in("---\nlicense:\nlanguage: en\n---")
    (['mit'], [])
    >>> licences_in("---\nlicense: >-\n  apache-2.0\n---")
    ['apache-2.0']
    """
    front = _FRONT.match(card)
    found = _LINE.search(front[1]) if front else None
    if found is None:
        return []
    here = "" if _plain(found["here"]) in _FOLDED else _plain(found["here"])
    given = here.strip("[]").split(",") if here else _ITEM.findall(found["items"])
    return [word for word in (_plain(one).strip("\"'") for one in given) if word and word not in _NOTHING]


def _plain(text: str) -> str:
    """Without a comment and the space around it."""
    return re.sub(r"(^|[ \t])#.*", "", text).strip()
