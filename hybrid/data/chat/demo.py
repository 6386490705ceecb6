"""A small task the project makes itself: sums, answered in a fixed JSON form."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hybrid.data.chat.rows import Row

DEMO_ROWS = 512
_QUESTIONS = ("What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "How much is {a} and {b} together?")


def demo_rows(count: int = DEMO_ROWS, seed: int = 0) -> Iterator[Row]:
    """Rows of the `messages` format, the same on every machine."""
    draw = random.Random(seed)
    for number in range(1, count + 1):
        a, b = draw.randrange(10), draw.randrange(10)
        question = draw.choice(_QUESTIONS).format(a=a, b=b)
        answer = f'{{"a": {a}, "b": {b}, "sum": {a + b}}}'
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield Row(f"demo: row {number}", {"messages": messages})
