"""Processors and warpers act as in plain `generate`; sampled text has exactly the target's distribution.

Shapes: B batch, K block, V vocabulary, N new tokens.
"""

from __future__ import annotations

import logging

import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from comparing import RawOracleDraft, assert_same_text, shared_target
from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from helpers import VOCABULARY, greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import OracleDraft, oracle_draft

PROMPT = 7


# --- processors and warpers: greedy text -----------------------------------------------------------------------------


def follows_the_parity(_, input_ids):
    """Which tokens may follow depends on the last one, as in a grammar."""
    last = int(input_ids[-1])
    return list(range(1 + last % 3, VOCABULARY, 3))


class Favours(LogitsProcessor):
    """A processor of the caller's own: the tokens it likes depend on what came before."""

    def __call__(self, input_ids, scores):
        scores[:, (input_ids[:, -2:].sum(dim=1)) % VOCABULARY] += 3.0
        return scores


class Remembers(LogitsProcessor):
    """Keeps what it was shown: its scores depend on every earlier call."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.tolist())
        scores[:, (5 * len(self.shown)) % VOCABULARY] += 4.0
        return scores


# What reads the scores, or the scores and the text: the draft goes through it, too.
DRAFTED_THROUGH = {
    "repetition_penalty": lambda: {"repetition_penalty": 1.3},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "bad_words": lambda: {"bad_words_ids": [[5], [8, 9], [41], [12]]},
    "sequence_bias": lambda: {"sequence_bias": [[[7], 6.0], [[20, 8], -9.0], [[7, 7], -8.0]]},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": follows_the_parity},
    "suppress_tokens": lambda: {"suppress_tokens": [5, 8, 12, 41, 6]},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": list(range(40))},
    "forced_bos_token": lambda: {"forced_bos_token_id": 9},
    "forced_eos_token": lambda: {"forced_eos_token_id": 9},
    "min_new_tokens": lambda: {"min_new_tokens": 30, "eos_token_id": list(range(0, 64, 2))},
    "min_length": lambda: {"min_length": PROMPT + 17, "eos_token_id": list(range(0, 64, 3))},
    "exponential_decay": lambda: {"exponential_decay_length_penalty": (10, 1.1), "eos_token_id": 50},
    "remove_invalid_values": lambda: {"remove_invalid_values": True},
    "renormalize_logits": lambda: {"renormalize_logits": True, "suppress_tokens": [5, 8]},
    "penalty_of_new_tokens": lambda: {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.4, PROMPT)]},
    "bad_words_by_hand": lambda: {"logits_processor": [NoBadWordsLogitsProcessor([[5], [8, 9]])]},
    "several": lambda: {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 8]},
}
HARMLESS = ("remove_invalid_values", "forced_bos_token")  # with finite logits, and behind a longer prompt
# What may remember: it sees accepted text only, each prefix once, and the draft goes without.
STEP_BY_STEP = {
    "guidance_scale": lambda: {"guidance_scale": 1.8},
    "guidance_with_negative_prompt": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[4, 9, 2]])},
    "watermarking": lambda: {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "unknown": lambda: {"logits_processor": [Favours()]},
    "stateful": lambda: {"logits_processor": [Remembers()]},
    "unknown_and_known": lambda: {"logits_processor": [Remembers()], "repetition_penalty": 1.3},
}


def told(draft, target, prompt, num_tokens, options):
    """The draft, told the text that follows under these options."""
    rows = [greedy(target, row[None], num_tokens, **{"eos_token_id": None, **options})[0] for row in prompt]
    draft.tell(target, rows, 3)
    return draft


@pytest.mark.parametrize("name", DRAFTED_THROUGH)
def test_processor_is_applied_at_every_place_of_a_block(name):
    """Cases C09, G10: equal text, and a draft that knows the target's raw logits is never refused."""
    target, prompt, make = shared_target(), random_prompt(PROMPT), DRAFTED_THROUGH[name]
    draft = told(tiny_draft(target, draft_class=RawOracleDraft), target, prompt, 45, make())
    out = assert_same_text(target, draft, prompt, 41, **make())
    (lengths,) = out.acceptance_lengths
    length = out.sequences.shape[1] - PROMPT
    assert set(lengths[:-1]) <= {4} and sum(lengths) == length - 1
    if name not in HARMLESS:
        assert out.sequences.tolist() != greedy(target, prompt, 41).tolist(), "the processor must do something here"


@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_processor_that_may_remember_gives_the_targets_text(name):
    target, prompt, make = shared_target(), random_prompt(PROMPT), STEP_BY_STEP[name]
    draft = told(oracle_draft(target, prompt, 1, 3), target, prompt, 45, make())
    plain = target.generate(prompt, max_new_tokens=41, do_sample=False, **make())
    out = target.generate(
        prompt, assistant_model=draft, max_new_tokens=41, do_sample=False, return_dict_in_generate=True, **make()
    )
    assert out.sequences.tolist() == plain.tolist() != greedy(target, prompt, 41).tolist()
    assert out.acceptance_lengths == [[4] * 10], "acceptance must not decay"


def test_synthid_watermark_gives_the_targets_text():
    """Its scores are made by a seeded permutation of all tokens for each text so far."""
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3)
    target, prompt = tiny_target(), random_prompt(PROMPT)
    target.config.vocab_size = VOCABULARY
    outputs = []
    for assistant in (None, oracle_draft(target, prompt, 20, [2, 0, 3, 1])):
        if assistant is not None:
            plain = target.generate(prompt, max_new_tokens=28, do_sample=True, top_k=1, watermarking_config=config)
            assistant.tell(target, [plain[0]], [2, 0, 3, 1])
        ids = target.generate(
            prompt,
            assistant_model=assistant,
            max_new_tokens=20,
            do_sample=True,
            top_k=1,  # one token is left to sample from, the watermark picks none other
            watermarking_config=config,
        )
        outputs.append(ids.tolist())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("end", [None, 9])
def test_processor_is_shown_what_plain_generate_shows_it(depth, end):
    """Every accepted prefix once and in order; never a refused candidate, nothing behind the end."""
    target, prompt = shared_target(), random_prompt(PROMPT)
    options = {"logits_processor": [Remembers()]}
    text = greedy(target, prompt, 24, **options)
    draft = oracle_draft(target, prompt, 1, 3)
    draft.tell(target, [text[0]], depth)
    shown = []
    for assistant in (None, draft):
        processor = Remembers()
        target.generate(
            prompt,
            assistant_model=assistant,
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None if end is None else int(text[0, PROMPT + end]),
            logits_processor=[processor],
        )
        shown.append(processor.shown)
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", [*DRAFTED_THROUGH, *STEP_BY_STEP])
def test_processor_in_a_batch_gives_the_targets_text(name):
    """Rows accept different numbers, and each is processed with its own text."""
    if name == "guidance_with_negative_prompt":
        pytest.skip("takes one negative prompt per row")
    make = (DRAFTED_THROUGH | STEP_BY_STEP)[name]
    target = shared_target()
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, PROMPT, 5)])
    num_tokens = 31 if "min_new_tokens" in make() else 24
    draft = tiny_draft(target, draft_class=OracleDraft)
    if "eos_token_id" in make():
        draft = tiny_draft(target)  # rows end, and their truth is known no further
    else:
        truth = target.generate(**batch, max_new_tokens=31, do_sample=False, **make())
        starts = (batch["attention_mask"] == 0).sum(dim=1).tolist()
        draft.tell(target, [row[start:] for row, start in zip(truth, starts, strict=True)], [2, 0, 3, 1])
    plain = target.generate(**batch, max_new_tokens=num_tokens, do_sample=False, **make())
    drafted = target.generate(
        **batch,
        assistant_model=draft,
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **make(),
    )
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted_lengths_differ(name, make(), drafted)


def drafted_lengths_differ(name, options, drafted):
    """Rows of an oracle's batch accept all of a block here and nothing of it there."""
    if name in STEP_BY_STEP or "eos_token_id" in options:
        return True
    return {1, 4} <= {length for row in drafted.acceptance_lengths for length in row}


def test_prefix_constraint_is_told_the_row_of_the_batch():
    target = shared_target()
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, PROMPT, 5)])

    def allowed(row, input_ids):
        return list(range(1 + row, VOCABULARY, 3))

    out = assert_same_text(target, tiny_draft(target), batch, 14, prefix_allowed_tokens_fn=allowed)
    assert [{(token - 1) % 3 for token in row[PROMPT:].tolist()} for row in out.sequences] == [{0}, {1}, {2}]


@pytest.mark.parametrize("name", ["guidance_scale", "unknown", "stateful"])
def test_batch_that_cannot_be_drafted_warns_once_and_is_right(name, caplog, monkeypatch):
    from dflash_hf.generation import decoding

    decoding.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(decoding.logger, "propagate", True)
    target, make = shared_target(), STEP_BY_STEP[name]
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, PROMPT)])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            drafted = target.generate(
                **batch, assistant_model=tiny_draft(target), max_new_tokens=8, do_sample=False, **make()
            )
    assert drafted.tolist() == target.generate(**batch, max_new_tokens=8, do_sample=False, **make()).tolist()
    warnings = [record.message for record in caplog.records if "without the draft" in record.message]
    assert len(warnings) == 1 and "logits processor" in warnings[0]


# --- warpers: sampling that leaves one token ------------------------------------------------------------------------


WARPERS = {
    "none": {"top_k": 0},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.8, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.02, "top_k": 0},
    "top_h": {"top_h": 0.5, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95},
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_warper_with_one_token_left_gives_the_greedy_text(name, batch_size):
    """Case G09: sampling arguments are never ignored."""
    target, prompt = shared_target(), random_prompt(PROMPT, batch_size=batch_size)
    draft = oracle_draft(target, prompt, 20, [2, 0, 3, 1])
    options = {**WARPERS[name], "top_k": 1}
    out = target.generate(prompt, assistant_model=draft, max_new_tokens=20, do_sample=True, **options)
    assert out.tolist() == greedy(target, prompt, 20).tolist()


@pytest.mark.parametrize("name", WARPERS)
def test_warper_keeps_out_what_it_keeps_out_of_plain_sampling(name):
    target, prompt = shared_target(), random_prompt(PROMPT)
    torch.manual_seed(0)
    out = target.generate(
        prompt,
        assistant_model=tiny_draft(target),
        max_new_tokens=30,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        **WARPERS[name],
    )
    for step in range(0, 30, 3):
        plain = target.generate(
            out.sequences[:, : PROMPT + step],
            attention_mask=torch.ones(1, PROMPT + step, dtype=torch.long),
            max_new_tokens=1,
            do_sample=True,
            return_dict_in_generate=True,
            output_scores=True,
            **WARPERS[name],
        )
        torch.testing.assert_close(out.scores[step], plain.scores[0], rtol=1e-4, atol=1e-4)
        assert torch.isfinite(out.scores[step][0, out.sequences[0, PROMPT + step]])


@pytest.mark.parametrize("block_size", [2, 3, 16])
@pytest.mark.parametrize("options", [{"top_k": 0, "temperature": 1.0}, {"top_k": 10, "top_p": 0.9}])
def test_sampling_has_the_right_length_and_follows_the_seed(block_size, options):
    """Case G03."""
    target, prompt = shared_target(), random_prompt(PROMPT, batch_size=2)
    draft = tiny_draft(target, block_size=block_size)
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(target.generate(prompt, assistant_model=draft, max_new_tokens=20, do_sample=True, **options))
    assert texts[0].shape == (2, PROMPT + 20)
    assert texts[0].tolist() == texts[1].tolist() != texts[2].tolist()


# --- the distribution ------------------------------------------------------------------------------------------------

TINY = 5  # tokens
STEPS = 3  # sampled tokens whose joint distribution is tested: V ** N cells


class TableDraft(Qwen3DFlashForDraft):
    """A draft whose logits are a table: for every anchor and slot what the test says, whatever it reads."""

    def embed_block(self, token_ids, target_embeddings):
        """As any draft; remembers the anchors."""
        self.anchors = token_ids[:, 0]
        return super().embed_block(token_ids, target_embeddings)

    def compute_logits(self, last_hidden_state, target_head):
        """(B, K - 1, V) out of the table (V, K - 1, V)."""
        return self.table[self.anchors][:, : last_hidden_state.shape[1] - 1].to(last_hidden_state.dtype)


def tiny_pair(kind, seed=0):
    """A target of five tokens, and a draft: close to it, far from it, or sure of one token."""
    target = tiny_target("qwen3", seed=11, dtype=torch.float32, vocab_size=TINY, hidden_size=16, num_hidden_layers=1)
    target.get_output_embeddings().weight.data *= 0.5  # keep every continuation likely enough to be counted
    draft = tiny_draft(target, draft_class=TableDraft, target_layer_ids=[0], num_hidden_layers=1)
    generator = torch.Generator().manual_seed(seed)
    draft.table = torch.randn(TINY, 3, TINY, generator=generator) * {"near": 0.5, "far": 2.0, "sure": 1e4}[kind]
    return target, draft


PROMPT_IDS = torch.tensor([[1, 3, 2, 4]])


def exact_distribution(target, steps=STEPS, **options):
    """The probability of every continuation, (V ** steps,), by plain `generate`'s own processed scores."""
    total, prefixes = torch.ones(1), PROMPT_IDS
    for _ in range(steps):
        scores = target.generate(
            prefixes,
            attention_mask=torch.ones_like(prefixes),
            max_new_tokens=1,
            do_sample=True,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        ).scores[0]
        total = (total[:, None] * scores.double().softmax(dim=-1)).flatten()
        prefixes = torch.cat(
            [prefixes.repeat_interleave(TINY, dim=0), torch.arange(TINY).repeat(len(prefixes))[:, None]], dim=1
        )
    return total


def sampled(target, draft, count, batch_size, num_tokens=STEPS, **options):
    """Continuations (count, num_tokens) and the rounds' acceptance lengths, from batches of equal prompts."""
    torch.manual_seed(5)
    ids, lengths = [], []
    for _ in range(count // batch_size):
        out = target.generate(
            PROMPT_IDS.expand(batch_size, -1),
            attention_mask=torch.ones(batch_size, PROMPT_IDS.shape[1], dtype=torch.long),
            assistant_model=draft,
            max_new_tokens=num_tokens,
            do_sample=True,
            return_dict_in_generate=True,
            **options,
        )
        ids.append(out.sequences[:, PROMPT_IDS.shape[1] :])
        lengths += out.acceptance_lengths
    return torch.cat(ids), lengths


def p_value(ids, expected):
    """Chi-square of the sampled continuations (count, n) against their probabilities (V ** n,); rare cells joined."""
    powers = TINY ** torch.arange(ids.shape[1] - 1, -1, -1)
    counts = torch.bincount((ids * powers).sum(dim=1), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0, "a token that the processors forbid"
    wanted = expected * len(ids)
    is_rare = wanted < 5
    rare = (counts[is_rare].sum(), wanted[is_rare].sum())
    counts, wanted = counts[~is_rare], wanted[~is_rare]
    if rare[1] >= 5:
        counts, wanted = torch.cat([counts, rare[0][None]]), torch.cat([wanted, rare[1][None]])
    else:
        counts[0], wanted[0] = counts[0] + rare[0], wanted[0] + rare[1]
    return stats.chisquare(counts.numpy(), (wanted * counts.sum() / wanted.sum()).numpy()).pvalue


SETTINGS = {
    "bare": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "repetition_penalty": {"repetition_penalty": 1.8, "top_k": 0},
    "constraint": {"top_k": 0, "prefix_allowed_tokens_fn": lambda _, ids: [1 + int(ids[-1]) % 2, 3, 4]},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["near", "far", "sure"])
def test_text_of_a_batch_has_the_targets_distribution(kind, setting):
    """First, second and third token together: a third of the rows refuse, and the next round starts from there."""
    target, draft = tiny_pair(kind)
    expected = exact_distribution(target, **SETTINGS[setting])
    assert (expected * 3000 >= 5).sum() >= 10
    ids, lengths = sampled(target, draft, 3000, 250, **SETTINGS[setting])
    refused = sum(row[0] == 1 for row in lengths) / len(lengths)
    assert 0.02 < refused < 0.98, "both outcomes must be there"
    assert p_value(ids, expected) > 1e-3


@pytest.mark.parametrize("kind", ["near", "sure"])
def test_text_of_single_sequences_has_the_targets_distribution(kind):
    target, draft = tiny_pair(kind)
    ids, _ = sampled(target, draft, 600, 1, top_k=0)
    first, second = exact_distribution(target, 1, top_k=0), exact_distribution(target, 2, top_k=0)
    assert p_value(ids[:, :1], first) > 1e-3
    assert p_value(ids[:, :2], second) > 1e-3
    assert p_value(ids, exact_distribution(target, top_k=0)) > 1e-3


def test_text_through_a_processor_that_may_remember_has_the_targets_distribution():
    class Indifferent(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    target, draft = tiny_pair("far")
    expected = exact_distribution(target, **SETTINGS["constraint"])
    ids, _ = sampled(target, draft, 600, 1, **SETTINGS["constraint"], logits_processor=[Indifferent()])
    assert p_value(ids, expected) > 1e-3


@pytest.mark.parametrize(("threshold", "batch_size"), [(0.2, 250), (0.35, 250), (0.9, 250), (0.35, 1)])
def test_cutting_unsure_blocks_keeps_the_distribution(threshold, batch_size):
    """To drop a candidate for its own probability would favour likely ones."""
    target, draft = tiny_pair("far")
    draft.generation_config.assistant_confidence_threshold = threshold
    count = 600 if batch_size == 1 else 3000
    ids, _ = sampled(target, draft, count, batch_size, top_k=0)
    assert p_value(ids, exact_distribution(target, top_k=0)) > 1e-3


def test_distribution_test_notices_a_wrong_rule(monkeypatch):
    """What it must refuse: a token taken from p where max(p - q, 0) is due."""
    from dflash_hf.generation import verification

    target, draft = tiny_pair("far")
    expected = exact_distribution(target, top_k=0)
    monkeypatch.setattr(verification, "residual_distribution", lambda p, q: p)
    ids, _ = sampled(target, draft, 3000, 250, top_k=0)
    assert p_value(ids, expected) < 1e-6


def test_token_after_a_refusal_comes_from_what_the_draft_left_over():
    """Given that the first candidate fell, the token comes from max(p - q, 0), normalised (arXiv 2211.17192)."""
    target, draft = tiny_pair("far")
    ids, lengths = sampled(target, draft, 4000, 250, top_k=0)
    refused = torch.tensor([row[0] == 1 for row in lengths])
    second = exact_distribution(target, 2, top_k=0).view(TINY, TINY)
    for first in range(TINY):
        p = second[first] / second[first].sum()
        q = draft.table[first, 0].double().softmax(dim=-1)
        rows = ids[refused & (ids[:, 0] == first)]
        if len(rows) > 100:
            left_over = (p - q).clamp_min(0)
            assert p_value(rows[:, 1:2], left_over / left_over.sum()) > 1e-3


@pytest.mark.parametrize("kind", ["near", "far", "sure"])
def test_acceptance_rate_is_the_overlap_of_the_two_distributions(kind):
    """Case C02: sum of min(p, q); where the draft is sure of one token, that is the token's probability."""
    target, draft = tiny_pair(kind)
    _, lengths = sampled(target, draft, 4000, 250, num_tokens=4, top_k=0)
    accepted = sum(row[0] > 1 for row in lengths)
    first = exact_distribution(target, 1, top_k=0)
    second = exact_distribution(target, 2, top_k=0).view(TINY, TINY)
    q = draft.table[:, 0].double().softmax(dim=-1)
    rate = torch.minimum(second, first[:, None] * q).sum()
    if kind == "sure":
        torch.testing.assert_close(rate, second.gather(1, q.argmax(dim=1, keepdim=True)).sum())
    assert stats.binomtest(accepted, len(lengths), float(rate)).pvalue > 1e-3


def test_rows_of_one_prompt_are_sampled_apart():
    target, draft = tiny_pair("near")
    torch.manual_seed(0)
    out = target.generate(
        PROMPT_IDS,
        attention_mask=torch.ones_like(PROMPT_IDS),
        assistant_model=draft,
        max_new_tokens=8,
        do_sample=True,
        top_k=0,
        num_return_sequences=16,
    )
    assert out.shape == (16, 12)
    assert len({tuple(row) for row in out.tolist()}) > 10


def test_returned_sequences_have_the_targets_distribution():
    target, draft = tiny_pair("far")
    torch.manual_seed(1)
    ids = [
        target.generate(
            PROMPT_IDS,
            attention_mask=torch.ones_like(PROMPT_IDS),
            assistant_model=draft,
            max_new_tokens=STEPS,
            do_sample=True,
            top_k=0,
            num_return_sequences=250,
        )[:, 4:]
        for _ in range(12)
    ]
    assert p_value(torch.cat(ids), exact_distribution(target, top_k=0)) > 1e-3
