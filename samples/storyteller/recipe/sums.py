"""Make small sums with their answers."""

from __future__ import annotations

import random

QUESTIONS = ("What is {}?", "How much is {}?", "Work out {}.", "{} = ?")
STORIES = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", "+"),
    ("{name} has {a} {things} and gives {b} away. How many {things} are left?", "-"),
    ("There are {a} baskets with {b} {things} in each. How many {things} are there?", "*"),
)
NAMES = ("Anna", "Tom", "Lily", "Ben", "Rose", "Jack", "Mary", "Sam")
THINGS = ("apples", "pears", "nuts", "eggs", "buttons", "coins", "stones", "cakes")


def make_sum(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer, both as text.

    For example `("What is 23 + 45?", "23 + 45 = 68.")`.
    """
    sign = rng.choice("++--*")
    largest = rng.choice((10, 20, 100)) if sign != "*" else 12
    left, right = rng.randint(1, largest), rng.randint(1, largest)
    if sign == "-" and left < right:
        left, right = right, left
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    answer = f"{left} {sign} {right} = {result}."
    if rng.random() < 0.3:
        story = next(text for text, its_sign in STORIES if its_sign == sign)
        things = rng.choice(THINGS)
        question = story.format(name=rng.choice(NAMES), things=things, a=left, b=right)
        return question, f"{answer} The answer is {result} {things}."
    return rng.choice(QUESTIONS).format(f"{left} {sign} {right}"), answer
