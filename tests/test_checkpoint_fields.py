"""Fields of published drafts: read as vLLM and the formats' own classes read them, or refused in one sentence.

Expectations are worked out by hand from the code of vLLM 0.32 (`qwen3_dflash.py`: `_resolve_layer_attention`;
`eagle3_utils.py`: `get_eagle3_aux_layers_from_config`; `dspark/speculator.py`), speculators 0.9 and dflash 0.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_hf import DFlashConfig, cli, load_draft
from dflash_hf.checkpoints import read_draft
from reference_drafts import (
    BLOCK,
    MASK,
    SLIDING,
    TAPS,
    VOCABULARY,
    WINDOW,
    deepspec_markov,
    deepspec_plain,
    edit_config,
    edit_tensors,
    mask_embedding,
    native,
    specforge_dspark,
    speculators_dspark,
    speculators_full,
    speculators_reduced,
    speculators_sliding,
    tap_norms,
    zlab,
    zlab_sliding,
    zlab_yarn,
)

REMOVED = object()  # a field that is taken out


def edited(
    writer: Callable[[Path], Any], folder: Path, top: dict[str, Any], nested: dict[str, Any] | None = None
) -> Path:
    """The writer's checkpoint with these fields of its config.json changed; `a.b` is field b of object a."""
    writer(folder)

    def edit(config: dict[str, Any]) -> None:
        changes = top | {f"dflash_config.{name}": value for name, value in (nested or {}).items()}
        for path, value in changes.items():
            *parents, name = path.split(".")
            container = config
            for parent in parents:
                container = container.setdefault(parent, {})
            if value is REMOVED:
                container.pop(name, None)
            else:
                container[name] = value

    edit_config(folder, edit)
    return folder


def config_of(*args: Any) -> DFlashConfig:
    return read_draft(edited(*args))[1]


def refusal_of(folder: Path) -> str:
    """The sentence with which the draft is refused."""
    with pytest.raises(ValueError) as error:
        load_draft(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def attention_of(config: DFlashConfig) -> list[tuple[int | None, bool]]:
    """`(sliding_window, causal)` of each layer, in vLLM's terms."""
    return [
        (config.sliding_window if kind == "sliding_attention" else None, config.layer_is_causal(i))
        for i, kind in enumerate(config.layer_types)
    ]


# ---------------------------------------------------------------- windows

SWA = {"use_swa": True, "swa_window_size": 8}
UNSTATED = dict.fromkeys(SLIDING, REMOVED)


@pytest.mark.parametrize(
    ("writer", "top", "nested", "expected"),
    [
        (zlab, UNSTATED, SWA, [(8, False), (8, False)]),  # MiMo's
        (zlab, {}, SWA, [(8, False), (8, False)]),  # an all-full `layer_types` is overruled, the causality is not
        (zlab, SWA, {}, [(8, False), (8, False)]),  # SGLang reads either place
        (zlab, {}, SWA | {"causal": True}, [(8, True), (8, True)]),  # ModelOpt's
        (zlab, {"is_causal": True}, SWA, [(8, True), (8, True)]),
        (zlab_sliding, {}, {"use_swa": True, "swa_window_size": WINDOW}, [(WINDOW, True), (None, False)]),
        (zlab_sliding, {}, {"use_swa": True}, [(WINDOW, True), (None, False)]),
        (zlab_sliding, {"sliding_window": None}, {"swa_window_size": 9}, [(9, True), (None, False)]),
        (zlab_sliding, {"sliding_window": None, "swa_window_size": 9}, {}, [(9, True), (None, False)]),
        (zlab_sliding, {"layer_types": REMOVED, "max_window_layers": 0}, {"use_swa": True}, [(WINDOW, True)] * 2),
    ],
)
def test_layers_attend_as_vllm_resolves_them(
    writer: Any, top: Any, nested: Any, expected: Any, tmp_path: Path
) -> None:
    assert attention_of(config_of(writer, tmp_path, top, nested)) == expected


@pytest.mark.parametrize(
    ("top", "nested", "places"),
    [
        ({}, {"swa_window_size": 9}, ("`dflash_config.swa_window_size` is 9", f"`sliding_window` is {WINDOW}")),
        ({"swa_window_size": 9}, {}, ("`swa_window_size` is 9", f"`sliding_window` is {WINDOW}")),
        (
            {"swa_window_size": WINDOW},
            {"swa_window_size": 9},
            (f"`swa_window_size` is {WINDOW}", "`dflash_config.swa_window_size` is 9"),
        ),
        ({"use_swa": False}, {"use_swa": True}, ("`use_swa` is False", "`dflash_config.use_swa` is True")),
    ],
)
def test_windows_that_disagree_are_refused_with_both_values(
    top: Any, nested: Any, places: tuple[str, str], tmp_path: Path
) -> None:
    sentence = refusal_of(edited(zlab_sliding, tmp_path, top, nested))
    assert all(place in sentence for place in places)


def test_speculators_windows_of_qwen3s_rule_count_from_the_anchor(tmp_path: Path) -> None:
    """Its `transformer_layer_config` becomes a Qwen3Config, whose layers slide from `max_window_layers` on."""
    body = "transformer_layer_config."
    config = config_of(speculators_sliding, tmp_path, {f"{body}layer_types": REMOVED, f"{body}max_window_layers": 0})
    assert config.layer_types == ["sliding_attention"] * 2
    assert (config.window_from_anchor, config.sliding_window) == (True, WINDOW + 1)


def test_native_layers_slide_where_the_file_lists_no_kinds(tmp_path: Path) -> None:
    config = config_of(native, tmp_path, {"layer_types": None})
    assert config.layer_types == ["sliding_attention"] * 2


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize(
    ("writer", "top", "nested", "expected"),
    [
        (specforge_dspark, {"projector_type": "dspark"}, {"projector_type": REMOVED}, True),
        (specforge_dspark, {}, {"projector_type": REMOVED}, True),  # the class says it
        (specforge_dspark, {"architectures": REMOVED}, {"projector_type": REMOVED}, True),  # a Markov head does
        (specforge_dspark, {"sample_from_anchor": False}, {}, False),
        (deepspec_plain, {"dflash_config": {}}, {}, True),
        (deepspec_plain, {}, {"mask_token_id": MASK}, True),
        (deepspec_plain, {"architectures": REMOVED}, {}, True),  # `markov_rank` 0 is DeepSpec's plain DFlash
        (deepspec_markov, {"architectures": REMOVED}, {}, True),
        (zlab, {}, {}, False),
        (zlab, {"markov_rank": 0}, {}, False),
        (zlab, {"architectures": REMOVED}, {"projector_type": "dflash", "markov_rank": 0}, False),
        (speculators_dspark, {"sample_from_anchor": None}, {}, True),  # its class's default
        (speculators_full, {"sample_from_anchor": None}, {}, False),
    ],
)
def test_slots_of_dspark_and_deepspec_predict_the_next_token(
    writer: Any, top: Any, nested: Any, expected: bool, tmp_path: Path
) -> None:
    assert config_of(writer, tmp_path, top, nested).slots_predict_next is expected


def test_markov_head_that_the_config_does_not_mention_is_refused(tmp_path: Path) -> None:
    folder = edited(specforge_dspark, tmp_path, {"architectures": REMOVED}, {"projector_type": REMOVED})
    edit_config(folder, lambda config: config["dflash_config"].pop("markov_rank"))
    edit_config(folder, lambda config: config["dflash_config"].pop("enable_confidence_head"))
    assert "'markov_head." in refusal_of(folder)


# ---------------------------------------------------------------- taps

EAGLE = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("top", "nested"),
    [
        ({EAGLE: [1, 3]}, {}),
        ({EAGLE: None}, {EAGLE: [1, 3]}),
        ({}, {"target_layer_ids": REMOVED, EAGLE: [1, 3]}),
        ({}, {"target_layer_ids": REMOVED, "layer_ids": [1, 3]}),  # vLLM adds nothing to these
        ({"target_layer_ids": TAPS}, {"target_layer_ids": REMOVED}),
        ({EAGLE: []}, {}),  # vLLM goes on to the next field
    ],
)
def test_every_name_of_the_taps_means_the_same_layers(top: Any, nested: Any, tmp_path: Path) -> None:
    assert config_of(zlab, tmp_path, top, nested).target_layer_ids == TAPS


@pytest.mark.parametrize(
    ("writer", "top", "nested", "parts"),
    [
        (zlab, {EAGLE: [1, 3]}, {EAGLE: [2, 4]}, (EAGLE, "[1, 3]", f"dflash_config.{EAGLE}", "[2, 4]")),
        (zlab, {EAGLE: None}, {EAGLE: [2, 4]}, ("target_layer_ids", "[0, 2]", f"dflash_config.{EAGLE}", "[2, 4]")),
        (zlab, {}, {"layer_ids": TAPS}, ("target_layer_ids", "[0, 2]", "dflash_config.layer_ids")),
        (speculators_full, {"target_layer_ids": [1, 3]}, {}, ("aux_hidden_state_layer_ids", "[1, 3]")),
        (speculators_full, {EAGLE: [0, 2]}, {}, (EAGLE, "[0, 2]", "aux_hidden_state_layer_ids", "[1, 3]")),
        (zlab, {}, {"target_layer_ids": 3}, ("dflash_config.target_layer_ids", "got 3")),
        (zlab, {}, {"target_layer_ids": ["0", "2"]}, ("dflash_config.target_layer_ids", "['0', '2']")),
        (zlab, {EAGLE: "1,3"}, {}, (EAGLE, "'1,3'")),
        (speculators_full, {"aux_hidden_state_layer_ids": 3}, {}, ("aux_hidden_state_layer_ids", "got 3")),
    ],
)
def test_taps_that_disagree_or_are_no_list_are_refused(
    writer: Any, top: Any, nested: Any, parts: tuple[str, ...], tmp_path: Path
) -> None:
    sentence = refusal_of(edited(writer, tmp_path, top, nested))
    assert all(part in sentence for part in parts)


# ---------------------------------------------------------------- the mask's vector


def test_mask_vector_of_another_token_is_refused_with_both(tmp_path: Path) -> None:
    """As vLLM's `_load_mask_embedding` does."""
    mask_embedding(tmp_path)
    torch.save({"mask_token_id": 3, "embedding": torch.ones(32)}, tmp_path / "mask_embedding.pt")
    sentence = refusal_of(tmp_path)
    assert "`mask_token_id` is 11" in sentence
    assert "`mask_token_id` of `mask_embedding.pt` is 3" in sentence


def test_mask_token_is_the_vectors_where_the_config_names_none(tmp_path: Path) -> None:
    assert config_of(mask_embedding, tmp_path, {}, {"mask_token_id": REMOVED}).mask_token_id == MASK


# ---------------------------------------------------------------- what has no meaning here

ROPE = "rope_parameters."
BODY = "transformer_layer_config."
YARN = {"rope_type": "yarn", "rope_theta": 1e4}
PER_LAYER = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("writer", "top", "part"),
    [
        # The body's fields.
        (zlab, {"num_key_value_heads": REMOVED}, "no `num_key_value_heads`"),
        (native, {"num_key_value_heads": REMOVED}, "no `num_key_value_heads`"),
        (speculators_full, {f"{BODY}num_key_value_heads": REMOVED}, "no `num_key_value_heads`"),
        (tap_norms, {"num_attention_heads": REMOVED}, "no `num_attention_heads`"),
        (zlab, {"num_hidden_layers": REMOVED, "dflash_config.use_swa": True}, "no `num_hidden_layers`"),
        (zlab, {"hidden_size": "32"}, "`hidden_size` must be a whole number above 0, got '32'"),
        (tap_norms, {"num_attention_heads": 0}, "`num_attention_heads` must be a whole number above 0, got 0"),
        (zlab, {"dflash_config.mask_token_id": "11"}, "`mask_token_id` must be a whole number, got '11'"),
        (speculators_sliding, {f"{BODY}sliding_window": REMOVED}, "`sliding_window` is missing"),
        (speculators_sliding, {f"{BODY}sliding_window": None}, "`sliding_window` is missing"),
        (native, {"sliding_window": None}, "`sliding_window` is missing"),
        (zlab, {"dflash_config.use_swa": True, "dflash_config.swa_window_size": "8"}, "a whole number, got '8'"),
        (zlab, {"layer_types": ["chunked_attention", "full_attention"]}, "`layer_types` names 'chunked_attention'"),
        (zlab, {"layer_types": 3}, "`layer_types` must be a list"),
        (zlab, {"hidden_act": "sluggish"}, "`hidden_act` is 'sluggish'"),
        (zlab, {"dtype": "float13"}, "`dtype` is 'float13'"),
        (deepspec_plain, {"block_size": REMOVED}, "no `block_size`"),
        # The nested dialect.
        (zlab, {"dflash_config": [1]}, "`dflash_config` must be an object of fields, got [1]"),
        (zlab, {"dflash_config": "x"}, "`dflash_config` must be an object of fields, got 'x'"),
        (zlab, {"dflash_config.has_embed_tokens": True}, "`dflash_config.has_embed_tokens` is True"),
        # RoPE.
        (zlab, {f"{ROPE}partial_rotary_factor": 0.25}, "`rope_parameters.partial_rotary_factor` is 0.25"),
        (speculators_full, {f"{BODY}{ROPE}partial_rotary_factor": 0.25}, "partial_rotary_factor` is 0.25"),
        (zlab, {"rope_theta": 5.0}, "`rope_theta` is 5.0 but `rope_parameters.rope_theta` is 10000.0"),
        (zlab, {f"{ROPE}rope_type": "bogus"}, "`rope_type` must be one of default, linear, dynamic, yarn"),
        (zlab, {"rope_parameters": YARN}, "factor"),  # in Transformers' words or in ours
        (zlab, {"rope_parameters": PER_LAYER}, "`rope_parameters` must be an object of numbers"),
        (zlab, {"rope_parameters": "x"}, "`rope_parameters` must be an object of numbers, got 'x'"),
        (zlab, {f"{ROPE}rope_theta": "1e4"}, "`rope_parameters.rope_theta` must be a number above 0"),
        (zlab, {"rope_parameters": REMOVED, "rope_theta": "1e4"}, "must be a number above 0"),
        # Numbers of the draft.
        (zlab, {"conv_kernel_size": 2, "conv_group_size": 0}, "`conv_group_size` must be a whole number above 0"),
        (zlab, {"final_logit_softcapping": "30"}, "`final_logit_softcapping` must be a number above 0, or null"),
        (zlab, {"input_embedding_scale": "sqrt"}, "`input_embedding_scale` must be a number above 0, or null"),
        (zlab, {"attention_value_scale": "0.5"}, "`attention_value_scale` must be a number above 0, or null"),
        (zlab, {"output_multiplier": 0}, "`output_multiplier` must be a number above 0, or null, got 0"),
        (zlab, {"output_multiplier": True}, "`output_multiplier` must be a number above 0, or null, got True"),
    ],
)
def test_field_without_a_meaning_is_refused_in_one_sentence(writer: Any, top: Any, part: str, tmp_path: Path) -> None:
    assert part in refusal_of(edited(writer, tmp_path, top))


def fields_of(config: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from fields_of(value, *path, name)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "writer", [zlab_yarn, native, specforge_dspark, speculators_dspark], ids=lambda writer: writer.__name__
)
def test_no_value_of_any_field_ends_in_anything_but_a_sentence(writer: Any, tmp_path: Path) -> None:
    writer(tmp_path)
    path = tmp_path / "config.json"
    right = json.loads(path.read_text())
    for field in list(fields_of(right)):
        for value in (REMOVED, None, "x", 0, -1, True, 1.5, [], ["a"], [1], {}, {"a": 1}):
            config = json.loads(json.dumps(right))
            container = reduce(dict.__getitem__, field[:-1], config)
            container[field[-1]] = value
            if value is REMOVED:
                del container[field[-1]]
            path.write_text(json.dumps(config))
            try:
                read_draft(tmp_path)
            except (ValueError, OSError) as error:
                assert "\n" not in str(error), (field, value)
            except Exception as error:
                raise AssertionError(f"{'.'.join(field)} = {value!r}") from error


def test_refusals_reach_the_command_line_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(zlab, tmp_path / "draft", {"num_key_value_heads": REMOVED})
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "draft"), str(tmp_path / "out"), "--to", "zlab"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: The draft's config has no `num_key_value_heads`")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("name", "value"), [("is_neox_style", False), ("projector_type", "domino")])
def test_own_format_refuses_what_it_has_no_field_for(name: str, value: Any, tmp_path: Path) -> None:
    zlab(tmp_path / "zlab")
    load_draft(tmp_path / "zlab").save_pretrained(tmp_path / "own")
    edit_config(tmp_path / "own", lambda config: config.update({name: value}))
    sentence = refusal_of(tmp_path / "own")
    assert f"`{name}` is {value!r}, which changes what the draft computes" in sentence


@pytest.mark.parametrize(("writer", "expected"), [(zlab, 16), (native, 16), (speculators_full, 8)])
def test_block_size_that_is_not_stated_is_that_of_the_formats_class(
    writer: Any, expected: int, tmp_path: Path
) -> None:
    """dflash 0.1: `_draft_value(config, "block_size", 16)`; Transformers' and speculators' classes: 16 and 8."""
    window = {"sliding_window": 32} if writer is native else {}
    assert config_of(writer, tmp_path, {"block_size": REMOVED} | window).block_size == expected


# ---------------------------------------------------------------- the map of a reduced vocabulary


@pytest.mark.parametrize(
    "offsets", [torch.zeros(0, dtype=torch.long), torch.linspace(1, 4, 7)], ids=["empty", "fractions"]
)
def test_vocabulary_map_that_is_no_list_of_offsets_is_refused(offsets: torch.Tensor, tmp_path: Path) -> None:
    speculators_reduced(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors | {"d2t": offsets})
    assert refusal_of(tmp_path).startswith("'d2t' is of shape")


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", [7, "../weights.safetensors", "/tmp/weights.safetensors"])
def test_index_that_names_no_file_beside_it_is_refused(name: Any, tmp_path: Path) -> None:
    zlab(tmp_path)
    tensor = next(iter(load_file(tmp_path / "model.safetensors")))
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "weights.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {tensor: name}}))
    assert f"{name!r}, which is no file beside it" in refusal_of(tmp_path)


def test_complete_file_goes_before_an_index_that_was_left_there(tmp_path: Path) -> None:
    """As Transformers' own loader chooses."""
    zlab(tmp_path)
    stale = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert load_draft(tmp_path).config.block_size == BLOCK


def test_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    zlab(tmp_path)
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_draft(tmp_path).config.vocab_size == VOCABULARY


def test_draft_in_a_subfolder_is_read_with_its_own_config(tmp_path: Path) -> None:
    zlab(tmp_path)
    zlab_sliding(tmp_path / "sub")
    assert load_draft(tmp_path, subfolder="sub").config.sliding_window == WINDOW
    with pytest.raises(OSError, match=r"config\.json is missing"):
        load_draft(tmp_path, subfolder="nothing")


@pytest.mark.parametrize("name", ["config", "state_dict"])
def test_what_is_read_from_the_folder_cannot_be_given(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"reads `{name}` from the draft's folder"):
        load_draft(tmp_path, **{name: None})
