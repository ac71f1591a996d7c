"""Our draft under Transformers' own DFlash path, and our candidate generator under Transformers' own assisted loop.

`generation_config.speculation_type="dflash"` selects `DFlashTokenCandidateGenerator`: it embeds the block itself,
keeps the draft's states in a `DFlashCache` that it crops, and applies the target's bare head.

Shapes: B batch, S context, K block, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation import candidate_generator as native
from transformers.generation.utils import GenerationMixin

from dflash_hf.generation import DFlashCandidateGenerator, install_hook, remove_hook
from helpers import greedy, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding": {"layer_types": [SLIDING, SLIDING], "sliding_window": 6},
    "sliding, bidirectional": {"layer_types": [SLIDING, SLIDING], "sliding_window": 6, "is_causal": False},
    "sliding then full": {"layer_types": [SLIDING, FULL], "sliding_window": 6},
}
every_layer_type = pytest.mark.parametrize("layers", LAYERS)


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time Transformers' own DFlash generator was asked for candidates."""
    calls: list[int] = []
    original = native.DFlashTokenCandidateGenerator.get_candidates

    def counted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(input_ids.shape[1])
        return original(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(native.DFlashTokenCandidateGenerator, "get_candidates", counted)
    return calls


def generate_natively(
    target: Any, draft: Any, prompt: torch.Tensor, max_new_tokens: int, **kwargs: Any
) -> torch.Tensor:
    return target.generate(
        prompt,
        assistant_model=draft,
        speculation_type="dflash",
        max_new_tokens=max_new_tokens,
        **{"do_sample": False, **kwargs},
    )


@contextmanager
def blocks_of(draft: Any) -> Iterator[list[dict[str, Any]]]:
    """What the draft was given and returned, one entry a forward."""
    blocks: list[dict[str, Any]] = []

    def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        blocks.append(
            {
                "context": kwargs["context_hidden_states"].clone(),
                "block": kwargs["noise_embeds"].clone(),
                "positions": kwargs["position_ids"].clone(),
                "states": output.last_hidden_state.clone(),
            }
        )

    handle = draft.register_forward_hook(record, with_kwargs=True)
    try:
        yield blocks
    finally:
        handle.remove()


# --- Transformers' own path


@every_layer_type
def test_native_path_says_what_the_target_says(target, layers, native_calls):
    draft = tiny_draft(target, **LAYERS[layers])
    prompt = random_prompt(9)
    assert torch.equal(generate_natively(target, draft, prompt, 24), greedy(target, prompt, 24))
    assert native_calls


@every_layer_type
def test_native_cache_gives_the_states_that_no_cache_gives(qwen3, layers):
    """Every block's states are those of one forward over all context so far, beyond the window, too."""
    draft = tiny_draft(qwen3, **LAYERS[layers])
    with blocks_of(draft) as blocks:
        generate_natively(qwen3, draft, random_prompt(9), 24)
    assert len(blocks) > 5
    for number, block in enumerate(blocks):
        context = torch.cat([earlier["context"] for earlier in blocks[: number + 1]], dim=1)
        end = context.shape[1] + block["block"].shape[1]
        assert block["positions"][0].tolist() == list(range(end))[-block["positions"].shape[1] :]
        with torch.no_grad():
            expected = draft(block["block"], context).last_hidden_state
        torch.testing.assert_close(block["states"], expected, rtol=1e-5, atol=1e-5)


@every_layer_type
def test_native_path_and_our_loop_draft_the_same_blocks(layers):
    target = tiny_target("qwen3", vocab_size=8)  # small, so that a random draft is right now and then
    draft = tiny_draft(target, **LAYERS[layers])
    prompt = random_prompt(9, vocabulary=8)
    with blocks_of(draft) as theirs:
        generate_natively(target, draft, prompt, 40)
    with blocks_of(draft) as ours:
        target.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False)
    full = [block for block in ours if block["block"].shape[1] == 4]  # ours shrinks the last ones
    assert len(full) > 5
    for mine, other in zip(full, theirs, strict=False):
        assert mine["positions"].tolist() == other["positions"].tolist()
        torch.testing.assert_close(mine["context"], other["context"])
        torch.testing.assert_close(mine["block"], other["block"])
        torch.testing.assert_close(mine["states"], other["states"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
def test_native_path_with_other_block_sizes(qwen3, block_size, native_calls):
    draft = tiny_draft(qwen3, block_size=block_size)
    prompt = random_prompt(5)
    assert torch.equal(generate_natively(qwen3, draft, prompt, 20), greedy(qwen3, prompt, 20))
    assert native_calls


def test_native_path_samples_with_our_draft(qwen3, native_calls):
    prompt = random_prompt(5)
    torch.manual_seed(0)
    tokens = generate_natively(qwen3, tiny_draft(qwen3), prompt, 20, do_sample=True, top_k=0)
    assert tokens.shape == (1, 25)
    assert native_calls


def test_native_path_of_other_drafts_is_left_alone(qwen3, native_calls):
    """The hook passes `speculation_type="dflash"` through, whoever the assistant is."""
    remove_hook()
    try:
        without = generate_natively(qwen3, tiny_draft(qwen3), random_prompt(5), 12)
    finally:
        install_hook()
    assert torch.equal(without, generate_natively(qwen3, tiny_draft(qwen3), random_prompt(5), 12))


def test_native_path_of_the_real_pair(real_pair, native_calls):
    prompt = real_pair.tokenizer("The capital of France is", return_tensors="pt").input_ids
    tokens = generate_natively(real_pair.target, real_pair.draft, prompt, 16)
    assert torch.equal(tokens, greedy(real_pair.target, prompt, 16))
    assert native_calls


# --- Transformers' own assisted loop, with our candidate generator


@contextmanager
def stock_loop(target: Any, draft: Any) -> Iterator[list[DFlashCandidateGenerator]]:
    """Undo the hook and hand our generator to Transformers' loop; yields the generators that it was given."""
    generators: list[DFlashCandidateGenerator] = []

    def hand_over(generation_config: Any, *args: Any, **kwargs: Any) -> DFlashCandidateGenerator:
        generators.append(DFlashCandidateGenerator(draft, target, generation_config, kwargs.get("logits_processor")))
        return generators[-1]

    remove_hook()
    assert not hasattr(GenerationMixin._assisted_decoding, "__wrapped__")
    target._get_candidate_generator = hand_over
    try:
        yield generators
    finally:
        del target._get_candidate_generator
        install_hook()


@pytest.mark.parametrize("depth", [0, 1, 2, 3, [3, 0, 2, 1, 1]])
def test_stock_loop_says_what_the_target_says_at_every_depth(target, depth):
    prompt = random_prompt(7)
    draft = oracle_draft(target, prompt, 24, depth)
    with stock_loop(target, draft) as generators, blocks_of(draft) as blocks:
        tokens = target.generate(prompt, assistant_model=draft, max_new_tokens=24, do_sample=False)
    assert torch.equal(tokens, greedy(target, prompt, 24))
    assert len(generators) == 1
    if isinstance(depth, int):  # the oracle's truth was accepted: the first token is the prefill's
        assert len(blocks) == pytest.approx(23 / (depth + 1), abs=1)


@every_layer_type
def test_stock_loop_and_ours_draft_the_same_blocks(layers):
    target = tiny_target("llama", vocab_size=8)
    draft = tiny_draft(target, **LAYERS[layers])
    prompt = random_prompt(9, vocabulary=8)
    with stock_loop(target, draft), blocks_of(draft) as theirs:
        tokens = target.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False)
    with blocks_of(draft) as ours:
        assert torch.equal(tokens, target.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False))
    assert len(theirs) == len(ours) > 5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["positions"].tolist() == other["positions"].tolist()
        torch.testing.assert_close(mine["states"], other["states"])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_stock_loop_at_any_length(qwen3, count, length):
    prompt = random_prompt(length)
    draft = oracle_draft(qwen3, prompt, count, 3)
    with stock_loop(qwen3, draft):
        tokens = qwen3.generate(prompt, assistant_model=draft, max_new_tokens=count, do_sample=False)
    assert torch.equal(tokens, greedy(qwen3, prompt, count))


def test_stock_loop_with_a_logits_processor(qwen3):
    prompt, settings = random_prompt(7), {"repetition_penalty": 1.3}
    draft = oracle_draft(qwen3, prompt, 24, 2, generate_kwargs=settings)
    with stock_loop(qwen3, draft), blocks_of(draft) as blocks:
        tokens = qwen3.generate(prompt, assistant_model=draft, max_new_tokens=24, do_sample=False, **settings)
    assert torch.equal(tokens, greedy(qwen3, prompt, 24, **settings))
    assert len(blocks) < 23


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 3}])
def test_stock_loop_samples_the_targets_distribution(settings):
    """Three tokens over a vocabulary of four, against their exact joint distribution; two of them are drafted."""
    target = tiny_target("qwen3", vocab_size=4, seed=5)
    draft = tiny_draft(target, block_size=3)
    prompt = random_prompt(4, vocabulary=4)
    runs = 400
    torch.manual_seed(0)
    seen: Counter[tuple[int, ...]] = Counter()
    with stock_loop(target, draft):
        for _ in range(runs):
            tokens = target.generate(
                prompt, assistant_model=draft, max_new_tokens=3, do_sample=True, **{"top_k": 0, **settings}
            )
            seen[tuple(tokens[0, 4:].tolist())] += 1
    exact = exact_distribution(target, prompt, settings.get("temperature", 1.0), settings.get("top_k", 4))
    assert set(seen) <= {outcome for outcome, chance in exact.items() if chance > 0}
    common = [outcome for outcome, chance in exact.items() if chance * runs >= 5]
    observed = [seen[outcome] for outcome in common]
    expected = [exact[outcome] * runs for outcome in common]
    if len(common) < len(exact):
        observed.append(runs - sum(observed))
        expected.append(runs - sum(expected))
    kept = [i for i, value in enumerate(expected) if value > 1e-9]
    assert len(kept) >= 6
    assert chisquare([observed[i] for i in kept], [expected[i] for i in kept]).pvalue > 1e-3


@torch.no_grad()
def exact_distribution(
    target: Any, prompt: torch.Tensor, temperature: float, top_k: int
) -> dict[tuple[int, ...], float]:
    """Probability of each continuation of three tokens, by running the target on every prefix."""
    exact = {}
    for outcome in product(range(4), repeat=3):
        chance, ids = 1.0, prompt
        for token in outcome:
            logits = target(ids).logits[0, -1] / temperature
            kept = logits >= logits.topk(top_k).values[-1]
            chance *= float(logits.masked_fill(~kept, -torch.inf).softmax(-1)[token])
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        exact[outcome] = chance
    return exact
