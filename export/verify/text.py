"""The text that parity is measured on, written for this project, and turning it into ids.

Owns: the text. Does not own: comparing anything.
"""

from pathlib import Path

from tokenizers import Tokenizer

from mirrorsd.graphs.errors import ConfigError

BUILT_IN = "built-in"

PARITY_TEXT = """\
The lighthouse keeper had counted the same steps every evening for nineteen years: one hundred and forty-four up, the \
lamp, the log-book, and one hundred and forty-four down. "A dozen dozens," she liked to say to visitors, "so that even \
my knees can do the sum." On the last Tuesday of March, however, there was one step more. She stopped with a hand on \
the cold wall and went back to the bottom, counting aloud this time, and again the lamp came a step too late.

Nobody believes a person who counts stairs. The baker smiled, the doctor asked whether she slept well, and the \
engineer from the town wrote a friendly letter: "Dear Mrs. Holm, a tower may sink by 2.5 mm a year, but it does not \
grow." So she painted a small number on each step, in white, from 1 to 144, and waited. By Friday a bare grey step had \
appeared between 71 and 72. It was a little warm, like a stone that has lain in the sun, and when she put her ear to \
it she heard, very far away, somebody else walking up.

What would you have done? She made tea, two cups, carried them to the seventy-first step and sat down. "I have kept \
this light through forty storms," she told the step, "and I can keep it through a neighbour." After a while the second \
cup was empty. From then on the log-book has two handwritings: one tall and tidy, one small and slanting to the left. \
The first writes down wind, weather and ships; the second writes only, night after night, in the same three words: \
light still burning.

def steps(tower):
    painted = [step for step in tower if step.number is not None]
    return len(painted), len(tower) - len(painted)

Ships that pass have noticed that the lamp now turns a little more slowly, as if two people were pushing it and \
neither were in a hurry.
"""


def parity_ids(tokenizer_file: Path, text: str | None, num_ids: int) -> tuple[list[int], str]:
    """Tokenise `text` (None: the built-in one), repeated or cut to exactly `num_ids` ids.

    Returns:
        The ids, and what to call the text in the manifest.

    Raises:
        ConfigError: it has no tokens.
    """
    ids, called = text_ids(tokenizer_file, text)
    repeated = ids * -(-num_ids // len(ids))
    return repeated[:num_ids], called


def text_ids(tokenizer_file: Path, text: str | None) -> tuple[list[int], str]:
    """Tokenise `text` (None: the built-in one) as it is; also what to call it in the manifest.

    Raises:
        ConfigError: it has no tokens.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(PARITY_TEXT if text is None else text, add_special_tokens=False).ids
    if not ids:
        raise ConfigError("the text to compare on has no token in it; give another one, or none for the built-in one")
    return ids, BUILT_IN if text is None else "given"
