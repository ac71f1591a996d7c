"""Drafts that cannot be read are refused in one sentence that names the file, the field or the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_hf import load_draft
from dflash_hf.checkpoints import read_draft
from dflash_hf.checkpoints.formats import model_name
from helpers import tiny_target
from hub_server import HubServer
from reference_drafts import (
    BLOCK,
    MASK,
    TAPS,
    VOCABULARY,
    WINDOW,
    deepspec_markov,
    edit_config,
    edit_tensors,
    native,
    speculators_reduced,
    zlab,
    zlab_sliding,
)


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Each writer's checkpoint, written once."""
    made: dict[str, Path] = {}

    def master(writer: Any) -> Path:
        if writer.__name__ not in made:
            made[writer.__name__] = tmp_path_factory.mktemp(writer.__name__)
            writer(made[writer.__name__])
        return made[writer.__name__]

    return master


@pytest.fixture
def draft(masters: Any, tmp_path: Path) -> Path:
    """A z-lab draft in a folder of the test's own."""
    return Path(shutil.copytree(masters(zlab), tmp_path / "draft"))


def copy_of(master: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(master, tmp_path / "copy"))


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------- files


def test_truncated_file_is_refused_with_its_name(draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="truncated or corrupted") as error:
        load_draft(draft)
    assert str(path) in one_sentence(error.value)


def test_corrupted_header_is_refused_with_the_file_name(draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    with pytest.raises(ValueError, match="truncated or corrupted") as error:
        load_draft(draft)
    assert str(path) in one_sentence(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(draft: Path, name: str) -> None:
    (draft / name).unlink()
    with pytest.raises(OSError, match="is missing") as error:
        load_draft(draft)
    assert str(draft / name) in one_sentence(error.value)


@pytest.mark.parametrize(("content", "reason"), [("{", "not valid JSON"), ("[1]", "holds a list")])
def test_config_that_is_no_object_is_refused(draft: Path, content: str, reason: str) -> None:
    (draft / "config.json").write_text(content)
    with pytest.raises(ValueError, match=reason) as error:
        load_draft(draft)
    assert str(draft / "config.json") in one_sentence(error.value)


def test_damaged_mask_embedding_is_refused_with_its_name(draft: Path) -> None:
    (draft / "mask_embedding.pt").write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt is truncated or corrupted"):
        load_draft(draft)


def in_shards(folder: Path) -> list[Path]:
    """Split a folder's weights into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [folder / file for file in parts]


def test_sharded_weights_read_like_a_single_file(draft: Path, masters: Any) -> None:
    in_shards(draft)
    _, _, expected = read_draft(masters(zlab))
    _, _, tensors = read_draft(draft)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_missing_shard_is_named(draft: Path) -> None:
    shard = in_shards(draft)[1]
    shard.unlink()
    with pytest.raises(OSError, match="is missing") as error:
        load_draft(draft)
    assert str(shard) in one_sentence(error.value)


def test_tensor_that_only_the_index_knows_is_named(draft: Path) -> None:
    in_shards(draft)
    path = draft / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layers.9.mlp.up_proj.weight"] = "a.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lists 'layers\.9\.mlp\.up_proj\.weight'"):
        load_draft(draft)


# ---------------------------------------------------------------- tensors


def test_every_missing_tensor_is_noticed(draft: Path, masters: Any) -> None:
    for name in load_file(masters(zlab) / "model.safetensors"):
        edit_tensors(draft, lambda tensors, name=name: {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(ValueError, match=r"lack|no `fc` and `hidden_norm`") as error:
            load_draft(draft)
        assert name in one_sentence(error.value) or name in ("fc.weight", "hidden_norm.weight")
        shutil.copy(masters(zlab) / "model.safetensors", draft)


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.g_proj.weight", "prefix_gru.weight_ih_l0", "layers.2.mlp.up.weight"]
)
def test_tensor_without_a_place_is_named(draft: Path, name: str) -> None:
    edit_tensors(draft, lambda tensors: tensors | {name: torch.zeros(4)})
    with pytest.raises(ValueError, match="no place in the model") as error:
        load_draft(draft)
    assert repr(name) in one_sentence(error.value)


def test_tensor_of_another_shape_is_named_with_both_shapes(draft: Path) -> None:
    edit_tensors(draft, lambda tensors: tensors | {"fc.weight": torch.zeros(32, 96)})
    with pytest.raises(ValueError, match=r"'fc\.weight' is of shape \(32, 96\) .* asks for \(32, 64\)"):
        load_draft(draft)


def test_two_tensors_for_one_place_are_refused(draft: Path) -> None:
    edit_tensors(draft, lambda tensors: tensors | {"encoder.fc.weight": tensors["fc.weight"] + 1})
    with pytest.raises(ValueError, match=r"have the same place, 'fc\.weight'"):
        load_draft(draft)


def test_copies_of_the_targets_weights_are_left_out() -> None:
    assert model_name("verifier_norm.weight") is None
    assert model_name("verifier_lm_head.weight") is None
    assert model_name("rotary_emb.inv_freq") is None
    assert model_name("norm.weight") == "norm.weight"


def test_vocabulary_map_that_contradicts_its_marks_is_refused(masters: Any, tmp_path: Path) -> None:
    folder = copy_of(masters(speculators_reduced), tmp_path)
    edit_tensors(folder, lambda tensors: tensors | {"t2d": tensors["t2d"].roll(1)})
    with pytest.raises(ValueError, match="'t2d' marks other target tokens"):
        load_draft(folder)


@pytest.mark.parametrize("offset", [VOCABULARY, -2])
def test_vocabulary_map_to_no_token_is_refused(masters: Any, tmp_path: Path, offset: int) -> None:
    folder = copy_of(masters(speculators_reduced), tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        offsets = tensors["d2t"].clone()
        offsets[0] = offset
        return tensors | {"d2t": offsets}

    edit_tensors(folder, damage)
    with pytest.raises(ValueError, match="'d2t' maps the draft's 7 tokens"):
        load_draft(folder)


def test_reduced_head_without_its_map_is_refused(masters: Any, tmp_path: Path) -> None:
    folder = copy_of(masters(speculators_reduced), tmp_path)
    edit_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")})
    with pytest.raises(ValueError, match=r"`draft_vocab_size` is 7 .* weights lack 'd2t'"):
        load_draft(folder)


# ---------------------------------------------------------------- fields


def test_field_of_dflash_config_that_is_not_understood_is_named(draft: Path) -> None:
    edit_config(draft, lambda config: config["dflash_config"].update(new_trick=3))
    with pytest.raises(ValueError, match=r"`dflash_config\.new_trick` \(3\) is not understood"):
        load_draft(draft)


@pytest.mark.parametrize(
    ("name", "value", "nested"),
    [
        ("projector_type", "domino", True),
        ("causal_head", True, True),
        ("quantization_config", {"quant_method": "modelopt"}, False),
        ("is_neox_style", False, False),
        ("partial_rotary_factor", 0.5, False),
        ("gating", "per-head", False),
    ],
)
def test_field_known_to_matter_is_named_with_its_value(draft: Path, name: str, value: Any, nested: bool) -> None:
    edit_config(draft, lambda config: (config["dflash_config"] if nested else config).update({name: value}))
    with pytest.raises(ValueError, match="changes what the draft computes") as error:
        load_draft(draft)
    assert name in one_sentence(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("name", "nested_name", "value"),
    [
        ("block_size", "block_size", 8),
        ("mask_token_id", "mask_token_id", 3),
        ("target_layer_ids", "target_layer_ids", [0, 1]),
        ("target_layer_ids", "layer_ids", [0, 1]),
        ("is_causal", "causal", True),
    ],
)
def test_dialects_that_disagree_are_refused_with_both_values(
    draft: Path, name: str, nested_name: str, value: Any
) -> None:
    right = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": TAPS, "is_causal": False}[name]

    def edit(config: dict[str, Any]) -> None:
        config[name] = right
        config["dflash_config"][nested_name] = value

    edit_config(draft, edit)
    with pytest.raises(ValueError, match="remove the wrong one") as error:
        load_draft(draft)
    for part in (name, repr(right), f"dflash_config.{nested_name}", repr(value)):
        assert part in one_sentence(error.value)


def test_dialects_that_agree_are_read(draft: Path) -> None:
    edit_config(draft, lambda config: config["dflash_config"].update(block_size=BLOCK, num_target_layers=4))
    assert load_draft(draft).config.block_size == BLOCK


def test_window_flag_that_contradicts_the_window_is_refused(masters: Any, tmp_path: Path) -> None:
    folder = copy_of(masters(zlab_sliding), tmp_path)
    edit_config(folder, lambda config: config["dflash_config"].update(use_swa=True, swa_window_size=WINDOW + 1))
    with pytest.raises(
        ValueError, match=f"`dflash_config.swa_window_size` is {WINDOW + 1} but `sliding_window` is {WINDOW}"
    ):
        load_draft(folder)


def test_window_flag_without_a_window_is_refused(draft: Path) -> None:
    edit_config(draft, lambda config: config["dflash_config"].update(use_swa=True))
    with pytest.raises(ValueError, match="`swa_window_size` is missing"):
        load_draft(draft)


def test_eagle_taps_count_the_embedding(draft: Path) -> None:
    edit_config(draft, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 3]))
    assert load_draft(draft).config.target_layer_ids == [0, 2]
    edit_config(draft, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[0, 2]))
    with pytest.raises(ValueError, match="counts the embedding as 0"):
        load_draft(draft)


def test_mask_named_by_its_text_only_is_refused_with_the_text(draft: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        del config["dflash_config"]["mask_token_id"]
        config["dflash_config"]["mask_token"] = "<|MASK|>"

    edit_config(draft, edit)
    with pytest.raises(ValueError, match=r"no `mask_token_id` \(`mask_token` is '<\|MASK\|>'\)"):
        load_draft(draft)


def test_config_without_a_rope_base_is_refused(draft: Path) -> None:
    edit_config(draft, lambda config: config.pop("rope_parameters"))
    with pytest.raises(ValueError, match="no RoPE base"):
        load_draft(draft)


def test_old_names_of_rope_fields_are_read(draft: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config["rope_theta"] = 77_000.0
        config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}

    edit_config(draft, edit)
    parameters = load_draft(draft).config.rope_parameters
    assert (parameters["rope_theta"], parameters["rope_type"], parameters["factor"]) == (77_000.0, "linear", 2.0)


@pytest.mark.parametrize("missing", ["aux_hidden_state_layer_ids", "transformer_layer_config"])
def test_speculators_config_without_what_it_needs_is_refused(masters: Any, tmp_path: Path, missing: str) -> None:
    folder = copy_of(masters(speculators_reduced), tmp_path)
    edit_config(folder, lambda config: config.pop(missing))
    with pytest.raises(ValueError, match=f"has no `{missing}`"):
        load_draft(folder)


def test_speculators_draft_of_another_width_than_its_target_is_refused(masters: Any, tmp_path: Path) -> None:
    folder = copy_of(masters(speculators_reduced), tmp_path)
    edit_config(folder, lambda config: config.update(target_hidden_size=64))
    with pytest.raises(ValueError, match="`target_hidden_size` is 64 but the draft's `hidden_size` is 32"):
        load_draft(folder)


def test_another_kind_of_speculator_is_refused_by_its_kind(masters: Any, tmp_path: Path) -> None:
    folder = copy_of(masters(speculators_reduced), tmp_path)
    edit_config(folder, lambda config: config.update(speculators_model_type="eagle3"))
    with pytest.raises(ValueError, match="`speculators_model_type` is 'eagle3'"):
        load_draft(folder)


def test_a_target_is_refused_as_a_draft(tmp_path: Path) -> None:
    tiny_target("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="This is no DFlash draft") as error:
        load_draft(tmp_path)
    assert "Qwen3ForCausalLM" in one_sentence(error.value)


# ---------------------------------------------------------------- what is read


def test_taps_of_every_format_are_the_same_layers(masters: Any) -> None:
    for writer in (zlab, native, speculators_reduced):
        assert load_draft(masters(writer)).config.target_layer_ids == TAPS
    assert load_draft(masters(deepspec_markov)).config.target_layer_ids == [-1, 2]


def test_windows_are_converted_by_their_number(masters: Any) -> None:
    assert load_draft(masters(zlab_sliding)).config.sliding_window == WINDOW
    assert load_draft(masters(native)).config.sliding_window == WINDOW + 1


def test_dtype_is_the_files_unless_asked_otherwise(draft: Path) -> None:
    edit_tensors(draft, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    edit_config(draft, lambda config: config.update(dtype="bfloat16"))
    assert load_draft(draft).dtype == torch.bfloat16
    assert load_draft(draft, dtype=torch.float32).dtype == torch.float32
    target = tiny_target("qwen3", vocab_size=VOCABULARY)
    assert load_draft(draft, target).dtype == target.dtype == torch.float64


def test_draft_of_an_offloaded_target_stays_where_it_was_loaded(draft: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    target = tiny_target("qwen3", vocab_size=VOCABULARY, dtype=torch.float32)
    accelerate.disk_offload(target, tmp_path / "offload", execution_device=torch.device("cpu"))
    assert target.device.type == "meta"
    assert load_draft(draft, target).device.type == "cpu"


def test_arguments_of_from_pretrained_are_passed_on(draft: Path) -> None:
    pytest.importorskip("accelerate")
    loaded = load_draft(draft, dtype=torch.bfloat16, attn_implementation="eager", device_map="cpu")
    assert (loaded.dtype, loaded.config._attn_implementation) == (torch.bfloat16, "eager")
    assert not any(parameter.is_meta for parameter in loaded.parameters())


def test_draft_for_another_target_is_refused_when_the_target_is_given(draft: Path) -> None:
    with pytest.raises(ValueError, match="`hidden_size` is 32 in the draft but 40 in the target"):
        load_draft(draft, tiny_target("qwen3", hidden_size=40, vocab_size=VOCABULARY))


def test_vocabulary_of_a_format_that_states_none_is_the_targets(masters: Any) -> None:
    assert load_draft(masters(native), tiny_target("qwen3")).config.vocab_size == 64


# ---------------------------------------------------------------- the Hub


def test_draft_is_fetched_from_the_hub(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with HubServer() as hub:
        files = {path.name: path.read_bytes() for path in draft.iterdir()}
        hub.add_repository("org/draft", files | {"dflash.py": b"raise SystemExit"})
        fetched = load_draft("org/draft", endpoint=hub.url, cache_dir=tmp_path / "cache", dtype=torch.float32)
        assert hub.count("unknown") == 0
    expected = load_draft(draft, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fetched.state_dict().items())
    assert not list(tmp_path.rglob("dflash.py")), "code of the repository is neither needed nor fetched"


def test_name_that_is_neither_folder_nor_repository_is_refused(tmp_path: Path) -> None:
    with HubServer() as hub:
        for name in ("org/nothing", str(tmp_path / "nothing" / "here")):
            with pytest.raises(OSError, match="is no folder here") as error:
                load_draft(name, endpoint=hub.url, cache_dir=tmp_path / "cache")
            assert name in one_sentence(error.value)


def test_file_in_place_of_a_folder_is_refused(draft: Path) -> None:
    with pytest.raises(OSError, match="is a file"):
        load_draft(draft / "model.safetensors")
