"""The draft's configuration and forward: both dialects, every RoPE variant, every visibility rule, every cache layout.

Expected values come from a forward written out in loops (`slow_forward`), from Transformers' own Qwen3 parts, or from
the method's published numbers.

Shapes: B batch, S context, K block, H hidden, V vocabulary, L taps, N heads, G key/value heads, D head size.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_hf import DFlashConfig, Qwen3DFlashForDraft
from dflash_hf.configuration_dflash import default_target_layer_ids
from dflash_hf.generation.ordering import filled_gaps
from helpers import greedy, random_prompt, tiny_draft, tiny_target

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK, WINDOW, HIDDEN = 4, 6, 32
LAYERS = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding": {"layer_types": [SLIDING, SLIDING], "sliding_window": WINDOW},
    "sliding, bidirectional": {"layer_types": [SLIDING, SLIDING], "sliding_window": WINDOW, "is_causal": False},
    "sliding then full": {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW},
    "window of one block": {"layer_types": [FULL, SLIDING], "sliding_window": BLOCK},
}
every_layer_type = pytest.mark.parametrize("layers", LAYERS)


@pytest.fixture(scope="module")
def a_target() -> Any:
    return tiny_target("qwen3")


def config_of(**fields: Any) -> DFlashConfig:
    return DFlashConfig(
        **{
            "vocab_size": 64,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "mask_token_id": 63,
            "target_layer_ids": [0, 2],
            **fields,
        }
    )


# --- configuration: dialects


def test_both_dialects_give_the_same_config():
    fields = {"mask_token_id": 5, "target_layer_ids": [1, 3], "block_size": 8, "num_target_layers": 6}
    flat = config_of(**fields, is_causal=True, input_embedding_scale=2.0, final_logit_softcapping=30.0)
    nested = config_of(
        mask_token_id=None,
        target_layer_ids=None,
        dflash_config={**fields, "causal": True, "input_embedding_scale": 2.0, "final_logit_softcapping": 30.0},
    )
    assert flat.to_dict() == nested.to_dict()


def test_both_dialects_may_agree():
    assert config_of(mask_token_id=7, dflash_config={"mask_token_id": 7}).mask_token_id == 7
    assert config_of(target_layer_ids=(0, 2), dflash_config={"target_layer_ids": [0, 2]}).target_layer_ids == [0, 2]


@pytest.mark.parametrize(
    ("name", "top", "nested"),
    [
        ("block_size", 16, 8),
        ("mask_token_id", 5, 6),
        ("target_layer_ids", [0, 2], [1, 2]),
        ("num_target_layers", 4, 5),
        ("is_causal", True, False),
        ("input_embedding_scale", 1.0, 2.0),
        ("output_multiplier", 1.0, 0.5),
        ("final_logit_softcapping", 30.0, 20.0),
    ],
)
def test_dialects_that_disagree_are_refused_with_both_values(name, top, nested):
    with pytest.raises(ValueError, match=f"`{name}` is .*top level but .*dflash_config") as error:
        config_of(**{name: top}, dflash_config={name: nested})
    assert repr(top) in str(error.value)
    assert repr(nested) in str(error.value)


def test_every_field_survives_saving(tmp_path):
    config = config_of(
        block_size=8, num_target_layers=6, target_layer_ids=[-1, 5], is_causal=False, input_embedding_scale=3.0,
        output_multiplier=0.5, final_logit_softcapping=20.0, layer_types=[SLIDING, FULL], sliding_window=9,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is DFlashConfig
    ignored = ("_name_or_path", "transformers_version")
    assert {k: v for k, v in read.to_dict().items() if k not in ignored} == {
        k: v for k, v in config.to_dict().items() if k not in ignored
    }


def test_model_type_on_disk_is_no_language_models(tmp_path):
    config_of().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dflash"


# --- configuration: refusals

REFUSALS = [
    ({"block_size": 1}, r"`block_size` must be an integer of at least 2, got 1"),
    ({"block_size": 0}, r"`block_size` must be an integer of at least 2, got 0"),
    ({"block_size": 8.0}, r"`block_size` must be an integer of at least 2, got 8.0"),
    ({"block_size": True}, r"`block_size` must be an integer of at least 2, got True"),
    ({"mask_token_id": 64}, r"`mask_token_id` must lie in the target's vocabulary, 0 to 63 .*, got 64"),
    ({"mask_token_id": -1}, r"`mask_token_id` must lie in the target's vocabulary, 0 to 63 .*, got -1"),
    ({"mask_token_id": "<mask>"}, r"`mask_token_id` must lie in .*, got '<mask>'"),
    ({"target_layer_ids": []}, r"`target_layer_ids` must be a non-empty list .*, got \[\]"),
    ({"target_layer_ids": 3}, r"`target_layer_ids` must be a non-empty list .*, got 3"),
    ({"target_layer_ids": [0, -2]}, r"`target_layer_ids` must be a non-empty list .*, got \[0, -2\]"),
    ({"target_layer_ids": [0, 1.5]}, r"`target_layer_ids` must be a non-empty list .*, got \[0, 1.5\]"),
    (
        {"target_layer_ids": [0, 48], "num_target_layers": 48},
        r"`target_layer_ids` names layer 48 but `num_target_layers` is 48, so the last layer is 47",
    ),
    ({"is_causal": "no"}, r"`is_causal` must be true, false or null, got 'no'"),
    ({"layer_types": [SLIDING] * 2}, r"`sliding_window` is None but `block_size` is 16"),
    ({"layer_types": [FULL, SLIDING], "sliding_window": 15}, r"`sliding_window` is 15 but `block_size` is 16"),
    ({"dflash_config": {"use_magic": 3}}, r"`dflash_config.use_magic` \(3\) is not understood"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=[f"{f}" for f, _ in REFUSALS])
def test_field_out_of_range_is_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        config_of(**fields)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    "fields",
    [{"layer_types": [FULL]}, {"num_hidden_layers": "two"}, {"hidden_size": None}, {"layer_types": ["odd"] * 2}],
)
def test_refusal_of_transformers_own_validation_is_a_value_error(fields):
    with pytest.raises(ValueError, match=next(iter(fields))) as error:
        config_of(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_model_without_a_field_it_needs_is_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` is missing from the draft's config"):
        Qwen3DFlashForDraft(config_of(**{name: None}))


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None}])
def test_file_without_a_rope_base_is_refused(tmp_path, rope):
    config_of().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(fields | rope))
    for load in (AutoConfig.from_pretrained, DFlashConfig.from_pretrained):
        with pytest.raises(ValueError, match=r"names no RoPE base: neither `rope_theta` nor"):
            load(tmp_path)


# --- configuration: taps

PUBLISHED_TAPS = {
    36: [1, 9, 17, 25, 33],
    24: [1, 6, 11, 16, 21],
    28: [1, 7, 13, 19, 25],
    32: [1, 8, 15, 22, 29],
    64: [1, 16, 31, 46, 61],
}


@pytest.mark.parametrize(("num_target_layers", "taps"), PUBLISHED_TAPS.items())
def test_default_taps_are_the_published_ones(num_target_layers, taps):
    assert (
        config_of(target_layer_ids=None, num_target_layers=num_target_layers, num_hidden_layers=5).target_layer_ids
        == taps
    )


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "taps"),
    [(40, 8, [1, 6, 11, 16, 22, 27, 32, 37]), (61, 6, [1, 12, 24, 35, 47, 58]), (60, 6, [1, 12, 23, 35, 46, 57])],
)
def test_rule_gives_the_published_taps_of_other_numbers(num_target_layers, num_taps, taps):
    assert default_target_layer_ids(num_target_layers, num_taps) == taps


def test_one_tap_is_in_the_middle():
    assert default_target_layer_ids(30, 1) == [15]


# --- RoPE

THETA = 50_000.0
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}  # fmt: skip


def write_config(folder: Path, rope: dict[str, Any]) -> None:
    fields = config_of().to_dict()
    fields.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(fields | rope))


@pytest.mark.parametrize("variant", ROPES)
@pytest.mark.parametrize("dialect", ["rope_parameters", "rope_theta and rope_scaling"])
def test_rotation_is_qwen3s_for_every_variant_in_both_dialects(variant, dialect, tmp_path):
    parameters = ROPES[variant]
    if dialect == "rope_parameters":
        write_config(tmp_path, {"rope_parameters": {**parameters, "rope_theta": THETA}})
    else:
        scaling = None if variant == "default" else parameters
        write_config(tmp_path, {"rope_theta": THETA, "rope_scaling": scaling})
    draft = Qwen3DFlashForDraft(AutoConfig.from_pretrained(tmp_path))
    qwen3 = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=HIDDEN, num_attention_heads=4, head_dim=8, max_position_embeddings=128,
            rope_parameters={**parameters, "rope_theta": THETA},
        )
    )  # fmt: skip
    states = torch.zeros(1, 1, HIDDEN)
    for end in (20, 100, 200):  # within, beyond the original and beyond the whole length
        positions = torch.arange(end)[None]
        for ours, theirs in zip(draft.rotary_emb(states, positions), qwen3(states, positions), strict=True):
            assert torch.equal(ours, theirs)
    if variant != "default":
        plain = Qwen3DFlashForDraft(config_of(rope_parameters={"rope_type": "default", "rope_theta": THETA}))
        positions = torch.arange(200)[None]
        assert not torch.allclose(plain.rotary_emb(states, positions)[0], draft.rotary_emb(states, positions)[0])


def test_default_rotation_is_the_closed_form():
    draft = Qwen3DFlashForDraft(config_of(rope_parameters={"rope_type": "default", "rope_theta": THETA}))
    cos, sin = draft.rotary_emb(torch.zeros(1, 1, HIDDEN), torch.tensor([[0, 1, 77]]))
    for row, position in enumerate((0, 1, 77)):
        for column in range(8):
            angle = position / THETA ** (2 * (column % 4) / 8)
            assert float(cos[0, row, column]) == pytest.approx(math.cos(angle), abs=1e-5)
            assert float(sin[0, row, column]) == pytest.approx(math.sin(angle), abs=1e-5)


# --- buffers after loading


@pytest.fixture(scope="module")
def folder(a_target, tmp_path_factory) -> Path:
    """A saved draft with a RoPE that takes more than the base to compute."""
    path = tmp_path_factory.mktemp("draft")
    rope = {"rope_parameters": {**ROPES["yarn"], "rope_theta": THETA}}
    tiny_draft(a_target, dtype=torch.float32, **rope).save_pretrained(path)
    return path


def loaded_class(kind: str, folder: Path) -> Any:
    if kind == "package":
        return Qwen3DFlashForDraft
    remote = get_class_from_dynamic_module("modeling_dflash.Qwen3DFlashForDraft", str(folder))
    assert remote is not Qwen3DFlashForDraft
    return remote


@pytest.mark.parametrize("kind", ["package", "remote code"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"low_cpu_mem_usage": True}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"device_map": "cpu"}],
    ids=str,
)
def test_rotary_buffers_are_right_after_loading(kind, kwargs, folder):
    draft = loaded_class(kind, folder).from_pretrained(folder, **kwargs)
    assert_right_frequencies(draft)
    assert draft.fc.weight.dtype == kwargs.get("dtype", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rotary_buffers_survive_a_cast(dtype, folder):
    assert_right_frequencies(Qwen3DFlashForDraft.from_pretrained(folder).to(dtype))


def assert_right_frequencies(draft: Any) -> None:
    """Rounded to bfloat16, frequencies are off by up to 0.4 %: at position 1000 a turn of a radian and more."""
    fresh = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=HIDDEN, num_attention_heads=4, head_dim=8, max_position_embeddings=1024,
            rope_parameters={**ROPES["yarn"], "rope_theta": THETA},
        )
    )  # fmt: skip
    for name in ("inv_freq", "original_inv_freq"):
        torch.testing.assert_close(
            getattr(draft.rotary_emb, name).double(), getattr(fresh, name).double(), rtol=1e-6, atol=0
        )
    assert draft.rotary_emb.attention_scaling == fresh.attention_scaling != 1.0


# --- the forward, against one written out in loops


def slow_forward(draft: Any, block: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One row, float64, every formula written out: block (K, H), taps (S, L * H), positions (S + K,) -> (K, H)."""
    config, weights = draft.config, {name: value.double() for name, value in draft.state_dict().items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:  # (heads, D)
        half = x.shape[-1] // 2
        theta = config.rope_parameters["rope_theta"]
        angle = position * theta ** -(torch.arange(half, dtype=torch.float64) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    block_size, size = len(block), config.head_dim
    context = norm(taps @ weights["fc.weight"].T, "hidden_norm")
    hidden = block
    for number, kind in enumerate(config.layer_types):
        p = f"layers.{number}"
        causal = kind == SLIDING if config.is_causal is None else config.is_causal
        normed = norm(hidden, f"{p}.input_layernorm")
        sources = torch.cat([context, normed])
        keys, values = [], []
        for source, position in zip(sources, positions.tolist(), strict=True):
            key = (weights[f"{p}.self_attn.k_proj.weight"] @ source).view(-1, size)
            keys.append(turned(norm(key, f"{p}.self_attn.k_norm"), position))
            values.append((weights[f"{p}.self_attn.v_proj.weight"] @ source).view(-1, size))
        rows = []
        for slot in range(block_size):
            own = int(positions[len(context) + slot])
            query = (weights[f"{p}.self_attn.q_proj.weight"] @ normed[slot]).view(-1, size)
            query = turned(norm(query, f"{p}.self_attn.q_norm"), own)
            heads = []
            for head in range(len(query)):
                group = head * len(keys[0]) // len(query)
                scores = torch.stack([query[head] @ key[group] for key in keys]) / size**0.5
                for place, position in enumerate(positions.tolist()):
                    is_far = kind == SLIDING and abs(own - position) >= config.sliding_window
                    if is_far or (causal and position > own):
                        scores[place] = -torch.inf
                heads.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
            rows.append(weights[f"{p}.self_attn.o_proj.weight"] @ torch.cat(heads))
        hidden = hidden + torch.stack(rows)
        normed = norm(hidden, f"{p}.post_attention_layernorm")
        gate = torch.nn.functional.silu(normed @ weights[f"{p}.mlp.gate_proj.weight"].T)
        up = normed @ weights[f"{p}.mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[f"{p}.mlp.down_proj.weight"].T
    return norm(hidden, "norm")


def random_states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # Qwen3's norm and rotation compute in float32 whatever the dtype


@every_layer_type
@torch.no_grad()
def test_forward_is_the_slow_one(a_target, layers):
    draft = tiny_draft(a_target, **LAYERS[layers])
    for context in (1, 2, 5, 12):
        taps, block = random_states(2, context, 2 * HIDDEN), random_states(2, BLOCK, HIDDEN, seed=1)
        states = draft(block, taps).last_hidden_state
        assert states.shape == (2, BLOCK, HIDDEN)
        for row in range(2):
            expected = slow_forward(draft, block[row], taps[row], torch.arange(context + BLOCK))
            torch.testing.assert_close(states[row], expected, **CLOSE)


@torch.no_grad()
def test_forward_of_one_layer_with_more_taps_than_layers_from_an_absolute_position(a_target):
    draft = tiny_draft(a_target, num_hidden_layers=1, target_layer_ids=[0, 1, 2, 3], block_size=3)
    taps, block, positions = random_states(1, 5, 4 * HIDDEN), random_states(1, 3, HIDDEN, seed=1), torch.arange(40, 48)
    states = draft(block, taps, positions[None]).last_hidden_state
    torch.testing.assert_close(states[0], slow_forward(draft, block[0], taps[0], positions), **CLOSE)


@every_layer_type
@torch.no_grad()
def test_padded_context_is_not_seen(a_target, layers):
    """`attention_mask` hides keys, wherever they are; what they hold changes nothing."""
    draft = tiny_draft(a_target, **LAYERS[layers])
    taps, block = random_states(1, 9, 2 * HIDDEN), random_states(1, BLOCK, HIDDEN, seed=1)
    mask = torch.ones(1, 9 + BLOCK, dtype=torch.long)
    mask[0, :3] = 0
    positions = torch.cat([torch.zeros(3, dtype=torch.long), torch.arange(6 + BLOCK)])[None]
    padded = draft(block, taps, positions, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(padded, draft(block, taps[:, 3:]).last_hidden_state, **CLOSE)
    taps[:, :3] = 1000.0
    assert torch.equal(padded, draft(block, taps, positions, attention_mask=mask).last_hidden_state)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@every_layer_type
@torch.no_grad()
def test_every_attention_implementation_gives_the_same_states(a_target, layers, implementation):
    draft = tiny_draft(a_target, dtype=torch.float32, **LAYERS[layers])
    draft.set_attn_implementation(implementation)
    assert draft.config._attn_implementation == implementation
    cache = draft.new_cache()
    taps, block = random_states(1, 12, 2 * HIDDEN).float(), random_states(1, BLOCK, HIDDEN, seed=1).float()
    expected = slow_forward(draft, block[0].double(), taps[0].double(), torch.arange(12 + BLOCK)).float()
    with torch.compiler.set_stance("force_eager"):  # flex attention as it is: compiling takes a minute a shape
        for start, end in ((0, 8), (8, 12)):
            positions = torch.arange(start, end + BLOCK)[None]
            cache.begin_round(positions, [end - start])
            states = draft(block, taps[:, start:end], positions, cache=cache).last_hidden_state
        without = draft(block, taps).last_hidden_state
    torch.testing.assert_close(states[0], expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(without[0], expected, rtol=1e-3, atol=1e-4)


# --- the cache, against brute force


def rounds_of(draft: Any, prompts: list[int], num_rounds: int, seed: int, context_length: int | None = None) -> None:
    """Ragged rounds with the cache; every row's states must be those of a forward over all of its context."""
    generator = random.Random(seed)
    rows = list(range(len(prompts)))
    lengths = list(prompts)
    taps = random_states(len(prompts), max(prompts) + num_rounds * BLOCK + BLOCK, 2 * HIDDEN, seed=seed)
    cache, done = draft.new_cache(context_length), [0] * len(prompts)
    for number in range(num_rounds):
        new = [lengths[row] - done[row] for row in rows]
        width = max(new)
        context = torch.stack([taps[row, done[row] : done[row] + width] for row in rows])  # padding is other states
        block = random_states(len(rows), BLOCK, HIDDEN, seed=100 * seed + number)
        positions = torch.stack(
            [
                torch.cat(
                    [torch.arange(done[row], done[row] + width), torch.arange(lengths[row], lengths[row] + BLOCK)]
                )
                for row in rows
            ]
        )
        cache.begin_round(positions, new)
        states = draft(block, context, positions, cache=cache).last_hidden_state
        for index, row in enumerate(rows):
            first = 0 if context_length is None else max(0, lengths[row] - context_length)
            span = torch.arange(first, lengths[row] + BLOCK)[None]
            alone = draft(block[index : index + 1], taps[row : row + 1, first : lengths[row]], span)
            torch.testing.assert_close(states[index], alone.last_hidden_state[0], **CLOSE)
            done[row] = lengths[row]
            lengths[row] += generator.randint(1, BLOCK)
        if number == num_rounds // 2 and len(rows) > 1:
            leaving = generator.randrange(len(rows))
            kept = filled_gaps([index for index in range(len(rows)) if index != leaving])
            cache.select_rows(kept)
            rows = [rows[index] for index in kept]


@every_layer_type
@pytest.mark.parametrize("prompt", [1, 3, 11])
@torch.no_grad()
def test_cached_context_gives_what_recomputing_it_gives(a_target, layers, prompt):
    rounds_of(tiny_draft(a_target, **LAYERS[layers]), [prompt], num_rounds=12, seed=prompt)


@every_layer_type
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_cached_context_of_a_ragged_batch_gives_what_each_row_gives_alone(a_target, layers, seed):
    """Rows of any length, wrapping their rings at different times; one row leaves half-way."""
    prompts = random.Random(seed).sample(range(1, 20), 4)
    rounds_of(tiny_draft(a_target, **LAYERS[layers]), prompts, num_rounds=8, seed=seed)


@every_layer_type
@torch.no_grad()
def test_bounded_context_gives_what_its_last_tokens_give(a_target, layers):
    rounds_of(tiny_draft(a_target, **LAYERS[layers]), [9, 2, 15], num_rounds=8, seed=1, context_length=5)


@torch.no_grad()
def test_sliding_layers_hold_their_window_and_no_more(a_target):
    draft = tiny_draft(a_target, **LAYERS["sliding then full"])
    cache = draft.new_cache()
    for start in range(0, 400, BLOCK):
        positions = torch.arange(start, start + 2 * BLOCK)[None]
        cache.begin_round(positions, [BLOCK])
        draft(random_states(1, BLOCK, HIDDEN), random_states(1, BLOCK, 2 * HIDDEN), positions, cache=cache)
    assert cache.get_seq_length() == 400
    assert cache.keys[0].shape[2] <= WINDOW + BLOCK
    assert cache.keys[1].shape[2] >= 400


# --- training


@every_layer_type
def test_every_parameter_learns(a_target, layers):
    draft = tiny_draft(a_target, **LAYERS[layers]).train()
    states = draft(random_states(2, BLOCK, HIDDEN), random_states(2, 7, 2 * HIDDEN, seed=1)).last_hidden_state
    draft.compute_logits(states, a_target.get_output_embeddings()).logsumexp(-1).sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


def test_gradient_checkpointing_gives_the_same_gradients(a_target):
    gradients = []
    for checkpointing in (False, True):
        draft = tiny_draft(a_target).train()
        if checkpointing:
            draft.gradient_checkpointing_enable()
        taps = random_states(2, 7, 2 * HIDDEN, seed=1).requires_grad_()
        draft(random_states(2, BLOCK, HIDDEN), taps).last_hidden_state.pow(2).sum().backward()
        gradients.append([taps.grad, *(parameter.grad for parameter in draft.parameters())])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_gradient_is_the_finite_difference(a_target):
    draft = tiny_draft(a_target, **LAYERS["sliding then full"])
    taps, block = random_states(1, 5, 2 * HIDDEN), random_states(1, BLOCK, HIDDEN, seed=1)
    direction, step = random_states(*taps.shape, seed=2), 1e-2

    def value(states: torch.Tensor) -> torch.Tensor:
        return draft(block, states).last_hidden_state.pow(2)[..., :7].sum()

    taps.requires_grad_()
    value(taps).backward()
    with torch.no_grad():
        difference = (value(taps + step * direction) - value(taps - step * direction)) / (2 * step)
    assert float((taps.grad * direction).sum()) == pytest.approx(float(difference), rel=1e-2)


# --- files that do not hold a whole draft


def test_truncated_weights_are_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"damaged or truncated file, model\.safetensors") as error:
        Qwen3DFlashForDraft.from_pretrained(tmp_path / "draft")
    assert "\n" not in str(error.value)


def test_draft_is_no_causal_language_model(folder):
    """A tool that loads language models must refuse a draft, not generate with it."""
    for trust in (False, True):
        with pytest.raises(ValueError, match="DFlashConfig"):
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    assert type(AutoModel.from_pretrained(folder)) is Qwen3DFlashForDraft


def test_draft_does_not_generate_alone(a_target):
    draft = tiny_draft(a_target)
    with pytest.raises(
        ValueError, match=r"cannot generate alone.*target\.generate\(\*\*inputs, assistant_model=draft\)"
    ):
        draft.generate(torch.tensor([[1, 2]]), max_new_tokens=3)


# --- embedding and head


def test_embedding_norm_of_the_target_is_left_out_and_put_back(a_target):
    draft = tiny_draft(a_target)
    table = torch.nn.Embedding(64, HIDDEN)

    class Normed(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed_norm(super().forward(ids))

    normed = Normed(64, HIDDEN)
    normed.load_state_dict(table.state_dict())
    normed.embed_norm = norm = torch.nn.LayerNorm(HIDDEN)
    ids = torch.tensor([[3, 63, 63, 63]])
    assert not torch.allclose(normed(ids), table(ids))
    assert torch.equal(draft.embed_block(ids, normed), table(ids))
    assert normed.embed_norm is norm


@pytest.mark.parametrize("scale", [None, 1.0, 3.5])
def test_embedding_scale_replaces_the_targets(scale):
    gemma = tiny_target("gemma3")
    draft = tiny_draft(gemma, input_embedding_scale=scale)
    ids = torch.tensor([[3, 63, 63, 63]])
    module = gemma.get_input_embeddings()
    rows = module.weight[ids]
    factor = HIDDEN**0.5 if scale is None else scale  # Gemma's own is the root of the hidden size
    torch.testing.assert_close(draft.embed_block(ids, module), rows * factor, rtol=1e-3, atol=1e-6)


def test_multiplier_and_cap_shape_the_logits(a_target):
    plain = tiny_draft(a_target)
    shaped = tiny_draft(a_target, output_multiplier=0.5, final_logit_softcapping=2.0)
    states, head = random_states(1, BLOCK, HIDDEN), a_target.get_output_embeddings()
    logits = plain.compute_logits(states, head)
    assert logits.shape == (1, BLOCK - 1, 64)
    torch.testing.assert_close(shaped.compute_logits(states, head), 2.0 * torch.tanh(logits * 0.5 / 2.0))


# --- shapes of drafts under `generate`


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("block_size", [2, 3, 5, 8, 16])
def test_any_block_size_from_any_prompt(a_target, block_size, length):
    prompt = random_prompt(length)
    draft = tiny_draft(a_target, block_size=block_size)
    assert torch.equal(greedy(a_target, prompt, 20, assistant_model=draft), greedy(a_target, prompt, 20))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 1, "target_layer_ids": [0, 1, 2, 3]},
        {"num_hidden_layers": 3, "target_layer_ids": [3]},
        {"target_layer_ids": [-1, 1]},
        {"target_layer_ids": [2, 2, 0]},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_any_shape_of_draft(target, fields):
    prompt = random_prompt(6)
    draft = tiny_draft(target, **fields)
    assert torch.equal(greedy(target, prompt, 16, assistant_model=draft), greedy(target, prompt, 16))
