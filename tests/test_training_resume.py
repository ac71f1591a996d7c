"""A run that is killed and started again is the run that was not killed; several processes are one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import ROOT
from training_runs import answers_of, make_trainer, parameters_of

SCRIPT = Path(__file__).with_name("train_tiny.py")
# `--cpu` would ask for an MPI launcher; this starts the processes itself, and the run asks for the CPU.
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_machines=1",
    "--mixed_precision=no",
]


def start(folder: Path, *, processes: int = 1, **fields: Any) -> subprocess.CompletedProcess[str]:
    """Train a tiny draft in `processes` processes (gloo)."""
    command = [sys.executable]
    if processes > 1:
        command = [*LAUNCH, f"--num_processes={processes}", "--num_cpu_threads_per_process=1", "--main_process_port=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), json.dumps(fields)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def result_of(folder: Path, finished: subprocess.CompletedProcess[str], rank: int = 0) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads((folder / f"curve-{rank}.json").read_text())


RUN = {
    "max_steps": 9,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.mark.slow
def test_kill_in_mid_step_and_restart_give_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = result_of(whole, start(whole, **RUN))
    killed = start(broken, kill_in_step=5, **RUN)
    assert killed.returncode == -signal.SIGKILL
    assert {path.name for path in broken.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    resumed = result_of(broken, start(broken, **RUN))
    assert len(expected["losses"]) == 9  # an epoch has three steps: the run crosses epochs
    assert resumed == expected
    weights = [load_file(folder / "final" / "model.safetensors") for folder in (whole, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path, qwen3: Any) -> None:
    trainer = make_trainer(qwen3, tmp_path, answers_of(qwen3, 4), max_steps=2, save_strategy="steps", save_steps=1)
    save_state, calls = trainer._save_rng_state, []

    def dies_the_second_time(output_dir: str) -> None:
        calls.append(output_dir)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save_state(output_dir)

    trainer._save_rng_state = dies_the_second_time
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    again = make_trainer(qwen3, tmp_path, answers_of(qwen3, 4), max_steps=2, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.iterdir() if "checkpoint" in path.name) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path, qwen3: Any) -> None:
    trainer = make_trainer(
        qwen3,
        tmp_path,
        answers_of(qwen3, 2),
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=2,
        metric_for_best_model="loss",
        greater_is_better=True,
        real_eval_prompts=0,
        learning_rate=1e-2,
        load_best_model_at_end=True,
    )
    trainer.train()
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {"checkpoint-1", "checkpoint-4"}  # the loss falls, so the first is the greatest
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in parameters_of(trainer).items())


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(tmp_path: Path) -> None:
    one, two, sharded = (tmp_path / name for name in ("one", "two", "sharded"))
    fields = {"max_steps": 6, "adam_epsilon": 1e-3}
    expected = result_of(one, start(one, per_device_train_batch_size=4, **fields))
    curves = [
        result_of(two, start(two, processes=2, per_device_train_batch_size=2, **fields)),
        result_of(sharded, start(sharded, processes=2, per_device_train_batch_size=2, shard_target=True, **fields)),
    ]
    for folder, curve in zip((two, sharded), curves, strict=True):
        assert curve["processes"] == 2
        assert curve["losses"] == pytest.approx(expected["losses"], rel=2e-3)  # logged with four digits
        weights = [load_file(path / "final" / "model.safetensors") for path in (one, folder)]
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert curves[0]["metrics"]["eval_simulated_acceptance"] == pytest.approx(
        expected["metrics"]["eval_simulated_acceptance"]
    )
