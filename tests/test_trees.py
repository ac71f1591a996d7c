"""Draft trees: the best tree there is, verified as if every path had been run alone, and never a token of its own.

Shapes: B batch, P depths, N nodes, W = N + 1, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from comparing import assert_same_text, generate_both, shared_target
from dflash_hf.generation import decoding, tree_support
from dflash_hf.generation.row_layout import RightAligned
from dflash_hf.generation.target_runner import TargetRunner
from dflash_hf.generation.tree import Tree, build_tree, walk
from helpers import FAMILIES, greedy, left_padded, on_every_device, random_prompt, tiny_target
from hybrid_targets import hybrid_target
from oracle import oracle_draft
from test_generate_sampling import SETTINGS, exact_distribution, p_value, sampled, tiny_pair


def with_tree(draft: Any, budget: Any) -> Any:
    draft.generation_config.draft_tree_budget = budget
    return draft


# --- which tree ------------------------------------------------------------------------------------------------------


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root down to every node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def all_prefixes(log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every prefix of every depth with its log-probability, from those of one row (P, V)."""
    depths, vocabulary = log_probs.shape
    return {
        prefix: float(sum(log_probs[place, token] for place, token in enumerate(prefix)))
        for depth in range(1, depths + 1)
        for prefix in itertools.product(range(vocabulary), repeat=depth)
    }


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    depths=st.integers(1, 4),
    vocabulary=st.integers(2, 4),
    budget=st.integers(1, 30),
    gain=st.sampled_from([0.0, 1.0, 20.0]),
)
def test_tree_holds_the_most_probable_prefixes(
    seed: int, depths: int, vocabulary: int, budget: int, gain: float
) -> None:
    """Against all prefixes there are. A gain of 0 makes every one of a depth equally likely."""
    scores = torch.randn(2, depths, vocabulary, generator=torch.Generator().manual_seed(seed)) * gain
    tree = build_tree(scores, budget)
    for row, log_probs in enumerate(scores.double().log_softmax(dim=-1)):
        every = all_prefixes(log_probs)
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths) == min(budget, len(every)) + 1
        best = sorted(every.values(), reverse=True)[: len(paths) - 1]
        found = [every[path] for path in paths[1:]]
        assert sorted(found, reverse=True) == pytest.approx(best, abs=1e-4)
        assert tree.log_probs[row].tolist() == pytest.approx(found, abs=1e-4)
        assert tree.depths[row].tolist() == [len(path) for path in paths]
        for node, path in enumerate(paths):
            above = [other for other, prefix in enumerate(paths) if path[: len(prefix)] == prefix]
            assert tree.ancestors[row, node].nonzero().flatten().tolist() == above


@pytest.mark.parametrize("budget", range(1, 8))
def test_expected_acceptance_is_never_below_that_of_any_other_tree(budget: int) -> None:
    """The surrogate that DDTree maximises, against every tree of that size: sets that hold every parent."""
    log_probs = (
        (torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(budget)) * 2).double().log_softmax(dim=-1)
    )
    probability = {prefix: float(torch.tensor(value).exp()) for prefix, value in all_prefixes(log_probs[0]).items()}
    best = max(
        sum(probability[prefix] for prefix in chosen)
        for chosen in itertools.combinations(probability, budget)
        if all(len(prefix) == 1 or prefix[:-1] in chosen for prefix in chosen)
    )
    found = sum(probability[path] for path in paths_of(build_tree(log_probs, budget), 0)[1:])
    assert found == pytest.approx(best, abs=1e-6)


def test_expected_acceptance_is_never_below_the_chains() -> None:
    scores = torch.randn(64, 6, 9, generator=torch.Generator().manual_seed(0)) * 2
    chain = scores.softmax(dim=-1).amax(dim=-1).cumprod(dim=1).sum(dim=1)
    last = chain
    for budget in (6, 8, 16, 64):
        tree = build_tree(scores, budget).log_probs.exp().sum(dim=1)
        assert (tree >= last - 1e-5).all()
        last = tree
    assert (last > chain + 0.1).any()


@on_every_device
def test_walk_follows_the_target_down_and_stops_where_it_leaves(device: Any) -> None:
    """A tree of known shape: 7 and 8 behind the anchor, 5 behind each of them."""
    scores = torch.full((1, 2, 10), -9.0)
    scores[0, 0, 7], scores[0, 0, 8], scores[0, 1, 5] = 0.0, -0.1, 0.0
    tree = build_tree(scores, 4)
    assert paths_of(tree, 0) == [(), (7,), (8,), (7, 5), (8, 5)]
    for choices, path in (([8, 1, 5, 2, 3], [8, 5, 3]), ([8, 1, 6, 2, 3], [8, 6]), ([9, 5, 5, 5, 5], [9])):
        target = torch.nn.functional.one_hot(torch.tensor([choices]), 10).float() * 50
        for do_sample in (False, True):
            with device():
                assert walk(tree, target, do_sample).to_host() == [path]


@on_every_device
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 20), st.integers(0, 99))
def test_walk_of_any_tree_finds_the_path_that_the_targets_choices_are(
    device: Any, rows: int, depths: int, budget: int, seed: int
) -> None:
    """Against following the choices through the tokens of all paths, and the nodes that they stand on."""
    generator = torch.Generator().manual_seed(seed)
    tree = build_tree(torch.randn(rows, depths, 5, generator=generator), budget)
    scores = torch.randn(rows, tree.depths.shape[1], 5, generator=generator)
    with device():
        verdict = walk(tree, scores, do_sample=False)
    for row, tokens in enumerate(verdict.to_host()):
        paths, path, nodes = paths_of(tree, row), (), []
        while path in paths:
            nodes.append(paths.index(path))
            path = (*path, int(scores[row, nodes[-1]].argmax()))
        assert tuple(tokens) == path
        assert verdict.order[row, : len(nodes)].tolist() == nodes


# --- verification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("family", "window"),
    [("qwen3", None), ("mistral", 2), ("mistral", 3), ("gemma3", 3), ("gemma3", 9), ("gpt_oss", 3)],
)
def test_every_node_is_judged_as_at_the_end_of_its_own_path(
    family: str, window: int | None, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node's logits in the one tree forward, against a plain forward over the row and the path, alone."""
    if (family, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("GPT-OSS has no sdpa attention: its sinks need the scores")
    overrides = {"sliding_window": window} if window else {}
    # Eager padding is NaN in float64, in Transformers itself: the softmax is in float32, where the mask is infinite.
    dtype = torch.float32 if attention == "eager" else torch.float64
    target = tiny_target(family, dtype=dtype, attn_implementation=attention, **overrides)
    rows = [random_prompt(length, seed=length)[0] for length in (2, 9, 5)]
    inputs = left_padded(rows)
    draft = with_tree(
        oracle_draft(
            target, inputs["input_ids"], 12, [4, 1, 5], attention_mask=inputs["attention_mask"], block_size=7
        ),
        24,
    )
    checked = 0
    original = TargetRunner.verify
    running: list[Any] = []
    round_of = decoding.DecodingLoop._round
    monkeypatch.setattr(decoding.DecodingLoop, "_round", lambda loop: (running.append(loop), round_of(loop))[1])

    def verify(runner: Any, block_ids: torch.Tensor, tree: Tree | None = None) -> Any:
        nonlocal checked
        outputs = original(runner, block_ids, tree)
        if tree is None or not running:
            return outputs
        loop = running[-1]
        for index, row in enumerate(loop.rows):
            padding = inputs["input_ids"].shape[1] - len(rows[row])
            prefix = loop.sequences.prefix(row)[0, padding:]
            for node, path in enumerate(paths_of(tree, index)):
                if checked % 3 == 0:  # a third of them, to keep it short
                    alone = target(torch.cat([prefix, prefix.new_tensor(path)])[None], use_cache=False).logits[0, -1]
                    slack = 1e-3 if dtype == torch.float32 else 1e-9  # a wrong key shows in the first digits
                    assert torch.allclose(outputs.logits[index, node], alone, rtol=0, atol=slack), (row, path)
                checked += 1
        return outputs

    monkeypatch.setattr(TargetRunner, "verify", verify)
    monkeypatch.setitem(tree_support._answers, target, {attention: None})  # its trial has no prefix
    output = target.generate(
        **inputs, assistant_model=draft, max_new_tokens=10, do_sample=False, return_dict_in_generate=True
    )
    assert checked > 100
    assert max(map(max, output.acceptance_lengths)) > 4, "deeper than the narrow windows"


@pytest.mark.parametrize("budget", [1, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_tree_of_a_ragged_batch_gives_every_row_its_own_text(name: str, budget: int) -> None:
    target = shared_target(name)
    rows = [random_prompt(length, seed=length)[0] for length in (3, 9, 6)]
    inputs = left_padded(rows)
    draft = oracle_draft(target, inputs["input_ids"], 16, [0, 3, 1, 2, 3], attention_mask=inputs["attention_mask"])
    output = target.generate(
        **inputs,
        assistant_model=with_tree(draft, budget),
        max_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
    )
    for row, text in zip(rows, output.sequences, strict=True):
        assert text[9:].tolist() == greedy(target, row[None], 16)[0, len(row) :].tolist()
    longest = max(map(max, output.acceptance_lengths))
    assert longest == 2 if budget == 1 else longest >= 4


def test_tree_accepts_what_a_chain_loses() -> None:
    """A draft whose second choice is right: a chain stops at once, a tree of two choices a depth goes on."""
    target, prompt = shared_target(), random_prompt(7)
    draft = oracle_draft(target, prompt, 20, 3)
    told = draft.compute_logits

    def second_choice(states: torch.Tensor, head: Any) -> torch.Tensor:
        logits = told(states, head)
        best = logits.argmax(dim=-1, keepdim=True)
        return logits.scatter(-1, (best + 1) % logits.shape[-1], 16.0)

    draft.compute_logits = second_choice
    chain = assert_same_text(target, draft, prompt, 20).acceptance_lengths[0]
    tree = assert_same_text(target, with_tree(draft, 14), prompt, 20).acceptance_lengths[0]
    assert set(chain) == {1}
    assert set(tree[:-1]) == {4}


# --- processors, sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"prefix_allowed_tokens_fn": lambda _, ids: [token for token in range(64) if token % 3 == int(ids[-1]) % 2]},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(1, 40))},
    ],
    ids=["repetition_penalty", "constraint", "ngram", "pointwise"],
)
def test_processors_see_each_nodes_own_path(options: dict[str, Any]) -> None:
    target, prompt = shared_target(), random_prompt(7)
    draft = oracle_draft(target, prompt, 20, 3, generate_kwargs=options)
    output = assert_same_text(target, with_tree(draft, 12), prompt, 20, **options)
    assert max(output.acceptance_lengths[0]) > 1


@pytest.mark.parametrize("setting", ["bare", "top_k", "repetition_penalty", "constraint"])
@pytest.mark.parametrize("kind", ["near", "far"])
@on_every_device
def test_text_has_the_targets_distribution(device: Any, kind: str, setting: str) -> None:
    """The first three tokens together, hence also each alone and each behind a mismatch, which comes in every text."""
    target, draft = tiny_pair(kind)
    with device():
        ids, lengths = sampled(target, with_tree(draft, 2), 2500, 250, **SETTINGS[setting])
    refused = sum(row[0] == 1 for row in lengths) / len(lengths)
    assert 0.02 < refused < 0.98, "both outcomes must be there"
    assert p_value(ids, exact_distribution(target, **SETTINGS[setting])) > 1e-3


def test_distribution_holds_for_single_sequences_and_after_a_mismatch() -> None:
    target, draft = tiny_pair("far")
    ids, lengths = sampled(target, with_tree(draft, 3), 600, 1, top_k=0)
    first, second = exact_distribution(target, 1, top_k=0), exact_distribution(target, 2, top_k=0)
    assert p_value(ids[:, :1], first) > 1e-3
    assert p_value(ids[:, :2], second) > 1e-3
    # The tree's content is fixed by the anchor, so a mismatch is the target's own draw of a token outside of it; the
    # token behind it must be the target's, given the two before.
    third = exact_distribution(target, top_k=0).view(5, 5, 5)
    missed = torch.tensor([row[0] == 1 for row in lengths])
    pairs = [(a, b, ids[missed & (ids[:, 0] == a) & (ids[:, 1] == b)]) for a in range(5) for b in range(5)]
    tested = [(third[a, b] / third[a, b].sum(), rows[:, 2:]) for a, b, rows in pairs if len(rows) >= 30]
    assert len(tested) >= 3
    for expected, rows in tested:
        assert p_value(rows, expected) > 1e-3


def test_distribution_test_notices_a_tree_that_keeps_what_the_draft_liked(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_pair("far")

    def biased(tree: Tree, scores: torch.Tensor, do_sample: bool) -> Any:
        scores = scores.clone()
        scores[:, 0].scatter_add_(1, tree.tokens[:, :1], torch.ones(len(scores), 1))
        return walk(tree, scores, do_sample)

    monkeypatch.setattr(decoding, "walk", biased)
    ids, _ = sampled(target, with_tree(draft, 6), 2500, 250, top_k=0)
    assert p_value(ids, exact_distribution(target, top_k=0)) < 1e-6


# --- targets and calls that take a chain -----------------------------------------------------------------------------


class Remembering(LogitsProcessor):
    """May keep state, for all anyone knows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Changes nothing."""
        return scores


def test_warns_once_and_drafts_a_chain(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    qwen3 = shared_target()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (qwen3, {"logits_processor": [Remembering()]}, "may remember what it was shown"),
        (
            tiny_target(attn_implementation="eager"),
            {"output_attentions": True},
            "`output_attentions` describes one path",
        ),
        (hybrid_target("lfm2"), {}, "columns cannot be picked one by one"),
    ]
    for target, options, reason in cases:
        prompt = random_prompt(7)
        draft = with_tree(oracle_draft(target, prompt, 12, 2), 16)
        decoding.logger.warning_once.cache_clear()
        caplog.clear()
        for _ in range(2):
            drafted, plain = generate_both(target, draft, prompt, 12, **options)
            assert drafted.sequences.tolist() == plain.sequences.tolist()
        warnings = [record.message for record in caplog.records if "chain instead of a tree" in record.message]
        assert len(warnings) == 1
        assert reason in warnings[0]
        assert max(drafted.acceptance_lengths[0]) == 3


@pytest.mark.parametrize(
    ("attention", "has_positions", "reason"),
    [
        ("flex_attention", True, "attention implementation 'flex_attention' of Qwen3ForCausalLM takes no 4-D mask"),
        ("sdpa", False, "Qwen3ForCausalLM takes no position ids"),
    ],
)
def test_target_that_is_known_to_take_chains_only(attention: str, has_positions: bool, reason: str) -> None:
    runner = SimpleNamespace(
        target=tiny_target(attn_implementation=attention),
        cache=SimpleNamespace(layers=[]),
        last_position=torch.zeros(1, 1) if has_positions else None,
    )
    assert tree_support.why_no_tree(runner, torch.ones(1, 1).long()) == reason


def test_target_that_ignores_the_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = tiny_target(), random_prompt(7)
    draft = with_tree(oracle_draft(target, prompt, 12, 2), 16)
    original = RightAligned.mask
    monkeypatch.setattr(
        RightAligned, "mask", lambda rows, width, tree: original(rows, width, tree) | True if tree else None
    )
    output = assert_same_text(target, draft, prompt, 12)
    assert tree_support._answers[target] == {"sdpa": "Qwen3ForCausalLM ignores a 4-D mask"}
    assert set(output.acceptance_lengths[0][:-1]) == {3}
