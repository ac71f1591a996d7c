"""Parts that only some drafts have: own tables, a reduced vocabulary, shifted slots, heads that choose one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import RepetitionPenaltyLogitsProcessor

from dflash_hf import DFlashConfig
from dflash_hf.generation.drafting import Drafter, choose_candidates
from dflash_hf.generation.processors import BlockProcessor
from helpers import VOCABULARY, greedy, random_prompt, tiny_draft, tiny_target

REDUCED = {"own_head": True, "draft_vocab_size": 16}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
PARTS: dict[str, dict[str, Any]] = {
    "own tables": {"own_embedding": True, "own_head": True},
    "reduced vocabulary": REDUCED,
    "shifted slots": {"slots_predict_next": True},
    "selector": SELECTOR,
    "Markov": {"markov_rank": 6, "slots_predict_next": True},
    "gated Markov": {"markov_rank": 6, "markov_head_type": "gated"},
    "recurrent Markov": {"markov_rank": 6, "markov_head_type": "rnn", **REDUCED},
    "sinks": {"attention_sinks": True, "attention_value_scale": 0.5},
    "norms": {"tap_norms": True, "own_mask_embedding": True},
    "embedding tap": {"target_layer_ids": (-1, 2)},
}
by_parts = pytest.mark.parametrize("fields", PARTS.values(), ids=PARTS)
BY_STEPS = [name for name, fields in PARTS.items() if "markov_rank" in fields or "selector_rank" in fields]


def draft_with(target: Any, fields: dict[str, Any]) -> Any:
    """A draft with these parts; a reduced vocabulary is a scattered set of the target's tokens."""
    draft = tiny_draft(target, **fields)
    if draft.config.draft_vocab_size:
        ids = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(4))
        draft.draft_token_ids.copy_(ids[: draft.config.draft_vocab_size])
    return draft


@torch.no_grad()
def drafted(target: Any, draft: Any, prompt: torch.Tensor) -> tuple[Drafter, torch.Tensor]:
    """A drafter after its first block, behind the prompt's last token, and the block's logits (B, P, V)."""
    hidden_states = target(prompt[:, :-1], output_hidden_states=True).hidden_states
    taps = torch.cat([hidden_states[tap + 1] for tap in draft.config.target_layer_ids], dim=-1)
    drafter = Drafter(draft, target.get_input_embeddings(), target.get_output_embeddings())
    drafter.begin(prompt.shape[0], 0)
    drafter.observe(taps, [taps.shape[1]] * prompt.shape[0])
    return drafter, drafter.block_logits(prompt[:, -1:], draft.config.block_size)


@by_parts
def test_greedy_tokens_are_the_targets_own(qwen3: Any, fields: dict[str, Any]) -> None:
    prompt = random_prompt(9)
    draft = draft_with(qwen3, fields)
    assert torch.equal(
        qwen3.generate(prompt, assistant_model=draft, max_new_tokens=20, do_sample=False), greedy(qwen3, prompt, 20)
    )


@pytest.mark.parametrize("fields", [PARTS[name] for name in BY_STEPS], ids=BY_STEPS)
def test_greedy_batch_and_tree_are_the_targets_own(qwen3: Any, fields: dict[str, Any]) -> None:
    prompt = random_prompt(9, batch_size=3)
    draft = draft_with(qwen3, fields)
    expected = greedy(qwen3, prompt, 12)
    assert torch.equal(qwen3.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=False), expected)
    draft.generation_config.draft_tree_budget = 8
    assert torch.equal(qwen3.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=False), expected)


def test_number_of_proposals_is_the_number_of_slots_that_predict(qwen3: Any) -> None:
    assert drafted(qwen3, tiny_draft(qwen3), random_prompt(6))[1].shape == (1, 3, VOCABULARY)
    shifted = tiny_draft(qwen3, slots_predict_next=True)
    assert drafted(qwen3, shifted, random_prompt(6))[1].shape == (1, 4, VOCABULARY)
    assert shifted.generation_config.num_assistant_tokens == shifted.config.num_proposals == 4


@torch.no_grad()
def test_own_head_is_not_replaced_by_the_targets(qwen3: Any) -> None:
    draft = draft_with(qwen3, REDUCED)
    calls: list[Any] = []
    qwen3.lm_head.register_forward_hook(lambda *call: calls.append(call))
    states = torch.randn(1, 4, 32, dtype=torch.float64)
    logits = draft.compute_logits(states, qwen3.lm_head)
    assert not calls
    small = states[:, 1:] @ draft.lm_head.weight.T
    assert torch.equal(draft.draft_token_ids[small.argmax(-1)], logits.argmax(-1))
    shared = tiny_draft(qwen3)
    assert torch.equal(shared.compute_logits(states, qwen3.lm_head), qwen3.lm_head(states[:, 1:]))


@torch.no_grad()
def test_own_embedding_is_not_replaced_by_the_targets(qwen3: Any) -> None:
    draft = tiny_draft(qwen3, own_embedding=True, own_mask_embedding=True)
    block = torch.tensor([[7, 63, 63, 63]])
    embeds = draft.embed_block(block, qwen3.get_input_embeddings())
    assert torch.equal(embeds[0, 0], draft.embed_tokens.weight[7])
    assert all(torch.equal(embeds[0, slot], draft.mask_embedding) for slot in (1, 2, 3))


def test_reduced_vocabulary_samples_from_the_whole_one_with_zeros(qwen3: Any) -> None:
    draft = draft_with(qwen3, REDUCED)
    prompt = random_prompt(6)
    drafter, logits = drafted(qwen3, draft, prompt)
    processor = BlockProcessor(LogitsProcessorList([TemperatureLogitsWarper(0.7)]), 1)
    tokens, probs = choose_candidates(logits, processor, [0], [prompt], True, drafter.refine)
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[draft.draft_token_ids] = True
    assert probs.shape == (1, 3, VOCABULARY)
    assert (probs[..., ~known] == 0).all()
    assert (probs[..., known] > 0).all()
    assert known[tokens].all()


@pytest.mark.parametrize("fields", [PARTS[name] for name in BY_STEPS], ids=BY_STEPS)
@pytest.mark.parametrize(
    "processors",
    [[], [TemperatureLogitsWarper(0.7)], [RepetitionPenaltyLogitsProcessor(1.3)]],
    ids=["none", "temperature", "penalty"],
)
def test_sampled_candidates_come_from_the_distributions_given_out(
    qwen3: Any, fields: dict[str, Any], processors: list[Any]
) -> None:
    """Each distribution is that of the draft after the candidates before it: what makes acceptance lossless."""
    draft = draft_with(qwen3, fields)
    prompt = random_prompt(6, batch_size=2)
    drafter, logits = drafted(qwen3, draft, prompt)
    base = logits.clone()
    torch.manual_seed(0)
    rows, prefixes = [0, 1], list(prompt.split(1))
    processor = BlockProcessor(LogitsProcessorList(processors), 2)
    tokens, probs = choose_candidates(logits, processor, rows, prefixes, True, drafter.refine)
    for row in rows:
        text = torch.cat([prompt[row], tokens[row]])[None]
        for step in range(tokens.shape[1]):
            seen = text[:, : prompt.shape[1] + step]
            states = drafter_states(qwen3, draft, prompt[row : row + 1])
            scores = draft.step_logits(base[row : row + 1], states, seen[:, prompt.shape[1] - 1 :])
            expected = LogitsProcessorList(processors)(seen, scores.float()).softmax(-1)
            torch.testing.assert_close(probs[row, step], expected[0])


@torch.no_grad()
def drafter_states(target: Any, draft: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The block's states, computed without the drafter."""
    hidden_states = target(prompt[:, :-1], output_hidden_states=True).hidden_states
    taps = torch.cat([hidden_states[tap + 1] for tap in draft.config.target_layer_ids], dim=-1)
    block = torch.full((1, draft.config.block_size), draft.config.mask_token_id)
    block[:, 0] = prompt[:, -1]
    return draft(draft.embed_block(block, target.get_input_embeddings()), taps).last_hidden_state


@pytest.mark.parametrize("name", ["reduced vocabulary", "selector", "recurrent Markov", "Markov"])
def test_sampled_tokens_follow_the_targets_distribution(name: str) -> None:
    """The second and third tokens of many samples, the first two that are proposed, against their distribution."""
    vocabulary, samples = 8, 3000
    target = tiny_target("qwen3", vocab_size=vocabulary, dtype=torch.float32)
    fields = PARTS[name] | ({"draft_vocab_size": 5} if "draft_vocab_size" in PARTS[name] else {})
    draft = draft_with(target, fields)
    prompt = random_prompt(5, vocabulary=vocabulary)
    torch.manual_seed(1)
    output = target.generate(
        prompt,
        assistant_model=draft,
        max_new_tokens=4,
        do_sample=True,
        num_return_sequences=samples,
        top_k=0,
        return_dict_in_generate=True,
    )
    assert any(lengths[0] > 2 for lengths in output.acceptance_lengths), "no second proposal was ever accepted"
    with torch.no_grad():
        first = target(prompt).logits[0, -1].softmax(-1)  # (V,)
        pairs = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
        logits = target(torch.cat([prompt.expand(len(pairs), -1), pairs], dim=1)).logits
    second = logits[:, -2].softmax(-1).view(vocabulary, vocabulary, vocabulary)[:, 0]  # of each first, (V, V)
    third = logits[:, -1].softmax(-1).view(vocabulary, vocabulary, vocabulary)
    expected = torch.einsum("a,ab,abc->bc", first, second, third).flatten().double() * samples
    chosen = output.sequences[:, prompt.shape[1] + 1] * vocabulary + output.sequences[:, prompt.shape[1] + 2]
    counts = torch.bincount(chosen, minlength=vocabulary**2).double()
    common = expected > 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


@torch.no_grad()
def test_sinks_take_weight_and_give_nothing(qwen3: Any) -> None:
    """A sink of minus infinity is no sink; an immense one leaves the attention nothing."""
    embeds, taps = torch.randn(2, 4, 32, dtype=torch.float64), torch.randn(2, 7, 64, dtype=torch.float64)
    draft = tiny_draft(qwen3, attention_sinks=True)
    plain = tiny_draft(qwen3)
    plain.load_state_dict(draft.state_dict(), strict=False)
    for layer in draft.layers:
        layer.self_attn.sinks.fill_(-1e9)
    for implementation in ("sdpa", "eager"):
        draft.set_attn_implementation(implementation)
        expected = plain(embeds, taps).last_hidden_state
        torch.testing.assert_close(draft(embeds, taps).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    for layer in draft.layers:
        layer.self_attn.sinks.fill_(1e9)
    for layer in plain.layers:
        layer.self_attn.o_proj.weight.zero_()
    expected = plain(embeds, taps).last_hidden_state
    torch.testing.assert_close(draft(embeds, taps).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_fresh_convolutions_change_nothing(qwen3: Any) -> None:
    draft = tiny_draft(qwen3, conv_kernel_size=2, conv_group_size=8)
    plain = tiny_draft(qwen3)
    plain.load_state_dict(draft.state_dict(), strict=False)
    for layer in draft.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.kernel_projection.weight.zero_()
            conv.base_kernel.copy_(torch.tensor([1.0, 0.0])[None, :, None].expand(2, -1, 32))
    embeds, taps = torch.randn(1, 4, 32, dtype=torch.float64), torch.randn(1, 7, 64, dtype=torch.float64)
    torch.testing.assert_close(draft(embeds, taps).last_hidden_state, plain(embeds, taps).last_hidden_state)


@torch.no_grad()
def test_confidence_is_read_from_the_slot_and_the_token_before(qwen3: Any) -> None:
    draft = tiny_draft(qwen3, markov_rank=6, confidence_head=True, confidence_head_with_markov=True)
    states, previous = torch.randn(1, 4, 32, dtype=torch.float64), torch.tensor([[5, 6, 7]])
    features = torch.cat([states[:, 1:], draft.markov_head.markov_w1.weight[previous]], dim=-1)
    expected = features @ draft.confidence_head.proj.weight[0] + draft.confidence_head.proj.bias
    torch.testing.assert_close(draft.predict_confidence(states, previous), expected)
    assert tiny_draft(qwen3).predict_confidence(states) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 16}, "`draft_vocab_size` is 16 but `own_head` is false"),
        ({"own_head": True, "draft_vocab_size": 64}, "must be a part of `vocab_size` 64, got 64"),
        ({"conv_kernel_size": 2}, "a convolution needs both"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "does not divide `hidden_size` 32"),
        ({"selector_rank": 4}, "a selector needs both"),
        ({**SELECTOR, **REDUCED}, "needs a head of the whole vocabulary"),
        ({"markov_rank": -1}, "`markov_rank` must be 0"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, "one of vanilla, gated, rnn, got 'lstm'"),
        ({**SELECTOR, "markov_rank": 4}, "one way of choosing"),
        ({"confidence_head": True, "confidence_head_with_markov": True}, "`markov_rank` is 0"),
        ({"target_layer_ids": [-2, 1]}, r"got \[-2, 1\]"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    base = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "mask_token_id": 63, "block_size": 4}
    with pytest.raises(ValueError, match=message) as error:
        DFlashConfig(**{**base, "target_layer_ids": [0, 2], **fields})
    assert "\n" not in str(error.value)


def test_parts_are_read_from_the_nested_dialect() -> None:
    base = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "mask_token_id": 63, "block_size": 4}
    nested = {"target_layer_ids": [0, 2], "attention_sink_bias": True, **SELECTOR}
    config = DFlashConfig(**base, dflash_config=nested)
    assert {name: getattr(config, name) for name in SELECTOR} == SELECTOR
    assert config.attention_sinks is True
    with pytest.raises(ValueError, match=r"`selector_rank` is 4 at the top level but 6 in `dflash_config"):
        DFlashConfig(**base, selector_rank=4, dflash_config=nested)


def test_parts_survive_saving(qwen3: Any, tmp_path: Any) -> None:
    fields = {**PARTS["recurrent Markov"], "tap_norms": True, "trained_length": 3072, "trained_with_thinking": False}
    draft = draft_with(qwen3, fields)
    draft.save_pretrained(tmp_path)
    back = type(draft).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert {name: getattr(back.config, name) for name in fields} == fields
