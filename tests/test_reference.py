"""Against the reference implementation: z-lab's own model and loop, as published in the package `dflash` 0.1.0.

Both sides get the same weights. The reference takes `noise_embedding`, `target_hidden` and a Transformers cache, which
it crops after every block; ours keeps the context in a `DraftCache` and never stores a block.

Shapes: B batch, S context, K block, H hidden, L taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from dflash_hf import DFlashConfig, Qwen3DFlashForDraft
from helpers import SHARED_DRAFT, random_prompt, requires_shared, scramble, tiny_target

dflash = pytest.importorskip(
    "dflash.model", reason="needs the reference implementation, `pip install --no-deps dflash==0.1.0`"
)

VOCABULARY = 5  # small, so that a random draft is right now and then
MASK, BLOCK, WINDOW, TAPS = VOCABULARY - 1, 4, 6, [0, 2]
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": [FULL, FULL],
    "sliding": [SLIDING, SLIDING],
    "sliding then full": [SLIDING, FULL],
    "full then sliding": [FULL, SLIDING],
}
every_layer_type = pytest.mark.parametrize("layers", LAYERS)
every_causality = pytest.mark.parametrize("is_causal", [None, True, False])


def tiny_pair(layers: Sequence[str], is_causal: bool | None, seed: int = 1, **fields: Any) -> tuple[Any, Any]:
    """The reference's draft and ours, float32, with the same random weights, from the same fields."""
    has_window = SLIDING in layers
    body = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_types": list(layers),
        "sliding_window": WINDOW if has_window else None,
        "use_sliding_window": has_window,
        "block_size": BLOCK,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
        **({} if is_causal is None else {"is_causal": is_causal}),
        **fields,
    }
    theirs = dflash.DFlashDraftModel(Qwen3Config(**body)).eval()
    ours = Qwen3DFlashForDraft(DFlashConfig(**body)).eval()
    scramble(theirs, seed)
    ours.load_state_dict(theirs.state_dict())  # strict: the names are z-lab's
    return theirs, ours


def assert_same_rounds(theirs: Any, ours: Any, contexts: Sequence[int], num_taps: int, tolerance: float) -> None:
    """Feed both drafts several rounds of new context and a block, each with its cache; states must agree in each."""
    generator = torch.Generator().manual_seed(5)
    hidden = ours.config.hidden_size
    their_cache, our_cache = dflash._make_cache(theirs.config), ours.new_cache()
    start = 0
    for new in contexts:
        taps = torch.randn(1, new, num_taps * hidden, generator=generator)
        block = torch.randn(1, ours.config.block_size, hidden, generator=generator)
        positions = torch.arange(start, start + new + block.shape[1])[None]
        expected = theirs(
            position_ids=positions,
            noise_embedding=block,
            target_hidden=taps,
            past_key_values=their_cache,
            use_cache=True,
        )
        start += new
        dflash._crop_to(their_cache, start)
        our_cache.begin_round(positions, [new])
        states = ours(block, taps, positions, cache=our_cache).last_hidden_state
        torch.testing.assert_close(states, expected, rtol=tolerance, atol=tolerance)
        assert our_cache.get_seq_length() == their_cache.get_seq_length() == start


@every_causality
@every_layer_type
@torch.no_grad()
def test_hidden_states_without_cache(layers, is_causal):
    theirs, ours = tiny_pair(LAYERS[layers], is_causal)
    generator = torch.Generator().manual_seed(5)
    for context in (1, 3, 5, 6, 7, 20):  # below, at and beyond the window
        taps = torch.randn(2, context, 64, generator=generator)
        block = torch.randn(2, BLOCK, 32, generator=generator)
        positions = torch.arange(context + BLOCK)[None]
        expected = theirs(position_ids=positions, noise_embedding=block, target_hidden=taps)
        states = ours(block, taps).last_hidden_state
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


@every_causality
@every_layer_type
@torch.no_grad()
def test_hidden_states_over_rounds_with_the_cache(layers, is_causal):
    theirs, ours = tiny_pair(LAYERS[layers], is_causal)
    assert_same_rounds(theirs, ours, [9, 3, 1, 4, 2, 1, 1, 4, 4], num_taps=2, tolerance=1e-5)


@every_causality
@torch.no_grad()
def test_hidden_states_from_a_context_of_one_token(is_causal):
    theirs, ours = tiny_pair(LAYERS["sliding then full"], is_causal)
    assert_same_rounds(theirs, ours, [1, 1, 2, 4, 1, 3, 4], num_taps=2, tolerance=1e-5)


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@torch.no_grad()
def test_hidden_states_of_other_block_sizes(block_size):
    theirs, ours = tiny_pair(LAYERS["sliding then full"], None, block_size=block_size, sliding_window=17)
    assert_same_rounds(theirs, ours, [12, 2, block_size, 1, block_size], num_taps=2, tolerance=1e-5)


@torch.no_grad()
def test_hidden_states_of_one_layer_with_more_taps_than_layers():
    taps = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2, 3]}
    theirs, ours = tiny_pair([FULL], None, dflash_config=taps)
    assert_same_rounds(theirs, ours, [7, 2, 4], num_taps=4, tolerance=1e-5)


@pytest.mark.parametrize("attention_bias", [False, True])
@torch.no_grad()
def test_hidden_states_with_biased_projections(attention_bias):
    theirs, ours = tiny_pair([FULL, FULL], None, attention_bias=attention_bias)
    assert ("layers.0.self_attn.o_proj.bias" in ours.state_dict()) is attention_bias
    assert_same_rounds(theirs, ours, [7, 2, 4], num_taps=2, tolerance=1e-5)


@pytest.mark.parametrize("num_target_layers", [5, 12, 24, 28, 32, 36, 47])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 8])
def test_default_taps_are_the_references(num_target_layers, num_layers):
    config = DFlashConfig(num_target_layers=num_target_layers, num_hidden_layers=num_layers, mask_token_id=1)
    assert config.target_layer_ids == dflash.build_target_layer_ids(num_target_layers, num_layers)


# --- the loop


def reference_run(theirs: Any, target: Any, prompt: torch.Tensor, max_new_tokens: int, stop: list[int] | None) -> Any:
    """The reference's own loop. Its statistics ask for CUDA's clock; only the clock is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash, "_cuda_time", lambda: 0.0)
        return dflash.dflash_generate(theirs, target, prompt, max_new_tokens, stop, return_stats=True)


def our_run(ours: Any, target: Any, prompt: torch.Tensor, max_new_tokens: int, stop: list[int] | None) -> Any:
    return target.generate(
        prompt,
        assistant_model=ours,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop,
        return_dict_in_generate=True,
    )


def assert_same_run(theirs: Any, ours: Any, target: Any, prompt: torch.Tensor, count: int, stop: Any = None) -> Any:
    expected = reference_run(theirs, target, prompt, count, stop)
    output = our_run(ours, target, prompt, count, stop)
    assert output.sequences.tolist() == expected.output_ids.tolist()
    assert output.acceptance_lengths == [expected.acceptance_lengths]
    return expected


@every_causality
@every_layer_type
def test_tokens_and_every_acceptance_length_of_the_loop(layers, is_causal):
    theirs, ours = tiny_pair(LAYERS[layers], is_causal, seed=2)
    target = tiny_target("qwen3", seed=1, dtype=torch.float32, vocab_size=VOCABULARY)
    run = assert_same_run(theirs, ours, target, random_prompt(8, vocabulary=VOCABULARY, seed=1), 48)
    assert {1, 4} <= set(run.acceptance_lengths), "all or nothing was accepted: this pair shows little"


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 31])
def test_loop_ends_alike_at_any_number_of_new_tokens(family, count):
    theirs, ours = tiny_pair(LAYERS["full"], None)
    target = tiny_target(family, dtype=torch.float32, vocab_size=VOCABULARY)
    assert_same_run(theirs, ours, target, random_prompt(3, vocabulary=VOCABULARY), count)


def test_loop_ends_alike_at_a_stop_token():
    theirs, ours = tiny_pair(LAYERS["full"], None)
    target = tiny_target("qwen3", dtype=torch.float32, vocab_size=VOCABULARY)
    prompt = random_prompt(8, vocabulary=VOCABULARY, seed=1)
    text = reference_run(theirs, target, prompt, 48, None).output_ids[0, 8:].tolist()
    for stop in sorted(set(text)):
        run = assert_same_run(theirs, ours, target, prompt, 48, [stop])
        assert run.num_output_tokens == text.index(stop) + 1


def test_loop_from_a_prompt_of_one_token():
    theirs, ours = tiny_pair(LAYERS["sliding then full"], None)
    target = tiny_target("qwen3", dtype=torch.float32, vocab_size=VOCABULARY)
    assert_same_run(theirs, ours, target, torch.tensor([[3]]), 40)


# --- the real checkpoint

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits that are red.",
    "A train leaves at 9:40 and arrives at 11:15. How long does the journey take?",
    "Translate into German: The weather is nice today.",
    "Tell me a short story about a fox who wanted to learn to swim.",
    "Which of these numbers is prime: 21, 27, 29, 33? Say why.",
    "Summarise: Bees live in colonies. A colony has one queen, many workers and some drones. Workers collect nectar "
    "and pollen, make honey and build the comb. In winter the bees gather around the queen and keep her warm.",
    "Write an e-mail in which you ask your landlord to repair the heating.",
]


@pytest.fixture(scope="module")
def their_real_draft() -> Any:
    if not SHARED_DRAFT.is_dir():
        pytest.skip(f"needs the draft in {SHARED_DRAFT}")
    return dflash.DFlashDraftModel.from_pretrained(SHARED_DRAFT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def our_real_draft() -> Any:
    return Qwen3DFlashForDraft.from_pretrained(SHARED_DRAFT, dtype=torch.float32).eval()


@requires_shared
def test_real_checkpoint_has_the_same_tensors_under_the_same_names(their_real_draft, our_real_draft):
    theirs, ours = their_real_draft.state_dict(), our_real_draft.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@requires_shared
@torch.no_grad()
def test_real_checkpoint_gives_the_same_hidden_states(their_real_draft, our_real_draft):
    assert_same_rounds(their_real_draft, our_real_draft, [40, 3, 1, 8, 2, 1, 5], num_taps=5, tolerance=1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_real_pair_says_the_same_and_accepts_the_same_in_every_round(prompt, their_real_draft, real_pair):
    inputs = real_pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    run = assert_same_run(
        their_real_draft,
        real_pair.draft,
        real_pair.target,
        inputs["input_ids"],
        24,
        [real_pair.tokenizer.eos_token_id],
    )
    assert len(run.acceptance_lengths) >= 1
