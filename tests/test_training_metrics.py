"""The measures of a draft in training, against hand-made cases and against `generate` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from dflash_hf.training.evaluation import accepted_proposals, walk
from dflash_hf.training.target import FrozenTarget
from dflash_hf.training.trainer import DFlashTrainer
from helpers import greedy, random_prompt, tiny_draft, tiny_target
from training_runs import quick_arguments


def test_only_leading_right_proposals_count() -> None:
    block = torch.tensor([[True, True, False, True], [False, True, True, True], [True, True, True, True]])
    assert accepted_proposals(block).tolist() == [2, 0, 4]


def test_a_walk_starts_each_round_where_the_last_one_ended() -> None:
    # Tokens 0..6 of a response. Token 0 has two right proposals: it commits 1, 2 and the target's own 3; token 3 none.
    assert walk([2, 9, 9, 0, 1, 9], block_size=4) == [3, 1, 2]


def test_a_walk_commits_no_more_than_a_block_and_no_more_than_is_left() -> None:
    assert walk([3, 3, 3, 3, 3], block_size=4) == [4, 1]
    assert walk([], block_size=4) == []


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_simulated_acceptance_is_that_of_generate(tmp_path: Path, family: str) -> None:
    target = tiny_target(family, vocab_size=12)
    draft = tiny_draft(target, block_size=4)
    rows, real = [], []
    for seed in range(4):
        prompt = random_prompt(5 + seed, seed=seed, vocabulary=12)
        tokens = greedy(target, prompt, 20)
        rows.append({"input_ids": tokens[0].tolist(), "prompt_length": prompt.shape[1], "sequence": seed})
        outputs = target.generate(
            prompt, assistant_model=draft, max_new_tokens=20, do_sample=False, return_dict_in_generate=True
        )
        real.append(outputs.acceptance_lengths[0])
    assert len({length for lengths in real for length in lengths}) > 1  # else the comparison would say little
    trainer = DFlashTrainer(
        draft,
        FrozenTarget(target, draft.config.target_layer_ids),
        quick_arguments(tmp_path, real_eval_prompts=4, real_eval_new_tokens=20, eval_anchors_per_forward=7),
        eval_dataset=Dataset.from_list(rows),
    )
    metrics = trainer.evaluate()
    expected = sum(map(sum, real)) / sum(map(len, real))
    assert metrics["eval_real_acceptance"] == pytest.approx(expected)
    assert metrics["eval_simulated_acceptance"] == pytest.approx(expected)


def test_accuracy_per_slot_counts_scored_slots_only(tmp_path: Path, qwen3: Any) -> None:
    draft = tiny_draft(qwen3)
    tokens = greedy(qwen3, random_prompt(4), 6)[0].tolist()
    rows = Dataset.from_list([{"input_ids": tokens, "prompt_length": 4, "sequence": 0}])
    target = FrozenTarget(qwen3, draft.config.target_layer_ids)
    trainer = DFlashTrainer(draft, target, quick_arguments(tmp_path, real_eval_prompts=0), eval_dataset=rows)
    right = [[], [], []]
    for anchor in range(4, 9):
        taps = target.states(torch.tensor([tokens[:anchor]]), torch.ones(1, anchor, dtype=torch.long))
        block = torch.tensor([[tokens[anchor], 63, 63, 63]])
        states = draft(draft.embed_block(block, target.embeddings), taps).last_hidden_state
        predicted = draft.compute_logits(states, target.head).argmax(-1)[0].tolist()
        for slot in range(3):
            if anchor + 1 + slot < len(tokens):
                right[slot].append(predicted[slot] == tokens[anchor + 1 + slot])
    metrics = trainer.evaluate()
    assert [len(slot) for slot in right] == [5, 4, 3]
    for number, slot in enumerate(right, start=1):
        assert metrics[f"eval_accuracy_slot_{number}"] == pytest.approx(sum(slot) / len(slot))
    assert "eval_real_acceptance" not in metrics
