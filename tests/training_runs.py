"""Small training runs that several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from dflash_hf.training.target import FrozenTarget
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments
from helpers import greedy, random_prompt, tiny_draft


def quick_arguments(folder: Path, **fields: Any) -> DFlashTrainingArguments:
    """A silent run on the CPU that saves nothing unless told to."""
    defaults = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return DFlashTrainingArguments(output_dir=str(folder), **(defaults | fields))


def answers_of(target: Any, number: int, new_tokens: int = 12, seed: int = 0) -> Dataset:
    """Sequences of different lengths: random prompts and the target's own greedy answers."""
    rows = []
    for index in range(number):
        prompt = random_prompt(4 + index % 3, seed=seed + index, vocabulary=target.config.vocab_size)
        tokens = greedy(target, prompt, new_tokens + index % 5)[0].tolist()
        rows.append({"input_ids": tokens, "prompt_length": prompt.shape[1], "sequence": index, "length": len(tokens)})
    return Dataset.from_list(rows)


def make_trainer(
    target: Any, folder: Path, rows: Dataset, *, draft: Any = None, head: Any = None, **fields: Any
) -> DFlashTrainer:
    """A trainer of a tiny draft, whose losses are in its `state.log_history`."""
    draft = draft or tiny_draft(target)
    collators = {name: fields.pop(name) for name in ("data_collator", "eval_collator") if name in fields}
    return DFlashTrainer(
        draft,
        FrozenTarget(target, draft.config.target_layer_ids),
        quick_arguments(folder, **fields),
        head=head,
        train_dataset=rows,
        eval_dataset=rows,
        **collators,
    )


def losses_of(trainer: DFlashTrainer) -> list[float]:
    """The logged loss of every step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def parameters_of(trainer: DFlashTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.draft.named_parameters()}
