"""What `generate` returns beside the tokens is what it returns without the draft; the cache can be continued."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from comparing import assert_same_text, forwards_of, generate_both, shared_target
from dflash_hf.generation.compat import CACHE_KEY, get_cache
from helpers import greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft

EVERYTHING = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
PROMPT = 7


@pytest.fixture
def eager_target(family):
    """Attention weights exist with eager attention only; in float64 that makes NaN of masked rows."""
    target = tiny_target(family, dtype=torch.float32)
    target.set_attn_implementation("eager")
    return target


def assert_close(ours, own, row=None):
    """Nested tuples of tensors are equal in structure, shape and value; `row` looks at one row of the batch."""
    assert type(ours) is type(own)
    if own is None:
        return
    if isinstance(own, tuple):
        assert len(ours) == len(own)
        for a, b in zip(ours, own, strict=True):
            assert_close(a, b, row)
    else:
        assert ours.dtype == own.dtype
        assert ours.shape == own.shape
        ours, own = (ours, own) if row is None else (ours[row], own[row])
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)  # the targets norm in float32 whatever their dtype


def assert_same_outputs(drafted, plain):
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_close(getattr(drafted, name), getattr(plain, name))


# --- records ---------------------------------------------------------------------------------------------------------


def test_every_record_is_that_of_plain_generate(eager_target):
    prompt = random_prompt(PROMPT)
    draft = oracle_draft(eager_target, prompt, 22, [2, 0, 3, 1])
    assert_same_outputs(*generate_both(eager_target, draft, prompt, 22, **EVERYTHING))


def test_records_end_where_the_text_ends(eager_target):
    """An end token in the middle of a block: nothing of the rest of the block is recorded."""
    prompt = random_prompt(PROMPT)
    draft = oracle_draft(eager_target, prompt, 22, 3)
    end = greedy(eager_target, prompt, 7)[0, -1].item()
    drafted, plain = generate_both(eager_target, draft, prompt, 22, eos_token_id=end, **EVERYTHING)
    assert len(drafted.scores) == drafted.sequences.shape[1] - PROMPT
    assert_same_outputs(drafted, plain)


def test_each_record_alone():
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 12, [2, 0, 3, 1])
    for name in ("output_scores", "output_logits", "output_hidden_states"):
        drafted, plain = generate_both(target, draft, prompt, 12, **{name: True})
        given = [key for key in ("scores", "logits", "hidden_states", "attentions") if getattr(plain, key) is not None]
        assert given == [name.removeprefix("output_")]
        for key in ("scores", "logits", "hidden_states", "attentions"):
            assert_close(getattr(drafted, key), getattr(plain, key))


def test_scores_carry_the_processors_and_logits_do_not():
    target, prompt = shared_target(), random_prompt(PROMPT)
    options = {"repetition_penalty": 1.7, "output_scores": True, "output_logits": True}
    draft = oracle_draft(target, prompt, 16, [2, 0, 3, 1], generate_kwargs={"repetition_penalty": 1.7})
    drafted, plain = generate_both(target, draft, prompt, 16, **options)
    assert_close(drafted.scores, plain.scores)
    assert_close(drafted.logits, plain.logits)
    assert not torch.equal(drafted.scores[-1], drafted.logits[-1])


def test_records_of_a_batch_are_those_of_plain_generate(eager_target):
    """Until a row has ended; behind that, plain `generate` records what it computes for a row that is no more."""
    prompts = [random_prompt(length, seed=length)[0] for length in (3, 8, 5)]
    batch = left_padded(prompts)
    end = greedy(eager_target, prompts[1][None], 6)[0, -1].item()
    draft = oracle_draft(eager_target, batch["input_ids"], 16, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    drafted, plain = generate_both(eager_target, draft, batch, 16, eos_token_id=end, **EVERYTHING)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    lengths = [
        len(own[8:].tolist()) if end not in own[8:] else own[8:].tolist().index(end) + 1 for own in plain.sequences
    ]
    assert min(lengths) < max(lengths), "some row must end early"
    for name in ("scores", "logits", "hidden_states", "attentions"):
        ours, own = getattr(drafted, name), getattr(plain, name)
        assert len(ours) == len(own)
        for step, (a, b) in enumerate(zip(ours, own, strict=True)):
            for row, length in enumerate(lengths):
                if step < length:
                    real = batch["attention_mask"][row].bool()
                    if name == "hidden_states" and step == 0:  # what the target makes of padding means nothing
                        assert_close(tuple(s[row, real] for s in a), tuple(s[row, real] for s in b))
                    elif name == "attentions" and step == 0:
                        assert_close(tuple(s[row][:, real] for s in a), tuple(s[row][:, real] for s in b))
                    else:
                        assert_close(a, b, row)


def test_transition_scores_of_a_drafted_text():
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 16, [2, 0, 3, 1])
    drafted, plain = generate_both(target, draft, prompt, 16, output_scores=True)
    ours, own = (
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (drafted, plain)
    )
    torch.testing.assert_close(ours, own)
    with torch.no_grad():
        logits = target(plain.sequences).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    expected = logits.gather(-1, plain.sequences[:, PROMPT:, None])[..., 0]
    torch.testing.assert_close(ours, expected.float())


def test_ids_alone_without_return_dict():
    target, prompt = shared_target(), random_prompt(PROMPT)
    ids = target.generate(prompt, assistant_model=tiny_draft(target), max_new_tokens=5, do_sample=False)
    assert isinstance(ids, torch.Tensor) and ids.dtype == prompt.dtype


# --- acceptance lengths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(5))
def test_acceptance_length_is_the_tokens_a_round_commits(depth):
    """Accepted candidates plus the target's own token; the token of the prefill belongs to no round."""
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 24, depth, block_size=5)
    with forwards_of(target) as calls:
        out = assert_same_text(target, draft, prompt, 24)
    del calls
    (lengths,) = out.acceptance_lengths
    full, rest = divmod(23, depth + 1)
    assert lengths == [depth + 1] * full + [rest] * (rest > 0)
    assert all(type(length) is int for length in lengths)


def test_acceptance_lengths_count_committed_tokens_only():
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 24, 3)
    end = greedy(target, prompt, 7)[0, -1].item()
    out = assert_same_text(target, draft, prompt, 24, eos_token_id=end)
    assert out.acceptance_lengths == [[4, 2]]


def test_one_round_is_one_forward_of_the_target():
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 24, [2, 0, 3, 1])
    with forwards_of(target) as calls:
        out = target.generate(
            prompt, assistant_model=draft, max_new_tokens=24, do_sample=False, return_dict_in_generate=True
        )
    assert len(calls) == 1 + len(out.acceptance_lengths[0])


def test_acceptance_lengths_of_a_batch_are_a_list_per_row():
    target = shared_target()
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, 8)])
    draft = oracle_draft(target, batch["input_ids"], 16, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    out = assert_same_text(target, draft, batch, 16)
    assert [sum(row) for row in out.acceptance_lengths] == [15, 15]
    assert out.acceptance_lengths[0] != out.acceptance_lengths[1]


# --- the cache, from turn to turn ------------------------------------------------------------------------------------


def second_turn(first_sequences, extra=5):
    """The whole conversation so far and the next question."""
    return torch.cat([first_sequences, random_prompt(extra, seed=99)], dim=1)


def unmasked(ids):
    """A text may hold the padding token; without a mask `generate` would take it for padding."""
    return {"attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("drafted_turns", [(True, True), (True, False), (False, True)])
def test_cache_is_handed_from_turn_to_turn(family, depth, drafted_turns):
    """The second turn reads the first one's cache and gives the text of a fresh start."""
    target, ids, cache = shared_target(family), random_prompt(PROMPT), None
    for is_drafted in drafted_turns:
        if cache is not None:
            ids = second_turn(ids)
        text = greedy(target, ids, 12, **unmasked(ids))
        draft = oracle_draft(target, ids, 12, depth, generate_kwargs=unmasked(ids)) if is_drafted else None
        kept = 0 if cache is None else cache.get_seq_length()
        with forwards_of(target) as calls:
            out = target.generate(
                ids,
                assistant_model=draft,
                max_new_tokens=12,
                do_sample=False,
                return_dict_in_generate=True,
                **unmasked(ids),
                **({} if cache is None else {CACHE_KEY: cache}),
            )
        assert out.sequences.tolist() == text.tolist()
        assert calls[0][0]["input_ids"].shape[1] == ids.shape[1] - kept, "the prefix must not be run again"
        ids, cache = out.sequences, get_cache(out)
        assert cache.get_seq_length() == ids.shape[1] - 1


def test_cache_of_the_callers_own_is_filled_and_can_be_continued(family):
    target, ids = shared_target(family), random_prompt(PROMPT)
    cache = DynamicCache(config=target.config)
    for turn in range(3):
        draft = oracle_draft(target, ids, 12, [2, 0, 3, 1], generate_kwargs=unmasked(ids))
        expected = greedy(target, ids, 12, **unmasked(ids))
        options = {"max_new_tokens": 12, "do_sample": False, CACHE_KEY: cache, **unmasked(ids)}
        out = target.generate(ids, assistant_model=draft, **options)
        assert out.tolist() == expected.tolist(), f"turn {turn}"
        assert cache.get_seq_length() == out.shape[1] - 1
        ids = second_turn(out)


def test_second_turn_with_the_new_tokens_only():
    """As plain `generate` allows it: ids of the new tokens, a mask over all of them, and the cache."""
    target, prompt = shared_target(), random_prompt(PROMPT)
    texts = []
    for is_drafted in (False, True):
        draft = oracle_draft(target, prompt, 12, [2, 0, 3, 1]) if is_drafted else None
        out = target.generate(
            prompt, assistant_model=draft, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
        )
        cache, question = get_cache(out), torch.cat([out.sequences[:, -1:], random_prompt(4, seed=5)], dim=1)
        mask = torch.ones(1, cache.get_seq_length() + question.shape[1], dtype=torch.long)
        draft = tiny_draft(target) if is_drafted else None
        texts.append(
            target.generate(
                question,
                attention_mask=mask,
                assistant_model=draft,
                max_new_tokens=12,
                do_sample=False,
                **{CACHE_KEY: cache},
            ).tolist()
        )
    assert texts[0] == texts[1]


def test_cache_of_a_shared_prefix_serves_several_questions():
    """The usual prefix caching: copies of one prefilled cache."""
    import copy

    target, prefix = shared_target("mistral"), random_prompt(11)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(prefix, use_cache=True, **{CACHE_KEY: cache})
    for seed in range(3):
        ids = torch.cat([prefix, random_prompt(3 + seed, seed=seed)], dim=1)
        out = target.generate(
            ids,
            assistant_model=oracle_draft(target, ids, 12, [2, 0, 3, 1]),
            max_new_tokens=12,
            do_sample=False,
            **{CACHE_KEY: copy.deepcopy(cache)},
        )
        assert out.tolist() == greedy(target, ids, 12).tolist()


def test_returned_cache_holds_the_text_and_nothing_of_the_candidates(family):
    """Its keys and values are those of a fresh run over all tokens but the last."""
    target, prompt = shared_target(family), random_prompt(PROMPT)
    for depth in (0, 2, 3):
        out = target.generate(
            prompt,
            assistant_model=oracle_draft(target, prompt, 15, depth),
            max_new_tokens=15,
            do_sample=False,
            return_dict_in_generate=True,
        )
        fresh = DynamicCache(config=target.config)
        with torch.no_grad():
            target(out.sequences[:, :-1], use_cache=True, **{CACHE_KEY: fresh})
        for ours, own in zip(get_cache(out).layers, fresh.layers, strict=True):
            width = min(ours.keys.shape[-2], own.keys.shape[-2])
            least = getattr(own, "sliding_window", None)
            assert width >= (own.keys.shape[-2] if least is None else min(least - 1, own.keys.shape[-2]))
            torch.testing.assert_close(ours.keys[..., -width:, :], own.keys[..., -width:, :])
            torch.testing.assert_close(ours.values[..., -width:, :], own.values[..., -width:, :])
            assert ours.get_seq_length() == own.get_seq_length()


@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("place", [0, 5, None])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_cache_of_a_batch_holds_every_row(family, place, is_lent):
    """Each token in the column where plain `generate` has it, whenever its row has ended."""
    target = shared_target(family, **({"sliding_window": 9} if family == "mistral" else {}))
    prompts = [random_prompt(length, seed=length)[0] for length in (3, 8, 5)]
    batch = left_padded(prompts)
    end = None if place is None else greedy(target, prompts[1][None], place + 1)[0, -1].item()
    draft = oracle_draft(target, batch["input_ids"], 16, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    outputs, caches = [], []
    for assistant in (draft, None):
        lent = {CACHE_KEY: DynamicCache(config=target.config)} if is_lent else {"return_dict_in_generate": True}
        out = target.generate(
            **batch, assistant_model=assistant, max_new_tokens=16, do_sample=False, eos_token_id=end, **lent
        )
        outputs.append(out if is_lent else out.sequences)
        caches.append(lent[CACHE_KEY] if is_lent else get_cache(out))
    assert outputs[0].tolist() == outputs[1].tolist()
    ours, own = caches
    assert ours.get_seq_length() == own.get_seq_length() == outputs[1].shape[1] - 1
    real = torch.cat([batch["attention_mask"], torch.ones(3, outputs[1].shape[1] - 9, dtype=torch.long)], dim=1).bool()
    for row, sequence in enumerate(outputs[1]):
        new = sequence[8:].tolist()
        if end in new:  # the end token itself was never run
            real[row, 8 + new.index(end) :] = False
    for mine, theirs in zip(ours.layers, own.layers, strict=True):
        width = min(mine.keys.shape[2], theirs.keys.shape[2])
        assert mine.keys.shape[0] == 3 and width >= min(8, real.shape[1])
        for row in range(3):
            kept = real[row, -width:]
            for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                torch.testing.assert_close(
                    a[row, :, -width:][:, kept], b[row, :, -width:][:, kept], rtol=1e-4, atol=1e-4
                )


def test_cache_of_a_batch_can_be_continued():
    """The padding that ends short rows is masked, as a caller of plain `generate` has to do it."""
    target = shared_target()
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, 8, 5)])
    first = oracle_draft(target, batch["input_ids"], 12, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    texts = []
    for drafts in ((first, tiny_draft(target)), (None, None)):
        out = target.generate(**batch, assistant_model=drafts[0], **options)
        ids = torch.cat([out.sequences, random_prompt(4, batch_size=3, seed=3)], dim=1)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, 14, dtype=torch.long)], dim=1)
        cache = {CACHE_KEY: get_cache(out)}
        texts.append(
            target.generate(ids, attention_mask=mask, assistant_model=drafts[1], **options, **cache).sequences
        )
    assert texts[0].tolist() == texts[1].tolist()
    fresh = target.generate(ids, attention_mask=mask, **options).sequences
    assert texts[1].tolist() == fresh.tolist()


# --- other ways in ---------------------------------------------------------------------------------------------------


def test_embeddings_instead_of_ids(family):
    target, prompt = shared_target(family), random_prompt(PROMPT)
    with torch.no_grad():
        embeds = target.get_input_embeddings()(prompt)
    draft = oracle_draft(target, prompt, 16, [2, 0, 3, 1])
    out = assert_same_text(target, draft, {"inputs_embeds": embeds}, 16)
    assert out.sequences.tolist() == greedy(target, prompt, 16)[:, PROMPT:].tolist()
    assert max(out.acceptance_lengths[0]) == 4


def test_embeddings_beside_ids():
    target, prompt = shared_target(), random_prompt(PROMPT)
    with torch.no_grad():
        embeds = target.get_input_embeddings()(prompt)
    draft = oracle_draft(target, prompt, 16, [2, 0, 3, 1])
    assert_same_text(target, draft, {"input_ids": prompt, "inputs_embeds": embeds}, 16)


def test_embeddings_of_a_padded_batch():
    target = shared_target()
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, 8)])
    with torch.no_grad():
        embeds = target.get_input_embeddings()(batch["input_ids"])
    draft = oracle_draft(target, batch["input_ids"], 12, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    assert_same_text(target, draft, {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}, 12)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_chunked_prefill(family, chunk):
    """Case K03: the draft's context is that of an unchunked prefill, or the oracle would complain."""
    target, prompt = shared_target(family), random_prompt(11)
    draft = oracle_draft(target, prompt, 16, [2, 0, 3, 1])
    out = assert_same_text(target, draft, prompt, 16, prefill_chunk_size=chunk)
    assert out.sequences.tolist() == greedy(target, prompt, 16).tolist()
    assert max(out.acceptance_lengths[0]) == 4


def test_chunked_prefill_of_a_padded_batch():
    target = shared_target()
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, 11)])
    draft = oracle_draft(target, batch["input_ids"], 12, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    assert_same_text(target, draft, batch, 12, prefill_chunk_size=4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
def test_several_tokens_at_once_behind_a_filled_cache(family):
    """Case K03: the first of eight tokens gets what one token alone gets."""
    target, ids = shared_target(family), random_prompt(20)
    logits = []
    for width in (1, 8):
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(ids[:, :10], use_cache=True, **{CACHE_KEY: cache})
            logits.append(target(ids[:, 10 : 10 + width], use_cache=True, **{CACHE_KEY: cache}).logits[:, 0])
    torch.testing.assert_close(*logits)


def test_position_ids_and_mask_passed_by_hand():
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = tiny_draft(target)
    positions = torch.arange(3, 3 + PROMPT)[None]  # the text starts at position 3
    drafted, plain = (
        target.generate(
            prompt,
            position_ids=positions,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            max_new_tokens=12,
            do_sample=False,
        ).tolist()
        for assistant in (draft, None)
    )
    assert drafted == plain
