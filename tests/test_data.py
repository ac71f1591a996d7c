"""`dflash-hf data` from prompts to shards: what is stored, resuming after a kill, rows set aside, and bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from filelock import FileLock

from data_helpers import (
    EOS,
    TEXTS,
    arguments,
    chat_target,
    command,
    failures_of,
    manifest_of,
    plain_answer,
    read_output,
    run_data,
    save_chat_target,
    write_jsonl,
)
from dflash_hf.training import data
from dflash_hf.training.sequences import load_sequences
from evaluation_helpers import tiny_tokenizer
from helpers import ROOT, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text, "kind": "words"} for text in TEXTS[:10]])


def chat_ids(messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
    encoded = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **kwargs)
    return list(encoded["input_ids"])


def test_rows_are_the_templates_prompt_and_the_targets_own_answer(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out")
    rows = read_output(tmp_path / "out")
    model = chat_target()
    assert len(rows) + len(failures_of(tmp_path / "out")) == 10
    for row in rows:
        prompt = chat_ids([{"role": "user", "content": TEXTS[row["row"]]}], enable_thinking=False)
        answer = plain_answer(model, prompt, 20)
        assert row["prompt_length"] == len(prompt)
        assert row["input_ids"] == prompt + answer
        assert row["finish_reason"] == ("stop" if answer[-1] == EOS else "length")
        assert row["kind"] == "words"
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_manifest_tells_how_the_data_was_made(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out", "--thinking", "unset", "--chat-template-kwargs", '{"x": 1}')
    manifest = manifest_of(tmp_path / "out")
    rows = read_output(tmp_path / "out")
    assert manifest["complete"] is True
    assert manifest["target"]["name"] == target
    assert manifest["generation"]["chat_template_kwargs"] == {"x": 1}
    assert manifest["generation"]["thinking"] == "unset"
    assert manifest["generation"]["temperature"] == 0
    assert manifest["counts"]["shards"] == 3
    assert manifest["counts"]["sequences"] == len(rows)
    assert manifest["counts"]["failures"] == 10 - len(rows)
    assert manifest["counts"]["prompt_tokens"] == sum(row["prompt_length"] for row in rows)
    assert manifest["counts"]["response_tokens"] == sum(len(row["input_ids"]) - row["prompt_length"] for row in rows)


def test_trainer_reads_what_is_written(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out")
    rows = load_sequences(tmp_path / "out")
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in read_output(tmp_path / "out")]


def test_thinking_mode_changes_the_prompt_and_the_revision_tells_targets_apart(target: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w8 w20"}])
    run_data(source, target, tmp_path / "off")
    run_data(source, target, tmp_path / "unset", "--thinking", "unset")
    off, unset = (manifest_of(tmp_path / name) for name in ("off", "unset"))
    assert off["target"] == unset["target"] and off["generation"]["chat_template_kwargs"] == {"enable_thinking": False}
    w9 = tiny_tokenizer().convert_tokens_to_ids("w9")
    prompts = [read_output(tmp_path / name)[0] for name in ("off", "unset")]
    assert [w9 in row["input_ids"][: row["prompt_length"]] for row in prompts] == [True, False]

    other = tmp_path / "other"
    tiny_target("llama", seed=5).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    run_data(source, str(other), tmp_path / "elsewhere")
    assert manifest_of(tmp_path / "elsewhere")["target"]["revision"] != off["target"]["revision"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_conversations_keep_their_turns_and_lose_a_closing_answer(suffix: str, target: str, tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "w30"},
        {"role": "user", "content": "w8 w9"},
        {"role": "assistant", "content": "w40"},
        {"role": "user", "content": "w10"},
    ]
    rows = Dataset.from_list(
        [{"messages": turns}, {"messages": [*turns, {"role": "assistant", "content": "w50 w51"}]}]
    )
    source = str(tmp_path / f"chats.{suffix}")
    rows.to_parquet(source) if suffix == "parquet" else rows.to_json(source)
    run_data(source, target, tmp_path / "out")
    one, two = read_output(tmp_path / "out")
    assert one["input_ids"][: one["prompt_length"]] == chat_ids(turns, enable_thinking=False)
    assert one["input_ids"] == two["input_ids"]


def test_killed_run_resumes_with_no_row_lost_or_doubled(target: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS])
    more = ["--max-new-tokens", "60", "--temperature", "0.8", "--batch-size", "2"]
    run_data(source, target, tmp_path / "whole", *more)
    shards = sorted(path.name for path in (tmp_path / "whole").glob("shard-*"))

    out = tmp_path / "killed"
    program = [sys.executable, "-m", "dflash_hf.training.data", *command(source, target, out, *more)]
    process = subprocess.Popen(program, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    while len(list(out.glob("shard-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = sorted(path.name for path in out.glob("shard-*"))
    assert 2 <= len(done) < len(shards)
    kept = {name: (out / name).stat().st_mtime_ns for name in done}

    run_data(source, target, out, *more)
    assert sorted(path.name for path in out.glob("shard-*")) == shards
    assert read_output(out) == read_output(tmp_path / "whole")
    assert failures_of(out) == failures_of(tmp_path / "whole")
    assert manifest_of(out)["counts"] == manifest_of(tmp_path / "whole")["counts"]
    assert {name: (out / name).stat().st_mtime_ns for name in done} == kept
    assert not list(out.glob(".*partial"))


def test_finished_run_repeats_without_loading_the_target(
    prompts: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_data(prompts, target, tmp_path / "out")
    before = manifest_of(tmp_path / "out")
    monkeypatch.setattr(data, "_load_model", lambda *args: pytest.fail("loaded"))
    run_data(prompts, target, tmp_path / "out")
    assert manifest_of(tmp_path / "out") == before


def test_resuming_with_another_setting_is_refused_by_its_name(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out")
    before = read_output(tmp_path / "out")
    with pytest.raises(ValueError, match=r"generation\.temperature=0\.0 .* 0\.7"):
        run_data(prompts, target, tmp_path / "out", "--temperature", "0.7")
    other = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS[1:11]])
    with pytest.raises(ValueError, match=r"input\.sha256"):
        run_data(other, target, tmp_path / "out")
    assert read_output(tmp_path / "out") == before


def test_moved_prompt_file_continues_the_same_folder(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out")
    moved = tmp_path / "elsewhere.jsonl"
    Path(prompts).rename(moved)
    run_data(str(moved), target, tmp_path / "out")


def test_second_run_in_the_same_folder_is_refused(prompts: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".writing.lock"), pytest.raises(ValueError, match="another run is writing"):
        run_data(prompts, target, tmp_path / "out")


def test_damaged_shard_is_refused_with_its_name(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out")
    expected = read_output(tmp_path / "out")
    shard = tmp_path / "out" / "shard-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"shard-00001\.parquet is not a readable shard .* delete it"):
        run_data(prompts, target, tmp_path / "out")
    shard.unlink()
    run_data(prompts, target, tmp_path / "out")
    assert read_output(tmp_path / "out") == expected


def test_rows_that_cannot_be_used_are_set_aside_with_the_reason(target: str, tmp_path: Path) -> None:
    user = {"role": "user", "content": "w8 w20"}
    rows = [
        {"messages": [user]},
        {"prompt": ""},
        {"messages": []},
        {"messages": [user, {"role": "wizard", "content": "w9"}]},
        {"messages": [{"role": "assistant", "content": "w9"}]},
        {"prompt": " ".join(["w8"] * 60)},
        {"prompt": "w8 w21"},
        {"messages": [{"role": "user", "content": " "}]},
    ]
    source = write_jsonl(tmp_path / "p.jsonl", rows)
    run_data(source, target, tmp_path / "out", "--max-prompt-tokens", "50")
    failures = failures_of(tmp_path / "out")
    assert [row["row"] for row in read_output(tmp_path / "out")] == [0, 6]
    assert sorted(failures) == [1, 2, 3, 4, 5, 7]
    assert "not a text" in failures[1]
    assert "no turn to answer" in failures[2] and "no turn to answer" in failures[4]
    assert "'wizard'" in failures[3]
    assert "63 tokens, more than max_prompt_tokens=50" in failures[5]
    assert manifest_of(tmp_path / "out")["counts"]["failures"] == 6


def test_template_that_raises_fails_its_row_only(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "strict"
    chat_target().save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if 'w13' in messages[0]['content'] %}{{ raise_exception('no w13') }}{% endif %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(folder)
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w8 w20"}, {"prompt": "w13"}])
    run_data(source, str(folder), tmp_path / "out")
    assert [row["row"] for row in read_output(tmp_path / "out")] == [0]
    assert "no w13" in failures_of(tmp_path / "out")[1]


def test_empty_answers_are_counted_and_set_aside(target: str, tmp_path: Path) -> None:
    texts = [f"w{i} w{j}" for i in range(8, 64) for j in range(8, 64)]
    ids = torch.tensor([chat_ids([{"role": "user", "content": text}]) for text in texts])
    first = chat_target()(ids).logits[:, -1].argmax(-1)
    empty = [text for text, token in zip(texts, first.tolist(), strict=True) if token == EOS]
    assert empty
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": empty[0]}, {"prompt": "w8 w20"}])
    run_data(source, target, tmp_path / "out", "--thinking", "unset")
    assert failures_of(tmp_path / "out") == {0: "the target gave an empty response"}
    assert [row["row"] for row in read_output(tmp_path / "out")] == [1]


def test_run_in_which_everything_fails_ends_with_the_reason(
    prompts: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS])
    model = chat_target()
    monkeypatch.setattr(model, "generate", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no kernel")))
    monkeypatch.setattr(data, "_load_model", lambda *args: model)
    with pytest.raises(ValueError, match="all 20 prompts of shard 0 fail: RuntimeError: no kernel"):
        run_data(source, target, tmp_path / "out", "--shard-size", "20")
    assert not read_output(tmp_path / "out") and not failures_of(tmp_path / "out")


def test_limit_takes_the_first_rows(prompts: str, target: str, tmp_path: Path) -> None:
    run_data(prompts, target, tmp_path / "out", "--limit", "3")
    rows = {row["row"] for row in read_output(tmp_path / "out")} | set(failures_of(tmp_path / "out"))
    assert rows == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"text": "w8"}\n', r"\['text'\] but neither 'prompt' nor 'messages'"),
        ("p.jsonl", "", "is empty"),
        ("p.jsonl", '{"prompt": "w8"}\n{"prompt": \n', "cannot be read"),
        ("p.parquet", "no parquet", "cannot be read"),
        ("p.csv", "prompt\nw8\n", "'.csv' instead of"),
    ],
)
def test_unusable_prompt_file_is_refused_with_the_reason(
    name: str, content: str, message: str, target: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        run_data(str(path), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_file_and_unknown_dataset_are_refused(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"missing\.jsonl does not exist"):
        run_data(str(tmp_path / "missing.jsonl"), target, tmp_path / "out")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"the dataset 'nobody/nothing' .*'train'.* cannot be loaded"):
        run_data("nobody/nothing", target, tmp_path / "out")


def test_named_dataset_is_loaded_by_split(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"prompt": "w8 w20"}])
    write_jsonl(folder / "test.jsonl", [{"prompt": "w8 w21"}, {"prompt": "w8 w22"}])
    run_data(str(folder), target, tmp_path / "out", "--split", "test")
    assert manifest_of(tmp_path / "out")["input"]["rows"] == 2


def test_target_without_a_chat_template_is_refused(prompts: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    chat_target().save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="has no chat template"):
        run_data(prompts, str(folder), tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shard-size", "0"], "--shard-size is 0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens is -1"),
        (["--temperature", "-0.1"], r"--temperature is -0\.1"),
        (["--top-p", "0"], r"--top-p is 0"),
        (["--chat-template-kwargs", "{x"], "--chat-template-kwargs is no JSON"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs is a list"),
        (["--max-new-tokens", "1024"], r"--max-new-tokens is 1024 .* 1024 positions"),
        (["--dtype", "float7"], "float7"),
    ],
)
def test_bad_argument_is_refused_by_its_name(
    given: list[str], message: str, prompts: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_data(prompts, target, tmp_path / "out", *given)


def test_module_as_a_program_words_mistakes_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments("x.jsonl", "--output", "y").input == "x.jsonl"
    with pytest.raises(SystemExit) as exit_, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")])
        data.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("error: the prompt file")
