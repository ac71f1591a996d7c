"""The cache of a batch of a hybrid target, handed to the next turn: every row is there, with its own states.

Shapes: B batch, S context, N new tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.generation.compat import CACHE_KEY, get_cache
from helpers import greedy, left_padded, random_prompt, tiny_draft, tiny_target
from hybrid_targets import HYBRIDS, hybrid_target
from oracle import oracle_draft

NEW_TOKENS = 20
# Jamba is refused, and Mamba2, which has no attention, does not know how many tokens its cache has seen.
FAMILIES = tuple(name for name in HYBRIDS if name not in ("jamba", "mamba2"))


@pytest.mark.parametrize("name", FAMILIES)
def test_second_turn_of_a_batch_takes_over_all_rows(name: str) -> None:
    """Rows reach the length limit in different rounds, so all but the last have left the cache on the way."""
    target, inputs = hybrid_target(name), left_padded([random_prompt(n, seed=n)[0] for n in (3, 9, 6)])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    draft = oracle_draft(
        target, inputs["input_ids"], NEW_TOKENS, [0, 3, 1, 2, 3], attention_mask=inputs["attention_mask"]
    )
    first = target.generate(**inputs, **options, assistant_model=draft)
    assert len({len(rounds) for rounds in first.acceptance_lengths}) > 1
    ids = torch.cat([first.sequences, random_prompt(4, batch_size=3, seed=5)], dim=1)
    added = torch.ones(3, NEW_TOKENS + 4, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], added], dim=1)
    turn = {"input_ids": ids, "attention_mask": mask, CACHE_KEY: get_cache(first)}
    second = target.generate(**turn, **options, assistant_model=tiny_draft(target))
    assert second.sequences.tolist() == greedy(target, ids, NEW_TOKENS, attention_mask=mask).tolist()


def second_turn(target: Any, first: Any, mask: torch.Tensor, added: torch.Tensor) -> list[list[int]]:
    """What a target says after more text, with the cache of its first turn."""
    ids = torch.cat([first.sequences, random_prompt(4, batch_size=len(mask), seed=5)], dim=1)
    mask = torch.cat([mask, added, torch.ones(len(mask), 4, dtype=torch.long)], dim=1)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    return target.generate(ids, attention_mask=mask, **{CACHE_KEY: get_cache(first)}, **options).tolist()


@pytest.mark.parametrize("tree_budget", [0, 8])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_row_that_ends_short_in_the_last_round_has_its_last_token(family: str, tree_budget: int) -> None:
    """Both rows leave together, and nothing runs after them; the cache holds the shorter one to its end."""
    target = tiny_target(family)
    for seed in range(20):
        ids = random_prompt(6, batch_size=2, seed=seed)
        mask = torch.ones_like(ids)
        free = greedy(target, ids, 5, attention_mask=mask)[:, 6:].tolist()
        end = free[0][3]
        if end not in free[0][:3] + free[1]:
            break
    draft = oracle_draft(target, ids, 5, 4, attention_mask=mask, block_size=6)
    draft.generation_config.draft_tree_budget = tree_budget
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": end, "return_dict_in_generate": True}
    plain = target.generate(ids, attention_mask=mask, **options)
    drafted = target.generate(ids, attention_mask=mask, **options, assistant_model=draft)
    assert drafted.acceptance_lengths == [[3], [4]], "one round"
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    added = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert second_turn(target, drafted, mask, added) == second_turn(target, plain, mask, added)


@pytest.mark.parametrize("name", FAMILIES)
def test_row_that_ends_with_the_prompt_leaves_the_states_of_the_others_alone(name: str) -> None:
    """Its end token is run apart, one token for all rows, before any block has been verified; that is taken back."""
    target = hybrid_target(name)
    for seed in range(20):
        ids = random_prompt(6, batch_size=2, seed=seed)
        first = [int(greedy(target, row[None], 1)[0, -1]) for row in ids]
        if first[0] != first[1]:
            break
    assert first[0] != first[1]
    options = {
        "max_new_tokens": 10,
        "do_sample": False,
        "eos_token_id": first[0],
        "attention_mask": torch.ones_like(ids),
    }
    plain = target.generate(ids, **options)
    drafted = target.generate(ids, **options, return_dict_in_generate=True, assistant_model=tiny_draft(target))
    assert drafted.sequences.tolist() == plain.tolist()
