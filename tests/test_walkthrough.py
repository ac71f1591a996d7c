"""One round of DFlash, step by step, with the numbers of the method's worked example.

A target of 12 layers, hidden size 512, 8 heads of 64; a draft of 2 layers that taps the target's layers 3, 7 and 11; a
block of 4; and a prompt of three tokens, "The cat sat" at positions 0, 1, 2. The target's prefill yields "on" at
position 3, the draft proposes "the", "mat", ".", the target wants "the", "mat", "in". Which token ids these words are
is read off the target: "on" is what it says first, and so on.

The example's last step contradicts itself: its formula `start = 3 + acceptance + 1` gives 6, its comment says 7. The
formula is right and is followed here: "in" sits at position 6 and is the next anchor, so the target's cache holds
positions 0 to 5.

Shapes: S = 3 context, K = 4 block, H = 512 hidden, V vocabulary, L = 3 taps, N = 8 heads, D = 64 head size.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from dflash_hf.generation.compat import get_cache
from dflash_hf.generation.verification import accept_greedy
from dflash_hf.modeling_dflash import apply_rotary_pos_emb
from helpers import greedy, tiny_target
from oracle import OracleDraft, oracle_draft

HIDDEN, HEADS, HEAD_DIM, TAPS, BLOCK = 512, 8, 64, [3, 7, 11], 4
PROMPT = torch.tensor([[11, 22, 33]])  # "The cat sat"
WORDS = ("The", "cat", "sat", "on", "the", "mat", "in")
NEW_TOKENS = 12
# Qwen3's norm and rotation compute in float32 whatever the dtype.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(
        "qwen3",
        num_hidden_layers=12,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
    )


@pytest.fixture(scope="module")
def draft(target: Any) -> OracleDraft:
    """Two of three proposals are right in every round, the third is wrong."""
    return oracle_draft(
        target,
        PROMPT,
        NEW_TOKENS,
        depth=2,
        block_size=BLOCK,
        target_layer_ids=TAPS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
    )


@pytest.fixture(scope="module")
def text(target: Any) -> torch.Tensor:
    """What the target says on its own: positions 0, 1, 2, ... (3 + 12,)."""
    return greedy(target, PROMPT, NEW_TOKENS)[0]


@pytest.fixture(scope="module")
def words(text: torch.Tensor, draft: OracleDraft) -> dict[str, int]:
    """Token ids of the example's words; "." is the oracle's wrong proposal for position 6."""
    ids = dict(zip(WORDS, text.tolist(), strict=False))
    return ids | {".": (ids["in"] + 1) % draft.config.vocab_size, "MASK": draft.config.mask_token_id}


@pytest.fixture(scope="module")
@torch.no_grad()
def taps(target: Any) -> torch.Tensor:
    """Step 1's `target_hidden`, (1, 3, 1536)."""
    states = target(PROMPT, output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1] for layer in TAPS], dim=-1)


@pytest.fixture(scope="module")
@torch.no_grad()
def block(target: Any, draft: OracleDraft, words: dict[str, int]) -> torch.Tensor:
    """Step 3's `noise_embedding`, (1, 4, 512)."""
    ids = torch.tensor([[words["on"], *[words["MASK"]] * 3]])
    return draft.embed_block(ids, target.get_input_embeddings())


@pytest.fixture(scope="module")
def recorded(draft: OracleDraft, taps: torch.Tensor, block: torch.Tensor) -> Any:
    """A real forward of the draft, and what each layer's attention was called with and returned."""
    calls: list[Any] = []

    def record(module: Any, queries: Any, keys: Any, values: Any, mask: Any, **kwargs: Any) -> Any:
        output, weights = eager_attention_forward(module, queries, keys, values, mask, **kwargs)
        calls.append(
            SimpleNamespace(q=queries, k=keys, v=values, mask=mask, weights=weights, output=output, kwargs=kwargs)
        )
        return output, weights

    name = draft.config._attn_implementation
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(ALL_ATTENTION_FUNCTIONS, name, record)
        states = draft(block, taps).last_hidden_state
    return SimpleNamespace(layers=calls, states=states)


# --- the example's operations, by hand, one row at a time ------------------------------------------------------------


def rms_norm(row: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return weight * row / torch.sqrt((row * row).mean() + eps)


def rotated(vector: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """R_m of one head, (64,): the plane of components i and i + 32 turns by m / base^(2 i / 64)."""
    half = HEAD_DIM // 2
    result = torch.empty_like(vector)
    for i in range(half):
        angle = position / base ** (2 * i / HEAD_DIM)
        x, y = vector[i], vector[i + half]
        result[i] = x * math.cos(angle) - y * math.sin(angle)
        result[i + half] = x * math.sin(angle) + y * math.cos(angle)
    return result


def base_of(draft: OracleDraft) -> float:
    return draft.config.rope_parameters["rope_theta"]


# --- step 1: prefill -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_step_1_prefill_gives_13_states_of_which_three_are_concatenated(target, taps):
    states = target(PROMPT, output_hidden_states=True).hidden_states
    assert len(states) == 13
    assert {state.shape for state in states} == {(1, 3, 512)}
    assert taps.shape == (1, 3, 1536)
    for place, layer in enumerate(TAPS):  # layer OUTPUTS, counted from 0; 0 in `states` is the embedding
        assert torch.equal(taps[..., 512 * place : 512 * (place + 1)], states[layer + 1])


def test_step_1_the_loop_hands_these_states_to_the_draft(target, draft, taps):
    (first, *_), _ = decoded(target, draft)
    torch.testing.assert_close(first.context, taps, **CLOSE)


# --- step 2: fusion --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_step_2_context_is_the_norm_of_the_projection(draft, taps):
    assert draft.fc.weight.shape == (512, 1536)
    assert draft.fc.bias is None
    context = draft.fuse(taps)
    assert context.shape == (1, 3, 512)
    for position in range(3):
        by_hand = rms_norm(draft.fc.weight @ taps[0, position], draft.hidden_norm.weight)
        torch.testing.assert_close(context[0, position], by_hand, **CLOSE)


# --- step 3: the block -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_step_3_block_is_the_anchor_and_three_masks_through_the_targets_embedding(target, draft, block, words):
    assert block.shape == (1, 4, 512)
    table = target.model.embed_tokens.weight
    assert torch.equal(block[0], table[[words["on"], words["MASK"], words["MASK"], words["MASK"]]])


# --- step 4: KV injection --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_step_4_1_queries_come_from_the_block_only(draft, recorded, block):
    attention, norm = draft.layers[0].self_attn, draft.layers[0].input_layernorm
    queries = recorded.layers[0].q[0]
    assert queries.shape == (8, 4, 64)
    for slot, position in enumerate((3, 4, 5, 6)):
        row = (attention.q_proj.weight @ rms_norm(block[0, slot], norm.weight)).view(HEADS, HEAD_DIM)
        for head in range(HEADS):
            by_hand = rotated(rms_norm(row[head], attention.q_norm.weight), position, base_of(draft))
            torch.testing.assert_close(queries[head, slot], by_hand, **CLOSE)


@torch.no_grad()
def test_step_4_2_keys_and_values_are_context_then_block_through_the_same_projections(draft, recorded, block, taps):
    layer = draft.layers[0]
    attention, context = layer.self_attn, draft.fuse(taps)[0]
    keys, values = recorded.layers[0].k[0], recorded.layers[0].v[0]
    assert keys.shape == values.shape == (8, 7, 64)
    # The context enters as it is, `hidden_norm` was its norm; the block through the layer's own.
    sources = [context[0], context[1], context[2]]
    sources += [rms_norm(block[0, slot], layer.input_layernorm.weight) for slot in range(4)]
    for position, source in enumerate(sources):
        key = (attention.k_proj.weight @ source).view(HEADS, HEAD_DIM)
        value = (attention.v_proj.weight @ source).view(HEADS, HEAD_DIM)
        torch.testing.assert_close(values[:, position], value, **CLOSE)  # not normed, not rotated
        for head in range(HEADS):
            by_hand = rotated(rms_norm(key[head], attention.k_norm.weight), position, base_of(draft))
            torch.testing.assert_close(keys[head, position], by_hand, **CLOSE)


@torch.no_grad()
def test_step_4_2_context_is_the_same_tensor_at_the_second_layer(draft, recorded, taps):
    attention, context = draft.layers[1].self_attn, draft.fuse(taps)[0]
    for position in range(3):
        value = (attention.v_proj.weight @ context[position]).view(HEADS, HEAD_DIM)
        torch.testing.assert_close(recorded.layers[1].v[0, :, position], value, **CLOSE)


def rotate_at(draft: OracleDraft, q: torch.Tensor, k: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Our rotation of queries (4, 64) and keys (7, 64), with the first key at position `shift`."""
    positions = torch.arange(7)[None] + shift
    cos, sin = draft.rotary_emb(q, positions)
    assert cos.shape == sin.shape == (1, 7, 64)
    queries, keys = apply_rotary_pos_emb(q[None, None], k[None, None], cos, sin)
    return queries[0, 0], keys[0, 0]


def raw_vectors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(n, HEAD_DIM, generator=generator, dtype=torch.float64) for n in (4, 7))


def test_step_4_3_queries_are_rotated_at_3_to_6_and_keys_at_0_to_6(draft):
    q, k = raw_vectors()
    queries, keys = rotate_at(draft, q, k, shift=0)
    for slot in range(4):
        torch.testing.assert_close(queries[slot], rotated(q[slot], slot + 3, base_of(draft)), **CLOSE)
    for position in range(7):
        expected = rotated(k[position], position, base_of(draft))
        torch.testing.assert_close(keys[position], expected, **CLOSE)


def test_step_4_3_q5_k2_depends_on_their_distance_of_3_only(draft):
    q, k = raw_vectors()
    q5, k2 = 2, 2  # rows of the block and of the keys
    products = []
    for shift in (0, 1, 40, 900):
        queries, keys = rotate_at(draft, q, k, shift)
        products.append(float(queries[q5] @ keys[k2]))
    by_hand = float(q[q5] @ rotated(k[k2], -3, base_of(draft)))
    assert products == pytest.approx([by_hand] * 4, rel=1e-4)


def test_step_4_3_a_query_rotated_at_0_to_3_would_take_q5_for_k2s_neighbour(draft):
    q, k = raw_vectors()
    right, keys = rotate_at(draft, q, k, shift=0)
    cos, sin = draft.rotary_emb(q, torch.arange(4)[None])
    wrong = apply_rotary_pos_emb(q[None, None], q[None, None], cos, sin)[0][0, 0]
    product = float(wrong[2] @ keys[2])
    assert product == pytest.approx(float(q[2] @ k[2]), rel=1e-4)  # R_0: as if at one place
    assert abs(product - float(right[2] @ keys[2])) > 0.1


@torch.no_grad()
def test_step_4_4_attention_is_4_by_7_without_mask_and_a_plain_softmax(recorded):
    for layer in recorded.layers:
        assert layer.mask is None
        assert layer.kwargs["scaling"] == 0.125
        assert layer.weights.shape == (1, 8, 4, 7)
        assert (layer.weights > 0).all()
        for head in range(HEADS):
            for slot in range(4):
                raw = torch.tensor([float(layer.q[0, head, slot] @ layer.k[0, head, j]) / 8 for j in range(7)])
                exps = (raw.double() - raw.max()).exp()
                weights = exps / exps.sum()
                torch.testing.assert_close(layer.weights[0, head, slot], weights, **CLOSE)
                output = sum(layer.weights[0, head, slot, j] * layer.v[0, head, j] for j in range(7))
                torch.testing.assert_close(layer.output[0, slot, head], output, **CLOSE)


@torch.no_grad()
def test_step_4_4_every_slot_reads_every_position(draft, taps, block):
    """What full attention means: move any of the seven inputs, and all four outputs move."""
    forward = super(OracleDraft, draft).forward
    before = forward(block, taps).last_hidden_state
    for position in range(7):
        changed_taps, changed_block = taps.clone(), block.clone()
        if position < 3:
            changed_taps[0, position] += 1.0
        else:
            changed_block[0, position - 3] += 1.0
        after = forward(changed_block, changed_taps).last_hidden_state
        assert ((after - before).abs().amax(-1) > 1e-6).all()


@torch.no_grad()
def test_step_4_5_attention_returns_the_four_block_positions(draft, recorded, block):
    assert recorded.layers[0].output.reshape(1, 4, -1).shape == (1, 4, 512)
    attended = draft.layers[0].self_attn.o_proj(recorded.layers[0].output.reshape(1, 4, -1))
    assert attended.shape == block.shape == (1, 4, 512)


# --- step 5: logits --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_step_5_logits_are_for_positions_4_5_6(target, draft, recorded):
    assert len(recorded.layers) == 2
    assert recorded.states.shape == (1, 4, 512)
    logits = super(OracleDraft, draft).compute_logits(recorded.states, target.get_output_embeddings())
    assert logits.shape == (1, 3, draft.config.vocab_size)
    for slot in (1, 2, 3):
        by_hand = target.lm_head.weight @ recorded.states[0, slot]
        torch.testing.assert_close(logits[0, slot - 1], by_hand, **CLOSE)


def test_step_5_candidates_replace_the_masks(target, draft, words):
    rounds, _ = decoded(target, draft)
    assert rounds[0].verified == [words["on"], words["the"], words["mat"], words["."]]


# --- step 6: verification and acceptance -----------------------------------------------------------------------------


def test_step_6_acceptance_is_2_and_in_replaces_the_full_stop(words):
    candidates = torch.tensor([[words["the"], words["mat"], words["."]]])
    posterior = [words["the"], words["mat"], words["in"], words["on"]]
    scores = torch.nn.functional.one_hot(torch.tensor([posterior]), 64).double()
    verdict = accept_greedy(candidates, scores)
    assert verdict.accepted.tolist() == [2]
    assert verdict.to_host() == [[words["the"], words["mat"], words["in"]]]


def test_step_6_words_of_the_example_are_different_tokens(words):
    assert len(set(words.values())) == len(words), "choose another prompt: the example needs nine different tokens"


def test_step_6_the_target_commits_the_mat_in(target, draft, words, text):
    rounds, output = decoded(target, draft)
    assert output.acceptance_lengths[0][0] == 3  # two accepted candidates and the target's own token
    assert output.sequences[0, :7].tolist() == [words[word] for word in WORDS]
    assert rounds[0].verified_positions == [3, 4, 5, 6]
    assert torch.equal(output.sequences[0], text)


# --- step 7: the caches of three rounds ------------------------------------------------------------------------------


def decoded(target: Any, draft: OracleDraft) -> tuple[list[Any], Any]:
    """Generate; what the draft and the target were given and held in each round."""
    rounds: list[Any] = []

    def before_draft(module: Any, args: Any, kwargs: Any) -> None:
        rounds.append(
            SimpleNamespace(
                context=kwargs["context_hidden_states"].clone(), positions=kwargs["position_ids"][0].tolist()
            )
        )

    def after_draft(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs["cache"]
        length = cache.get_seq_length()
        rounds[-1].cached = length
        rounds[-1].keys = [keys[0, :, :length].clone() for keys in cache.keys]
        rounds[-1].values = [values[0, :, :length].clone() for values in cache.values]

    def before_target(module: Any, args: Any, kwargs: Any) -> None:
        if rounds:
            start = get_cache(kwargs).get_seq_length()
            rounds[-1].target_cached = start
            rounds[-1].verified = kwargs["input_ids"][0].tolist()
            rounds[-1].verified_positions = kwargs["position_ids"][0].tolist()

    handles = [
        draft.register_forward_pre_hook(before_draft, with_kwargs=True),
        draft.register_forward_hook(after_draft, with_kwargs=True),
        target.register_forward_pre_hook(before_target, with_kwargs=True),
    ]
    try:
        output = target.generate(
            PROMPT,
            assistant_model=draft,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    return rounds, output


def test_step_7_next_block_starts_at_6_and_both_caches_hold_0_to_5(target, draft):
    rounds, _ = decoded(target, draft)
    start = 3
    for number, known in enumerate(rounds[:3]):
        assert known.target_cached == start, "the target's cache ends right before the anchor"
        assert known.cached == start, "so does the draft's context, block dropped"
        assert known.positions[-BLOCK:] == list(range(start, start + BLOCK))
        new = 3  # the prompt's three positions, then two accepted ones and their anchor
        assert known.positions[:-BLOCK] == list(range(start - new, start)), f"round {number + 1}: each position once"
        assert known.context.shape == (1, new, 1536)
        start += 2 + 1  # acceptance + 1: the formula, 6 after the first round
    assert start == 12


@torch.no_grad()
def test_step_7_cached_rows_are_the_projected_target_states_of_accepted_positions(target, draft, text):
    """Rounds 1, 2, 3 hold positions 0..2, 0..5, 0..8; each row is what a fresh run of the target would inject."""
    states = target(text[None, :9], output_hidden_states=True).hidden_states
    context = draft.fuse(torch.cat([states[layer + 1] for layer in TAPS], dim=-1))[0]
    rounds, _ = decoded(target, draft)
    for number, length in enumerate((3, 6, 9)):
        for layer_idx, layer in enumerate(draft.layers):
            attention = layer.self_attn
            for position in range(length):
                key = (attention.k_proj.weight @ context[position]).view(HEADS, HEAD_DIM)
                value = (attention.v_proj.weight @ context[position]).view(HEADS, HEAD_DIM)
                key = rotated(rms_norm(key[0], attention.k_norm.weight), position, base_of(draft))
                cached = rounds[number].keys[layer_idx][0, position], rounds[number].values[layer_idx][:, position]
                torch.testing.assert_close(cached[0], key, **CLOSE)
                torch.testing.assert_close(cached[1], value, **CLOSE)


def test_step_7_target_cache_handed_back_stands_for_all_tokens_but_the_last(target, draft):
    _, output = decoded(target, draft)
    assert get_cache(output).get_seq_length() == 3 + NEW_TOKENS - 1
