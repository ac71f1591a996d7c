"""Every published format: a tiny draft written by the project that defines it computes here what it computes there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_formats import DOCUMENT, FORMATS, Format, document, installed
from dflash_hf import load_draft
from dflash_hf.checkpoints import read_draft
from helpers import random_prompt, tiny_target
from reference_drafts import VOCABULARY, Reference, block_of, reference_acceptance

CASES = [pytest.param(f, w, id=w.__name__) for f in FORMATS for w in f.writers]
by_format = pytest.mark.parametrize(("row", "writer"), CASES)


@cache
def pair_target() -> Any:
    return tiny_target("qwen3", dtype=torch.float32, vocab_size=VOCABULARY)


def written(row: Format, writer: Callable[..., Reference], folder: Path) -> tuple[Reference, Any]:
    """The project's own draft, and ours read from its checkpoint."""
    if not installed(row.peer):
        pytest.skip(f"needs {row.peer}")
    return writer(folder), load_draft(folder, dtype=torch.float32).eval()


def taps_of(tokens: torch.Tensor, indices: Any) -> torch.Tensor:
    hidden_states = pair_target()(tokens, output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[index] for index in indices], dim=-1)


@by_format
@torch.no_grad()
def test_hidden_states_and_proposals_are_those_of_the_project(row: Format, writer: Any, tmp_path: Path) -> None:
    reference, draft = written(row, writer, tmp_path)
    target = pair_target()
    for length in (3, 15):  # shorter and longer than the window
        tokens = random_prompt(length, vocabulary=VOCABULARY)
        expected = reference.states(tokens, taps_of(tokens[:, :-1], reference.taps), target)
        taps = taps_of(tokens[:, :-1], [tap + 1 for tap in draft.config.target_layer_ids])
        embeds = draft.embed_block(block_of(tokens[:, -1]), target.get_input_embeddings())
        states = draft(embeds, taps).last_hidden_state
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
        logits = draft.compute_logits(states, target.get_output_embeddings())
        chosen = tokens[:, -1:]
        for _ in range(logits.shape[1]):
            chosen = torch.cat([chosen, draft.step_logits(logits, states, chosen).argmax(-1)[:, None]], dim=1)
        assert chosen[:, 1:].tolist() == reference.propose(expected, tokens[:, -1], target).tolist()


@by_format
@torch.no_grad()
def test_acceptance_lengths_are_those_of_the_project(row: Format, writer: Any, tmp_path: Path) -> None:
    reference, draft = written(row, writer, tmp_path)
    for seed in range(8):  # until a proposal is accepted: a prompt without any shows little
        prompt = random_prompt(8, vocabulary=VOCABULARY, seed=seed)
        expected = reference_acceptance(reference, pair_target(), prompt, max_new_tokens=24)
        output = pair_target().generate(
            prompt, assistant_model=draft, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
        )
        assert output.acceptance_lengths[0][: len(expected)] == expected
        if sum(expected) > len(expected):
            return
    raise AssertionError("no proposal was accepted for any prompt: this pair shows nothing")


@by_format
def test_format_is_told_from_config_and_tensors(row: Format, writer: Any, tmp_path: Path) -> None:
    written(row, writer, tmp_path)
    assert read_draft(tmp_path)[0] == row.reading


def test_table_in_the_documentation_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run `python tests/checkpoint_formats.py`"
