"""The cache of a batch of a hybrid target, handed to the next turn: every row is there, with its own states.

Shapes: B batch, S context, N new tokens.
"""

from __future__ import annotations

import pytest
import torch

from dflash_hf.generation.compat import CACHE_KEY, get_cache
from helpers import greedy, left_padded, random_prompt, tiny_draft
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
