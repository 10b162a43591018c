"""Word problems of two steps with their derivations, as a file for the environment `questions`.

    python -m benchmarks.word_problems > questions.jsonl
    ragen-apo train --config configs/questions_smollm2.yaml --run-dir runs/mine

1,500 problems of five kinds, the same ones each time. What was measured on them: docs/log.md, "Does
A*-PO learn questions with checked answers?".
"""

import json
import random
from collections.abc import Iterator

NUMBER = 1500
NAMES = ("Ben", "Ana", "Omar", "Lily", "Hugo", "Mei", "Sara", "Tom", "Ines", "Raj", "Nora", "Finn")
THINGS = (
    *("shells", "apples", "books", "marbles", "stamps"),
    *("cards", "coins", "pencils", "flowers", "stickers"),
)


def loses(draw: random.Random) -> tuple[str, str, int]:
    """Some are found, some are given away."""
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    has, finds = draw.randint(5, 60), draw.randint(3, 40)
    gives = draw.randint(1, has + finds - 1)
    question = (
        f"{name} has {has} {things}, finds {finds} more and gives {gives} away. How many {things} "
        f"has {name} now?"
    )
    total = has + finds
    return (
        question,
        f"{has} + {finds} = {total}\n{total} - {gives} = {total - gives}",
        total - gives,
    )


def boxes(draw: random.Random) -> tuple[str, str, int]:
    """Boxes of equal size, and some more."""
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    number, size, had = draw.randint(2, 9), draw.randint(3, 15), draw.randint(1, 30)
    question = (
        f"{name} buys {number} boxes with {size} {things} each. {name} already had {had} {things}. "
        "How many are there in all?"
    )
    bought = number * size
    return (
        question,
        f"{number} * {size} = {bought}\n{bought} + {had} = {bought + had}",
        bought + had,
    )


def shares(draw: random.Random) -> tuple[str, str, int]:
    """Two bags, shared equally."""
    things = draw.choice(THINGS)
    children, each = draw.randint(2, 9), draw.randint(2, 12)
    total = children * each
    one = draw.randint(1, total - 1)
    question = (
        f"Two bags hold {one} and {total - one} {things}. {children} children share all of them "
        f"equally. How many {things} does each child get?"
    )
    return question, f"{one} + {total - one} = {total}\n{total} / {children} = {each}", each


def money(draw: random.Random) -> tuple[str, str, int]:
    """What is left after buying some."""
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    price, number = draw.randint(2, 9), draw.randint(2, 9)
    paid, has = price * number, price * number + draw.randint(1, 40)
    question = (
        f"{name} has {has} dollars and buys {number} {things} for {price} dollars each. How many "
        "dollars are left?"
    )
    return question, f"{number} * {price} = {paid}\n{has} - {paid} = {has - paid}", has - paid


def twice(draw: random.Random) -> tuple[str, str, int]:
    """One has a multiple of what the other has."""
    name, other = draw.sample(NAMES, 2)
    things = draw.choice(THINGS)
    times, has = draw.randint(2, 5), draw.randint(3, 25)
    question = (
        f"{name} has {has} {things}. {other} has {times} times as many. How many {things} have "
        "they together?"
    )
    more = times * has
    return question, f"{times} * {has} = {more}\n{has} + {more} = {has + more}", has + more


def problems() -> Iterator[dict[str, str]]:
    """The rows of the file."""
    draw, seen = random.Random(7), set()
    while len(seen) < NUMBER:
        kind = draw.choice((loses, boxes, shares, money, twice))
        question, derivation, answer = kind(draw)
        if question not in seen:
            seen.add(question)
            row = {"question": question, "answer": f"{derivation}\n#### {answer}"}
            yield {**row, "category": kind.__name__}


if __name__ == "__main__":
    for problem in problems():
        print(json.dumps(problem))
