"""Prompts that no package has to provide: generated word problems, and open questions written for this file.

The numbers of the problems come from `EVALUATION_SEED`, which training data never uses; neither the stories nor the
questions are in the training prompts.
"""

from __future__ import annotations

import random

from ..training.prompt_mixture import EVALUATION_SEED

NAMES = ("Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kofi", "Leila")
ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# {n} and {m} are names; a to d are small whole numbers, h is a round hundred.
STORIES = (
    "{n} runs a bakery and fills {a} trays with {b} rolls each. By noon {c} rolls are sold. How many rolls are left?",
    "A train has {a} carriages with {b} seats each. {c} seats are taken at the first stop and {d} more at the second. "
    "How many seats are still free?",
    "{n} saves {a} euros a week and {m} saves {b} euros a week. After {d} weeks they buy a tent for {h} euros. "
    "How much money do they have left, or how much are they short of?",
    "A tank holds {h} litres. A pump fills it with {a} litres a minute while {d} litres a minute leak away. How many "
    "litres are in the tank after {b} minutes if it was empty at the start?",
    "{n} reads {a} pages on Monday and {d} pages more on each following day. How many pages has {n} read by the end "
    "of the fifth day?",
    "A farmer plants {a} rows of {b} apple trees. Every tree bears {c} apples, but one row is lost to frost. How many "
    "apples are harvested?",
    "The tickets for a concert cost {a} euros for adults and {d} euros for children. {n} sells {b} adult tickets and "
    "{c} child tickets. How much money is taken?",
    "{n} and {m} paint a fence of {h} metres. {n} paints {a} metres an hour and {m} paints {b} metres an hour. How "
    "long do they need if they work together?",
    "A rectangle is {a} metres long and {b} metres wide. A path {d} metres wide runs around it. What is the area of "
    "the path?",
    "{n} buys {a} notebooks for {d} euros each and pays with a note of {h} euros. How much change does {n} get?",
)

TOPICS = (
    "why lakes freeze from the top", "how a sewing machine makes a stitch", "what a lighthouse keeper used to do",
    "how bread rises", "why the moon always shows the same side", "how a canal lock lifts a boat",
    "what causes an echo in the mountains", "how bees decide where to build a new nest",
    "why old paper turns yellow", "how a piano differs from a harpsichord", "what makes a good compost heap",
    "how sailors found their position before satellites", "why some metals rust and others do not",
    "how a library decides which books to keep", "what happens inside a volcano before it erupts",
    "how the pitch of a drum can be changed",
)  # fmt: skip
REQUESTS = (
    "Explain {topic}.",
    "Write three short paragraphs on {topic}.",
    "A child wants to know {topic}. What do you answer?",
    "List the five most important points about {topic}, and say for each why it matters.",
)


def maths_rows(count: int = 200) -> list[dict[str, str]]:
    """Word problems, the same ones on every machine."""
    rng = random.Random(EVALUATION_SEED)
    rows = []
    for number in range(count):
        n, m = rng.sample(NAMES, 2)
        small = {
            name: rng.randint(*limits) for name, limits in zip("abcd", ((6, 24), (8, 40), (3, 9), (2, 5)), strict=True)
        }
        story = STORIES[number % len(STORIES)].format(n=n, m=m, h=100 * rng.randint(2, 12), **small)
        rows.append({"prompt": story + ASK})
    return rows


def question_rows() -> list[dict[str, str]]:
    """Open questions."""
    return [{"prompt": request.format(topic=topic)} for topic in TOPICS for request in REQUESTS]


__all__ = ["maths_rows", "question_rows"]
