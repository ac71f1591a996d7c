"""Greedy text with a draft is the target's own, for every family, window, block, prompt and every kind of draft."""

from __future__ import annotations

import pytest
import torch

from comparing import assert_same_text, first_difference, forwards_of, generate_both, shared_target
from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from helpers import VOCABULARY, greedy, random_prompt, tiny_draft, tiny_target
from oracle import OracleDraft, oracle_draft


def depths_in_all_orders(block_size: int) -> list[int]:
    """Depths 0 to K - 1, so that shallow ones follow deep ones and deep ones shallow ones."""
    ascending = list(range(block_size))
    return [*ascending, *ascending[::-1], *ascending[::2], *ascending[1::2]]


@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_every_depth_of_every_block_size_gives_the_targets_text(family, block_size):
    target, prompt = shared_target(family), random_prompt(7)
    calls = iter(depths_in_all_orders(block_size) * 20)
    draft = oracle_draft(target, prompt, 64, lambda at: next(calls), block_size=block_size)
    out = assert_same_text(target, draft, prompt, 48)
    (lengths,) = out.acceptance_lengths
    assert set(lengths) == set(range(1, block_size + 1)), "not every depth was met"
    assert sum(lengths) == 47


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 7, 23])
def test_prompts_of_every_length_give_the_targets_text(family, length):
    target, prompt = shared_target(family), random_prompt(length, seed=length)
    assert_same_text(target, oracle_draft(target, prompt, 14, [1, 3, 0, 2]), prompt, 14)


def test_random_drafts_give_the_targets_text(family):
    target, prompt = shared_target(family), random_prompt(9)
    for seed in range(2):
        assert_same_text(target, tiny_draft(target, seed=seed, block_size=5), prompt, 20)


def test_perfect_draft_takes_a_block_a_round(family):
    target, prompt = shared_target(family), random_prompt(9)
    draft = oracle_draft(target, prompt, 41, 7, block_size=8)
    with forwards_of(target) as calls:
        out = target.generate(
            prompt, assistant_model=draft, max_new_tokens=41, do_sample=False, return_dict_in_generate=True
        )
    assert out.sequences.tolist() == greedy(target, prompt, 41).tolist()
    assert out.acceptance_lengths == [[8] * 5]
    assert len(calls) == 6, "the prompt and five blocks"


def test_hostile_draft_costs_rounds_but_changes_nothing(family):
    target, prompt = shared_target(family), random_prompt(9)
    draft = oracle_draft(target, prompt, 12, 0, block_size=8)
    out = assert_same_text(target, draft, prompt, 12)
    assert out.acceptance_lengths == [[1] * 11]


class BrokenDraft(Qwen3DFlashForDraft):
    """A draft whose numbers have gone wrong."""

    value = float("nan")

    def compute_logits(self, *args, **kwargs):
        """The draft's logits, all of them replaced."""
        return torch.full_like(super().compute_logits(*args, **kwargs), self.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_with_numbers_that_are_none_changes_nothing(value, do_sample):
    target, prompt = shared_target(), random_prompt(9)
    draft = tiny_draft(target, draft_class=BrokenDraft)
    draft.value = value
    options = {"top_k": 1} if do_sample else {}  # one token to sample from: the text is the greedy one
    drafted = target.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=do_sample, **options)
    assert drafted.tolist() == greedy(target, prompt, 12).tolist()


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 16, 200])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_smaller_and_larger_than_the_block(family, window):
    target = shared_target(family, sliding_window=window)
    for block_size, length in ((4, 3), (8, 11)):
        prompt = random_prompt(length, seed=window)
        draft = oracle_draft(target, prompt, 30, depths_in_all_orders(block_size), block_size=block_size)
        assert_same_text(target, draft, prompt, 30)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_matter_to_the_text(family):
    """Otherwise the test above would prove nothing."""
    prompt = random_prompt(11)
    texts = [greedy(shared_target(family, sliding_window=window), prompt, 30).tolist() for window in (3, 8, 200)]
    assert texts[0] != texts[1] != texts[2]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_attention_implementation(family, attention):
    if family == "gpt_oss" and attention == "sdpa":
        pytest.skip("Transformers has no sdpa attention with sinks")
    target, prompt = tiny_target(family), random_prompt(9)
    target.set_attn_implementation(attention)
    draft = oracle_draft(target, prompt, 20, [2, 0, 3, 1])
    draft.set_attn_implementation(attention)
    assert_same_text(target, draft, prompt, 20)


def test_float32_gives_the_targets_text(family):
    target, prompt = tiny_target(family, dtype=torch.float32), random_prompt(9)
    assert_same_text(target, oracle_draft(target, prompt, 40, [2, 0, 3, 1]), prompt, 40)


class NearOracleDraft(OracleDraft):
    """An oracle that trusts the position, where rounding hides whose states it reads."""

    def _place(self, anchor, states, positions, block_size):
        return 0, int(positions[-block_size])


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_differs_at_near_ties_only(seed):
    """Case C08: a block and single tokens may round differently; only a near tie can tell."""
    target, prompt = tiny_target("qwen3", dtype=torch.bfloat16, seed=seed), random_prompt(9, seed=seed)
    draft = tiny_draft(target, draft_class=NearOracleDraft)
    draft.tell(target, [greedy(target, prompt, 64)[0]], [2, 0, 3, 1])
    drafted, plain = generate_both(target, draft, prompt, 60)
    assert max(drafted.acceptance_lengths[0]) == 4
    ours, own = drafted.sequences[0].tolist(), plain.sequences[0].tolist()
    if ours != own:
        _, gap, error = first_difference(target, ours, own)
        assert gap < 3 * error, f"the texts part where the target is sure (gap {gap}, rounding {error})"


def test_swapped_tokens_are_no_near_tie():
    """The check above tells a fault from rounding."""
    target, prompt = tiny_target("qwen3", dtype=torch.bfloat16), random_prompt(9)
    own = greedy(target, prompt, 30)[0].tolist()
    excused = []
    for place in range(10, 34):
        if own[place] != own[place + 1]:
            faulty = [*own[:place], own[place + 1], own[place], *own[place + 2 :]]
            at, gap, error = first_difference(target, faulty, own)
            assert at == place
            excused.append(gap < 3 * error)
    assert sum(excused) <= 1, "a random token is no near tie of the likeliest one, but for chance"


def test_mask_token_is_an_ordinary_token_of_the_target():
    """Case C03: a token that the target emits is kept even if the draft uses it as its mask."""
    target, prompt = shared_target(), random_prompt(9)
    text = greedy(target, prompt, 30)[0, 9:]
    for token in text.unique()[:4].tolist():
        draft = oracle_draft(target, prompt, 30, [2, 0, 3, 1], mask_token_id=token)
        out = assert_same_text(target, draft, prompt, 30)
        assert token in out.sequences[0, 9:].tolist()


@pytest.mark.parametrize("is_causal", [None, False, True])
def test_windows_of_the_draft_change_nothing(is_causal):
    target, prompt = shared_target(), random_prompt(19)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "is_causal": is_causal}
    draft = oracle_draft(target, prompt, 40, [2, 0, 3, 1], **layers)
    assert_same_text(target, draft, prompt, 40)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
def test_forward_is_as_wide_as_the_tokens_to_verify(num_tokens):
    """Case P04: of a block of four, verify only the first few."""
    target, prompt = shared_target(), random_prompt(9)
    draft = oracle_draft(target, prompt, 25, 3)
    draft.generation_config.num_assistant_tokens = num_tokens
    with forwards_of(target) as calls:
        out = target.generate(
            prompt, assistant_model=draft, max_new_tokens=25, do_sample=False, return_dict_in_generate=True
        )
    assert out.sequences.tolist() == greedy(target, prompt, 25).tolist()
    assert out.acceptance_lengths == [[num_tokens + 1] * (24 // (num_tokens + 1))]
    assert {kwargs["input_ids"].shape[1] for kwargs, _ in calls[1:]} == {num_tokens + 1}


def test_softcapped_logits_are_the_targets_own():
    """Case C11: a cap is monotonic for greedy text; sampling scores must carry it."""
    target = tiny_target("gemma3", final_logit_softcapping=3.0)
    prompt = random_prompt(9)
    draft = oracle_draft(target, prompt, 20, [2, 0, 3, 1])
    drafted, plain = generate_both(target, draft, prompt, 20, output_logits=True)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits))
    assert max(logits.abs().max() for logits in drafted.logits) <= 3.0


def test_scaled_embeddings_reach_the_draft_scaled():
    """Case C11: the block goes through the target's own embedding module, Gemma's scale included."""
    target = shared_target("gemma3")
    draft = tiny_draft(target)
    ids = torch.tensor([[5, VOCABULARY - 1, VOCABULARY - 1]])
    expected = target.get_input_embeddings().weight[ids] * target.config.hidden_size**0.5
    torch.testing.assert_close(draft.embed_block(ids, target.get_input_embeddings()), expected)


def test_draft_with_a_vocabulary_of_its_own_gives_the_targets_text():
    """Case C12: own head of 16 rows, mapped to ids of the target; sampling sees zeros elsewhere."""
    target, prompt = shared_target(), random_prompt(9)
    draft = tiny_draft(target, own_head=True, draft_vocab_size=16)
    chosen = torch.arange(3, 64, 4)[:16]
    draft.draft_token_ids.copy_(chosen)
    proposed = []
    original = type(draft).compute_logits

    def spy(self, *args):
        logits = original(self, *args)
        proposed.append(logits)
        return logits

    try:
        type(draft).compute_logits = spy
        assert_same_text(target, draft, prompt, 20)
        sampled = target.generate(prompt, assistant_model=draft, max_new_tokens=20, do_sample=True, top_k=0)
    finally:
        type(draft).compute_logits = original
    assert sampled.shape[1] == 29
    for logits in proposed:
        finite = torch.isfinite(logits).any(dim=(0, 1)).nonzero().flatten()
        assert finite.tolist() == chosen.tolist()
