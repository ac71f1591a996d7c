"""`dflash-hf train` from the command line: configuration, bad data, a whole run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainingArguments

from dflash_hf.cli import main
from dflash_hf.training.sequences import load_sequences, usable_sequences
from dflash_hf.training.train_command import parse
from dflash_hf.training.trainer import DFlashTrainingArguments
from helpers import ROOT, random_prompt, tiny_target
from training_runs import answers_of


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """A tiny target with a tokenizer whose token 63 is free."""
    folder = tmp_path / "target"
    tiny_target("qwen3", dtype=torch.float32).save_pretrained(folder)
    words = {f"w{index}": index for index in range(63)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_yaml_then_flags_and_flags_win(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "train_data: somewhere\noutput_dir: out\nblock_size: 8\ntarget_layer_ids: [1, 2]\nloss: kl\ngamma: null\n"
    )
    run_args, training_args = parse([str(config), "--block_size", "4", "--gradient-checkpointing", "--use_cpu"])
    assert (run_args.train_data, run_args.block_size, run_args.target_layer_ids) == ("somewhere", 4, [1, 2])
    assert (training_args.loss, training_args.gamma, training_args.gradient_checkpointing) == ("kl", None, True)


def test_the_papers_optimiser_settings_are_the_defaults() -> None:
    _, training_args = parse(["--train_data", "x", "--output_dir", "y", "--use_cpu"])
    assert (training_args.learning_rate, training_args.warmup_steps, training_args.max_grad_norm) == (6e-4, 0.04, 1.0)
    assert (training_args.lr_scheduler_type, training_args.num_train_epochs, training_args.num_anchors) == (
        "cosine",
        6,
        512,
    )
    assert training_args.get_warmup_steps(1000) == 40


@pytest.mark.parametrize("name", ["train_qwen3_8b.yaml", "train_smollm2_cpu.yaml"])
def test_example_configurations_are_understood(name: str) -> None:
    path = ROOT / "examples" / name
    run_args, training_args = parse([str(path), "--use_cpu", "--report_to", "none"])
    content = yaml.safe_load(path.read_text())
    for field, value in content.items():
        holder = run_args if hasattr(run_args, field) else training_args
        if field not in ("use_cpu", "report_to"):
            assert getattr(holder, field) == value, field


def test_a_whole_run_trains_evaluates_saves_and_resumes(
    tmp_path: Path, target_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = answers_of(tiny_target("qwen3", dtype=torch.float32), 12)
    rows.to_parquet(tmp_path / "data" / "shard-00000.parquet")
    arguments = [
        "train",
        "--train_data",
        str(tmp_path / "data"),
        "--target",
        str(target_folder),
        "--target_dtype",
        "float32",
    ]
    arguments += [
        "--output_dir",
        str(tmp_path / "run"),
        "--draft_layers",
        "1",
        "--block_size",
        "4",
        "--use_cpu",
        "--bf16",
    ]
    arguments += ["--state_cache", str(tmp_path / "states"), "--restrict_vocabulary", "--num_anchors", "4"]
    arguments += ["--report_to", "none", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"]
    arguments += ["--real_eval_prompts", "1", "--real_eval_new_tokens", "8", "--per_device_train_batch_size", "4"]
    assert main([*arguments, "--max_steps", "2"]) == 0
    assert main([*arguments, "--max_steps", "4"]) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 4]
    for name in ("simulated_acceptance", "anchor_acceptance", "real_acceptance", "accuracy_slot_1", "accuracy_slot_3"):
        assert f"eval_{name}" in evaluations[0]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["mask_token_id"], config["block_size"], config["model_type"]) == (63, 4, "dflash")
    assert (
        main(
            [*arguments, "--max_steps", "5", "--draft", str(tmp_path / "run"), "--output_dir", str(tmp_path / "more")]
        )
        == 0
    )
    assert "tokens" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], "has no column 'input_ids' (it has text)"),
        ([{"input_ids": [1, 2, 3]}], "has no column 'prompt_length' (it has input_ids)"),
        (
            [{"input_ids": [1, 2], "prompt_length": 2}],
            "none of the 1 sequences can be trained on: {'empty response': 1}",
        ),
    ],
)
def test_bad_data_is_one_line_and_exit_two(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], message: str
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    arguments = ["train", "--train_data", str(data), "--target", str(target_folder), "--use_cpu"]
    assert main([*arguments, "--output_dir", str(tmp_path / "run"), "--report_to", "none"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "mse"], "`loss` must be one of ce, kl, dpace"),
        (["--num_anchors", "0"], "`num_anchors` must be at least 1, got 0"),
        (["--draft_init", "magic"], "`draft_init` must be target_layers or random, got 'magic'"),
        (["--max_length", "1"], "`max_length` must be at least 2, got 1"),
        (["--shard_target", "--state_cache", "c"], "`shard_target` is true and `state_cache` is 'c'"),
        (["--mask_token_id", "5"], "`mask_token_id` 5 is the token 'w5', which the tokenizer uses"),
        (["--mask_token_id", "64"], "the target's table has 64 rows"),
        (["--bogus", "1"], "error: --bogus is no argument of this command: see `dflash-hf train --help`"),
        (["--target", "/no/such"], "error: --target is /no/such, which cannot be loaded ("),
        (["--train_data", "/no/such"], "error: the training data /no/such is no folder or file here, and cannot be"),
    ],
)
def test_bad_settings_are_one_line_and_exit_two(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, 2, 3, 4], "prompt_length": 1}])
    arguments = [
        "train",
        "--train_data",
        str(data),
        "--target",
        str(target_folder),
        "--use_cpu",
        "--report_to",
        "none",
    ]
    assert main([*arguments, "--output_dir", str(tmp_path / "run"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_every_argument_of_the_recipe_says_what_it_is() -> None:
    for field in dataclasses.fields(DFlashTrainingArguments):
        if field.name not in {inherited.name for inherited in dataclasses.fields(TrainingArguments)}:
            assert field.metadata.get("help"), field.name


def test_missing_package_is_one_line_that_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(arguments: list[str]) -> Any:
        raise ImportError("\nUsing the `Trainer` requires `accelerate`:\n\nplease run ...")

    monkeypatch.setattr("dflash_hf.training.train_command.parse", lacks)
    assert main(["train", "--train_data", str(tmp_path / "data.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "`pip install 'dflash-hf[train]'` (Using the `Trainer` requires `accelerate`:)" in error
    assert len(error.strip().splitlines()) == 1


def test_unusable_sequences_are_skipped_and_counted() -> None:
    good = random_prompt(9)[0].tolist()
    rows = Dataset.from_list(
        [
            {"input_ids": good, "prompt_length": 4},
            {"input_ids": good, "prompt_length": 9},
            {"input_ids": good, "prompt_length": 8},
            {"input_ids": good, "prompt_length": 7},
            {"input_ids": [*good[:5], 64], "prompt_length": 2},
            {"input_ids": good, "prompt_length": 12},
            {"input_ids": [], "prompt_length": 0},
        ]
    )
    kept, skipped = usable_sequences(rows, max_length=8, vocab_size=64)
    assert kept["sequence"] == [0]
    assert kept["length"] == [8]
    assert skipped == {
        "empty response": 2,
        "response of one token": 1,
        "prompt fills the maximal length": 1,
        "token outside the vocabulary": 1,
        "prompt length outside the sequence": 1,
    }


def test_folders_and_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (1, 0):
        Dataset.from_list([{"input_ids": [number] * 4, "prompt_length": 1}]).to_parquet(
            tmp_path / f"shard-0000{number}.parquet"
        )
    assert [row[0] for row in load_sequences(tmp_path)["input_ids"]] == [0, 1]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no Parquet shards"):
        load_sequences(empty)
