"""The test models are fit to test with: targets that read their context, drafts that are right as often as told."""

from __future__ import annotations

import pytest
import torch

from helpers import greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft


def test_text_of_a_tiny_target_varies_and_depends_on_its_context(target):
    prompt = random_prompt(9)
    other = prompt.clone()
    other[0, -4] = prompt[0, -4] % 60 + 1
    text, changed = (greedy(target, ids, 30)[0, 9:] for ids in (prompt, other))
    assert len(text.unique()) > 5
    assert (text != changed).float().mean() > 0.3


def test_tiny_models_are_made_from_their_seed():
    first, same, other = (tiny_target("llama", seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_left_padding_puts_every_prompt_at_the_end():
    batch = left_padded([torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("depth", range(4))
def test_oracle_is_accepted_to_its_depth_in_every_round(target, depth):
    prompt = random_prompt(7)
    draft = oracle_draft(target, prompt, 24, depth)
    out = target.generate(
        prompt, assistant_model=draft, max_new_tokens=24, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, greedy(target, prompt, 24))
    (lengths,) = out.acceptance_lengths
    assert set(lengths[:-1]) == {depth + 1}
    assert sum(lengths) == 23  # the first token is the prefill's


def test_oracle_knows_the_rows_of_a_padded_batch_apart(qwen3):
    prompts = [random_prompt(length, seed=length)[0] for length in (3, 8, 5)]
    batch = left_padded(prompts)
    draft = oracle_draft(qwen3, batch["input_ids"], 16, [2, 0, 3], attention_mask=batch["attention_mask"])
    out = qwen3.generate(**batch, assistant_model=draft, max_new_tokens=16, do_sample=False)
    for row, prompt in zip(out, prompts, strict=True):
        assert torch.equal(row[-16:], greedy(qwen3, prompt[None], 16)[0, -16:])


def test_oracle_notices_states_of_another_text(qwen3):
    prompt = random_prompt(7)
    draft = oracle_draft(qwen3, prompt, 8, 3)
    with pytest.raises(AssertionError, match="wrong states"):
        qwen3.generate(random_prompt(7, seed=1), assistant_model=draft, max_new_tokens=8, do_sample=False)


def test_random_draft_is_mostly_refused(qwen3):
    prompt = random_prompt(7)
    out = qwen3.generate(
        prompt, assistant_model=tiny_draft(qwen3), max_new_tokens=24, do_sample=False, return_dict_in_generate=True
    )
    (lengths,) = out.acceptance_lengths
    assert sum(lengths) / len(lengths) < 1.5
