"""Converting drafts: tensors keep their bits, engines find their fields, what a format cannot express is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reference_drafts as drafts
from dflash_hf import Qwen3DFlashForDraft, cli, load_draft
from dflash_hf.checkpoints import exporting, read_draft
from dflash_hf.checkpoints.convert import FORMATS, convert
from helpers import SHARED_DRAFT, random_prompt, requires_shared, tiny_draft, tiny_target
from reference_drafts import BLOCK, MASK, TAPS, VOCABULARY, WINDOW, block_of, edit_tensors

# Writer -> formats, besides this package's own, that can express it.
EXPRESSIBLE: dict[Callable[..., Any], set[str]] = {
    drafts.zlab: {"zlab", "speculators", "native"},
    drafts.zlab_sliding: {"zlab", "speculators"},
    drafts.zlab_sliding_bidirectional: {"zlab", "speculators", "native"},
    drafts.zlab_nested_scaled: {"zlab"},
    drafts.zlab_yarn: {"zlab", "speculators", "native"},
    drafts.dflash_2: {"zlab", "speculators"},
    drafts.native: {"zlab", "speculators", "native"},
    drafts.speculators_full: {"zlab", "speculators", "native"},
    drafts.speculators_sliding: {"speculators"},
    drafts.speculators_non_causal: {"speculators"},
    drafts.speculators_reduced: {"speculators"},
    drafts.speculators_own_embedding: {"speculators"},
    drafts.speculators_from_anchor: {"speculators"},
    drafts.speculators_dflash_2: {"speculators"},
    drafts.speculators_dspark: {"speculators"},
    drafts.speculators_dspark_gated: {"speculators"},
    drafts.specforge: {"zlab", "speculators"},
    drafts.specforge_dspark: {"zlab", "speculators"},
    drafts.deepspec_plain: {"speculators"},
    drafts.deepspec_markov: {"speculators"},
    drafts.modelopt: {"zlab"},
    drafts.mask_embedding: {"zlab"},
    drafts.tap_norms: set(),
}
# Fields that say how a file was written, not what the draft computes.
UNIMPORTANT = ("architectures", "transformers_version", "_name_or_path", "auto_map", "num_target_layers", "use_cache")


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Each writer's checkpoint, written once."""

    @cache
    def master(writer: Any) -> Path:
        folder = tmp_path_factory.mktemp(writer.__name__)
        writer(folder)
        return folder

    return master


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_target("qwen3", vocab_size=VOCABULARY).save_pretrained(folder)
    return str(folder)


def what_it_computes(config: Any) -> dict[str, Any]:
    """A config's fields, with the two ways of saying `nothing` of a scale, a window or causality made one."""
    fields = {name: value for name, value in config.to_dict().items() if name not in UNIMPORTANT}
    fields["input_embedding_scale"] = fields["input_embedding_scale"] or 1.0
    fields["is_causal"] = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    if "sliding_attention" not in fields["layer_types"]:
        fields |= {"sliding_window": None, "use_sliding_window": False}
    return fields


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("writer", EXPRESSIBLE, ids=lambda writer: writer.__name__)
def test_every_conversion_keeps_bits_and_meaning_or_is_refused(
    masters: Any, target_folder: str, writer: Any, to: str, tmp_path: Path
) -> None:
    source, destination = masters(writer), tmp_path / "converted"
    if to != "dflash" and to not in EXPRESSIBLE[writer]:
        with pytest.raises(ValueError, match=f"which the format '{to}' cannot express") as error:
            convert(source, destination, to, target_folder)
        assert "\n" not in str(error.value)
        assert not list(tmp_path.iterdir()), "a refused conversion leaves nothing behind"
        return
    convert(source, destination, to, target_folder)
    _, config, tensors = read_draft(source)
    found, config_back, tensors_back = read_draft(destination)
    assert found == to
    assert tensors_back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensors_back[name].dtype == tensor.dtype
        assert torch.equal(tensors_back[name], tensor), name
    assert what_it_computes(config_back) == what_it_computes(config)


def test_tensors_of_different_dtypes_keep_them(masters: Any, tmp_path: Path) -> None:
    source = Path(shutil.copytree(masters(drafts.zlab), tmp_path / "source"))

    def mix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}

    edit_tensors(source, mix)
    for to in FORMATS:
        convert(source, tmp_path / to, to)
        _, _, tensors = read_draft(tmp_path / to)
        expected = load_file(source / "model.safetensors")
        assert all(tensors[n].dtype == t.dtype and torch.equal(tensors[n], t) for n, t in expected.items())


# ---------------------------------------------------------------- what engines read


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


BODY_NAMES = {
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}


def test_zlab_export_says_what_vllm_and_sglang_read(masters: Any, tmp_path: Path) -> None:
    convert(masters(drafts.zlab_sliding), tmp_path / "out", "zlab")
    config = config_of(tmp_path / "out")
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
        "num_target_layers": 4,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    assert {name: config.get(name) for name in expected} == expected
    assert "is_causal" not in config, "absent means: sliding layers causal, full layers bidirectional"
    assert "auto_map" not in config, "the engine's own class reads this folder"
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == BODY_NAMES | {"fc.weight", "hidden_norm.weight", "norm.weight"}, "no prefix, no embedding, no head"


def test_zlab_export_needs_the_number_of_target_layers(masters: Any, target_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`num_target_layers` is unknown"):
        convert(masters(drafts.native), tmp_path / "out", "zlab")
    convert(masters(drafts.native), tmp_path / "out", "zlab", target_folder)
    assert config_of(tmp_path / "out")["num_target_layers"] == 4


def test_zlab_export_of_bidirectional_windows_says_so(masters: Any, target_folder: str, tmp_path: Path) -> None:
    convert(masters(drafts.native), tmp_path / "out", "zlab", target_folder)
    config = config_of(tmp_path / "out")
    assert config["is_causal"] is False
    assert config["sliding_window"] == WINDOW + 1, "Transformers' own window includes the distance it names"


def test_zlab_export_of_dflash_2_says_what_its_class_reads(masters: Any, tmp_path: Path) -> None:
    convert(masters(drafts.dflash_2), tmp_path / "out", "zlab")
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["DFlash2DraftModel"]
    nested = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": TAPS, **nested}
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {"candidate_selector.predecessor_codebook", "layers.1.mlp_conv.base_kernel"} <= names


def test_zlab_export_of_sinks_uses_modelopts_names(masters: Any, tmp_path: Path) -> None:
    convert(masters(drafts.modelopt), tmp_path / "out", "zlab")
    config = config_of(tmp_path / "out")
    assert config["is_causal"] is True
    assert config["dflash_config"]["attention_sink_bias"] is True
    assert config["dflash_config"]["attention_value_scale"] == 0.5
    assert "layers.0.self_attn.attention_sink_bias" in load_file(tmp_path / "out" / "model.safetensors")


def test_speculators_export_says_what_vllm_reads(masters: Any, target_folder: str, tmp_path: Path) -> None:
    convert(masters(drafts.zlab_sliding), tmp_path / "out", "speculators", target_folder)
    config = config_of(tmp_path / "out")
    expected = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "block_size": BLOCK,
        "draft_vocab_size": VOCABULARY,
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": 32,
        "dtype": "float32",
    }
    assert {name: config.get(name) for name in expected} == expected
    speculators_config = config["speculators_config"]
    assert speculators_config["algorithm"] == "dflash"
    assert speculators_config["default_proposal_method"] == "greedy"
    assert speculators_config["proposal_methods"][0]["proposal_type"] == "greedy"
    assert speculators_config["proposal_methods"][0]["speculative_tokens"] == BLOCK - 1
    assert speculators_config["verifier"]["name_or_path"] == target_folder
    assert speculators_config["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    body = config["transformer_layer_config"]
    assert (body["model_type"], body["num_hidden_layers"], body["sliding_window"]) == ("qwen3", 2, WINDOW)
    assert body["rope_parameters"]["rope_theta"] == 10_000.0


def test_speculators_export_without_windows_is_bidirectional_to_vllm(masters: Any, tmp_path: Path) -> None:
    """vLLM reads `causal = not sliding_window_non_causal` for every layer, full ones included."""
    convert(masters(drafts.zlab), tmp_path / "out", "speculators")
    assert config_of(tmp_path / "out")["sliding_window_non_causal"] is True


def test_zlab_export_of_dspark_says_what_specforge_and_vllm_read(masters: Any, tmp_path: Path) -> None:
    convert(masters(drafts.specforge_dspark), tmp_path / "out", "zlab")
    config = config_of(tmp_path / "out")
    heads = {
        "markov_rank": 6,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
    }
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["dflash_config"] == {
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
        "projector_type": "dspark",
        **heads,
    }
    assert {name: config[name] for name in heads} == heads, "vLLM looks at the top level only"
    assert config["sample_from_anchor"] is True


def test_reduced_vocabulary_is_written_as_offsets_and_marks(masters: Any, tmp_path: Path) -> None:
    convert(masters(drafts.speculators_reduced), tmp_path / "own", "dflash")
    convert(tmp_path / "own", tmp_path / "out", "speculators")
    expected = load_file(masters(drafts.speculators_reduced) / "model.safetensors")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name in ("d2t", "t2d", "lm_head.weight"):
        assert exported[name].dtype == expected[name].dtype
        assert torch.equal(exported[name], expected[name])


# ---------------------------------------------------------------- what the target has to tell

GEMMA_SCALE = 32**0.5  # Gemma's embedding multiplies by the root of the hidden size


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target whose embedding scales, and its folder."""
    target = tiny_target("gemma3", dtype=torch.float32, vocab_size=VOCABULARY)
    folder = tmp_path_factory.mktemp("gemma")
    target.save_pretrained(folder)
    return target, str(folder)


@torch.no_grad()
def embeds_of(folder: Path, target: Any) -> torch.Tensor:
    return load_draft(folder, dtype=torch.float32).embed_block(
        block_of(torch.tensor([3])), target.get_input_embeddings()
    )


def test_zlab_export_for_a_target_that_scales_says_its_factor(gemma: Any, tmp_path: Path) -> None:
    """z-lab's class looks tokens up in the bare table, and multiplies by `input_embedding_scale` where it is named."""
    target, folder = gemma
    tiny_draft(target).save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "out", "zlab", folder)
    assert config_of(tmp_path / "out")["dflash_config"]["input_embedding_scale"] == pytest.approx(GEMMA_SCALE)
    torch.testing.assert_close(embeds_of(tmp_path / "out", target), embeds_of(tmp_path / "own", target))


def test_speculators_export_for_a_target_that_scales_is_refused(gemma: Any, tmp_path: Path) -> None:
    target, folder = gemma
    tiny_draft(target).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=r"`input_embedding_scale` is 5\.65.* 'speculators' cannot express"):
        convert(tmp_path / "own", tmp_path / "out", "speculators", folder)


def test_native_drafts_of_a_target_that_scales_keep_its_factor(masters: Any, gemma: Any, tmp_path: Path) -> None:
    target, folder = gemma
    convert(masters(drafts.native), tmp_path / "zlab", "zlab", folder)
    convert(tmp_path / "zlab", tmp_path / "native", "native", folder)
    expected = embeds_of(masters(drafts.native), target)
    for made in ("zlab", "native"):
        torch.testing.assert_close(embeds_of(tmp_path / made, target), expected)


def test_native_export_of_a_draft_of_the_bare_table_is_refused_where_the_target_scales(
    masters: Any, gemma: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"`input_embedding_scale` is 1\.0, .* scaled by 5\.65685") as error:
        convert(masters(drafts.zlab), tmp_path / "out", "native", gemma[1])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("own", "to"), [(True, "zlab"), (True, "speculators"), (False, "native")])
def test_factor_that_only_the_target_knows_is_warned_of(
    masters: Any, own: bool, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(exporting.logger, "warning", warnings.append)
    source = masters(drafts.zlab)
    if own:
        source = tmp_path / "own"
        tiny_draft(tiny_target("qwen3", dtype=torch.float32)).save_pretrained(source)
    convert(source, tmp_path / "out", to)
    assert len(warnings) == 1
    assert "`input_embedding_scale`" in warnings[0]
    assert "--target" in warnings[0]


def test_vocabulary_of_a_native_draft_is_the_targets(masters: Any, tmp_path: Path) -> None:
    """Its config states none; the mask token's id, 11, says no more than that there are at least 12."""
    tiny_target("qwen3").save_pretrained(tmp_path / "target")  # 64 tokens
    for to in FORMATS:
        convert(masters(drafts.native), tmp_path / to, to, str(tmp_path / "target"))
        assert read_draft(tmp_path / to)[1].vocab_size == 64


@pytest.mark.parametrize("to", ["dflash", "speculators"])
def test_vocabulary_that_nothing_tells_is_refused(masters: Any, to: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"`vocab_size` is not in the draft's config, .*'{to}' states it"):
        convert(masters(drafts.native), tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_vocabulary_that_nothing_tells_is_left_out_of_a_native_export(masters: Any, tmp_path: Path) -> None:
    convert(masters(drafts.native), tmp_path / "out", "native")
    assert "vocab_size" not in config_of(tmp_path / "out")


# ---------------------------------------------------------------- the formats' own classes load what is written


@torch.no_grad()
def states_of(draft: Any, taps: torch.Tensor, token: torch.Tensor, target: Any) -> torch.Tensor:
    return draft(draft.embed_block(block_of(token), target.get_input_embeddings()), taps).last_hidden_state


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny_target("qwen3", dtype=torch.float32, vocab_size=VOCABULARY)


@torch.no_grad()
def taps_and_tokens(target: Any, length: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = random_prompt(length, vocabulary=VOCABULARY)
    hidden_states = target(tokens[:, :-1], output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[tap + 1] for tap in TAPS], dim=-1), tokens


@torch.no_grad()
@pytest.mark.parametrize("writer", [drafts.zlab_sliding, drafts.native, drafts.dflash_2], ids=lambda w: w.__name__)
def test_dflash_loads_the_zlab_export_and_agrees(
    masters: Any, small: Any, target_folder: str, writer: Any, tmp_path: Path
) -> None:
    dflash = pytest.importorskip("dflash.model")
    convert(masters(writer), tmp_path / "out", "zlab", target_folder)
    name = config_of(tmp_path / "out")["architectures"][0]
    theirs = getattr(dflash, name).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    taps, tokens = taps_and_tokens(small)
    reference = drafts.reference_of_zlab_model(theirs, [])
    expected = reference.states(tokens, taps, small)
    ours = states_of(load_draft(masters(writer), dtype=torch.float32).eval(), taps, tokens[:, -1], small)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("writer", "kind"),
    [
        (drafts.zlab, "DFlash"),
        (drafts.speculators_sliding, "DFlash"),
        (drafts.speculators_reduced, "DFlash"),
        (drafts.deepspec_markov, "DSpark"),
        (drafts.speculators_dflash_2, "DFlash2"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_speculators_loads_its_export_and_agrees(
    masters: Any, small: Any, writer: Any, kind: str, tmp_path: Path
) -> None:
    speculators = pytest.importorskip("speculators")
    convert(masters(writer), tmp_path / "out", "speculators")
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "eager"
    model_class = getattr(speculators, f"{kind}DraftModel")
    theirs = model_class.from_pretrained(tmp_path / "out", config=config)
    draft = load_draft(masters(writer), dtype=torch.float32).eval()
    taps, tokens = taps_and_tokens(small)
    if draft.embed_tokens is not None:  # the reference takes the embedding from what it is given as the target
        small = draft
    expected = drafts.reference_of_speculators_model(theirs.eval()).states(tokens, taps, small)
    torch.testing.assert_close(states_of(draft, taps, tokens[:, -1], small), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_transformers_own_path_generates_with_the_native_export(masters: Any, small: Any, tmp_path: Path) -> None:
    from transformers import AutoModel

    convert(masters(drafts.zlab_sliding_bidirectional), tmp_path / "out", "native")
    theirs = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(theirs).__name__ == "MuseGlimmerAssistantModel"
    ours = load_draft(tmp_path / "out", small)
    prompt = random_prompt(9, vocabulary=VOCABULARY)
    kwargs = {"max_new_tokens": 24, "do_sample": False}
    expected = small.generate(prompt, **kwargs)
    assert torch.equal(small.generate(prompt, assistant_model=ours, **kwargs), expected)
    native = small.generate(prompt, assistant_model=theirs, speculation_type="dflash", **kwargs)
    assert torch.equal(native, expected)


def test_own_export_is_a_repository_that_loads_alone(masters: Any, tmp_path: Path) -> None:
    from transformers import AutoModel

    convert(masters(drafts.dflash_2), tmp_path / "out", "dflash")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_dflash.py", "modeling_dflash_heads.py"} <= files
    draft, info = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = load_draft(masters(drafts.dflash_2)).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in draft.state_dict().items())


# ---------------------------------------------------------------- the command


def test_command_converts_and_says_what_it_did(
    masters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    destination = tmp_path / "deep" / "out"
    assert cli.main(["convert", str(masters(drafts.zlab)), str(destination), "--to", "speculators"]) == 0
    assert "(zlab)" in capsys.readouterr().out
    assert read_draft(destination)[0] == "speculators"


def test_command_words_a_refusal_on_one_line(masters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(masters(drafts.tap_norms))
    assert cli.main(["convert", source, str(tmp_path / "out"), "--to", "zlab"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: `tap_norms` is True, which the format 'zlab' cannot express")
    assert error.count("\n") == 1


def test_folder_in_use_is_left_alone(masters: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="is in use"):
        convert(masters(drafts.zlab), tmp_path, "zlab")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_empty_folder_is_filled_by_whatever_name_it_has(
    masters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    for destination in (".", str(tmp_path / "link")):
        convert(masters(drafts.zlab), destination, "zlab")
        assert sorted(os.listdir(destination)) == ["config.json", "model.safetensors"]
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "there"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o755), (0o077, 0o700)])
def test_folder_has_the_permissions_the_user_gives_new_folders(
    masters: Any, mask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        convert(masters(drafts.zlab), tmp_path / "out", "zlab")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("fields", "to", "name"),
    [
        ({"target_layer_ids": [-1, 2]}, "zlab", "target_layer_ids"),
        ({"target_layer_ids": [-1, 2]}, "native", "target_layer_ids"),
        ({"is_causal": True}, "speculators", "is_causal"),
        ({"is_causal": True}, "native", "is_causal"),
        ({"attention_bias": True}, "native", "attention_bias"),
        ({"input_embedding_scale": 4.0}, "speculators", "input_embedding_scale"),
        ({"conv_kernel_size": 2, "conv_group_size": 8}, "zlab", "conv_kernel_size"),
        ({"markov_rank": 4}, "zlab", "slots_predict_next"),
        ({"slots_predict_next": True}, "zlab", "slots_predict_next"),
    ],
)
def test_field_that_a_format_cannot_express_is_named(
    fields: dict[str, Any], to: str, name: str, tmp_path: Path
) -> None:
    tiny_draft(tiny_target("qwen3", dtype=torch.float32), **fields).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=f"`{name}` is .* which the format '{to}' cannot express"):
        convert(tmp_path / "draft", tmp_path / "out", to)


# ---------------------------------------------------------------- a trained draft


@requires_shared
@pytest.mark.parametrize("to", FORMATS)
def test_trained_draft_survives_every_format_and_back(to: str, tmp_path: Path) -> None:
    convert(SHARED_DRAFT, tmp_path / "there", to)
    convert(tmp_path / "there", tmp_path / "back", "zlab")
    expected = load_file(SHARED_DRAFT / "model.safetensors")
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    original, back = config_of(SHARED_DRAFT), config_of(tmp_path / "back")
    if to == "native":  # whose configs say nothing of causality, so that it is said in the next
        assert back.pop("is_causal") is False
    ignored = {"transformers_version", "tokenizer_class"}
    assert {n: back.get(n) for n in original if n not in ignored} == {
        n: v for n, v in original.items() if n not in ignored
    }


@requires_shared
@torch.no_grad()
def test_trained_draft_generates_the_same_from_every_format(real_pair: Any, tmp_path: Path) -> None:
    target, tokenizer, _ = real_pair
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    kwargs = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    results = {}
    for to in FORMATS:
        convert(SHARED_DRAFT, tmp_path / to, to)
        draft = load_draft(tmp_path / to, target)
        assert isinstance(draft, Qwen3DFlashForDraft)
        output = target.generate(**inputs, assistant_model=draft, **kwargs)
        results[to] = (output.sequences.tolist(), output.acceptance_lengths)
    assert all(result == results["zlab"] for result in results.values())
    assert sum(results["zlab"][1][0]) > len(results["zlab"][1][0])
