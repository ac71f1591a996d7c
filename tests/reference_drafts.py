"""Tiny drafts in every published format, written by the projects that define the formats, with their own forwards.

Each writer saves a checkpoint and returns a `Reference`: that project's own hidden states and greedy proposals. Where
a project is not on the package index (DeepSpec, ModelOpt, Laguna), its checkpoint is put together from the documented
names and fields around dflash's body, and what differs is computed by hand.

Shapes: B batch (always 1), S context, K block, P proposals, H hidden, V vocabulary, L taps.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Config

from helpers import scramble

VOCABULARY = 12  # small, so that a random draft is right now and then
MASK = VOCABULARY - 1
BLOCK = 4
WINDOW = 5
BODY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}
SLIDING = {
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
TAPS = [0, 2]


@dataclass
class Reference:
    """A project's own computation of a draft.

    Attributes:
        states: `(token_ids (1, S + 1), taps (1, S, L * H), target) -> (1, K, H)`: the block's final states, the last
            token being the anchor.
        propose: `(states (1, K, H), anchor (1,), target) -> (1, P)`: greedy proposals.
        taps: Indices into the target's `hidden_states`, whose first is the embedding.
    """

    states: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
    propose: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
    taps: Sequence[int]


def block_of(anchor: torch.Tensor, block_size: int = BLOCK) -> torch.Tensor:
    """`[anchor, MASK, ..., MASK]`, (1, K)."""
    block = torch.full((1, block_size), MASK)
    block[:, 0] = anchor
    return block


def reference_acceptance(reference: Reference, target: Any, prompt: torch.Tensor, max_new_tokens: int) -> list[int]:
    """Tokens committed per round, by a loop without caches: every round recomputes the whole prefix."""
    tokens = torch.cat([prompt, target(prompt).logits[:, -1:].argmax(-1)], dim=1)
    lengths = []
    while tokens.shape[1] - prompt.shape[1] < max_new_tokens:
        hidden_states = target(tokens[:, :-1], output_hidden_states=True).hidden_states
        taps = torch.cat([hidden_states[tap] for tap in reference.taps], dim=-1)
        proposals = reference.propose(reference.states(tokens, taps, target), tokens[:, -1], target)
        candidate = torch.cat([tokens, proposals], dim=1)
        answers = target(candidate).logits[:, tokens.shape[1] - 1 :].argmax(-1)  # (1, P + 1)
        accepted = int((proposals == answers[:, :-1]).long().cumprod(1).sum())
        tokens = torch.cat([tokens, proposals[:, :accepted], answers[:, accepted : accepted + 1]], dim=1)
        lengths.append(accepted + 1)
    return lengths


# --- z-lab: dflash 0.1.0 ---------------------------------------------------------------------------------------------


def zlab_reference(folder: Path, *, architecture: str = "DFlashDraftModel", **fields: Any) -> Reference:
    """A draft of dflash's own class; `dflash_config` and top-level fields as given."""
    dflash = pytest.importorskip("dflash.model")
    nested = {"mask_token_id": MASK, "target_layer_ids": TAPS, **fields.pop("dflash_config", {})}
    config = Qwen3Config(**{**BODY, "block_size": BLOCK, "num_target_layers": 4, "dflash_config": nested, **fields})
    model = getattr(dflash, architecture)(config)
    scramble(model, seed=3)
    model.eval().save_pretrained(folder)
    return reference_of_zlab_model(model, [tap + 1 for tap in model.target_layer_ids])


def reference_of_zlab_model(model: Any, taps: Sequence[int]) -> Reference:
    dflash = pytest.importorskip("dflash.model")

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        scale = float(dflash._draft_value(model.config, "input_embedding_scale", 1.0))
        embeds = dflash._raw_input_embeddings(target, block_of(tokens[:, -1]), scale)
        positions = torch.arange(context.shape[1] + BLOCK)[None]
        return model(position_ids=positions, noise_embedding=embeds, target_hidden=context)

    def propose(hidden: torch.Tensor, anchor: torch.Tensor, target: Any) -> torch.Tensor:
        if hasattr(model, "propose"):
            return model.propose(hidden[:, 1:], anchor, dflash._output_head(target), 0.0)[0]
        return model.compute_logits(hidden[:, 1:], dflash._output_head(target)).argmax(-1)

    return Reference(states, propose, taps)


def zlab(folder: Path) -> Reference:
    return zlab_reference(folder)


def zlab_sliding(folder: Path) -> Reference:
    return zlab_reference(folder, **SLIDING)


def zlab_sliding_bidirectional(folder: Path) -> Reference:
    return zlab_reference(folder, is_causal=False, **SLIDING)


def zlab_nested_scaled(folder: Path) -> Reference:
    """Newer drafts keep the block size in `dflash_config`, drafts for Gemma scale and cap; more taps than layers."""
    nested = {
        "block_size": BLOCK,
        "target_layer_ids": [0, 1, 3],
        "input_embedding_scale": 5.5,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 1.5,
    }
    reference = zlab_reference(folder, dflash_config=nested, block_size=None)
    edit_config(folder, lambda config: config.pop("block_size", None))
    return reference


def zlab_yarn(folder: Path) -> Reference:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return zlab_reference(folder, rope_parameters=rope)


def dflash_2(folder: Path) -> Reference:
    nested = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    reference = zlab_reference(
        folder, architecture="DFlash2DraftModel", dflash_config=nested, is_causal=False, **SLIDING
    )
    # The published files leave out the `.weight` that saving the class writes.
    rename_tensors(folder, lambda name: name.replace("_codebook.weight", "_codebook"))
    return reference


# --- Transformers' own -----------------------------------------------------------------------------------------------


def native(folder: Path) -> Reference:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    body = {name: value for name, value in BODY.items() if name not in ("vocab_size", "tie_word_embeddings")}
    layer_types = SLIDING["layer_types"]
    config = MuseGlimmerAssistantConfig(
        **body, sliding_window=WINDOW, layer_types=layer_types, block_size=BLOCK, mask_token_id=MASK,
        target_layer_ids=TAPS, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config)
    scramble(model, seed=4)
    model.eval().save_pretrained(folder)

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(context.shape[1])
        embeds = target.get_input_embeddings()(block_of(tokens[:, -1]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 5.24 renames the argument that 5.17 knows
            return model(embeds, context, **{cache_keyword(): cache}).last_hidden_state

    def propose(hidden: torch.Tensor, anchor: torch.Tensor, target: Any) -> torch.Tensor:
        return target.get_output_embeddings()(hidden[:, 1:]).argmax(-1)

    return Reference(states, propose, [tap + 1 for tap in TAPS])


def cache_keyword() -> str:
    from dflash_hf.generation.compat import CACHE_KEY

    return CACHE_KEY


# --- speculators 0.9.0 -----------------------------------------------------------------------------------------------


def speculators_reference(
    folder: Path, kind: str = "DFlash", body: dict[str, Any] | None = None, **fields: Any
) -> Reference:
    """A draft of speculators' own class. What it takes from the target at load is given to it when it first runs."""
    speculators = pytest.importorskip("speculators")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer_config = Qwen3Config(**{**BODY, **(body or {})})
    layer_config._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    config = getattr(speculators, f"{kind}SpeculatorConfig")(
        **{
            "transformer_layer_config": layer_config,
            "draft_vocab_size": VOCABULARY,
            "block_size": BLOCK,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
            "mask_token_id": MASK,
            "speculators_config": SpeculatorsConfig(
                algorithm=kind.lower(),
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=verifier,
            ),
            **fields,
        }
    )
    model = getattr(speculators, f"{kind}DraftModel")(config).eval()
    scramble(model, seed=5)
    if model.use_draft_vocab:
        marks = torch.zeros(VOCABULARY, dtype=torch.bool)
        marks[[1, 2, 4, 5, 7, 9, 10]] = True
        model.load_vocab_mappings(marks, marks.nonzero()[:, 0] - torch.arange(7))
    model.save_pretrained(folder)
    return reference_of_speculators_model(model)


def reference_of_speculators_model(model: Any) -> Reference:
    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        with torch.no_grad():
            model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
            if not model.use_draft_vocab:
                model.lm_head.weight.copy_(target.get_output_embeddings().weight)
        anchor, length = context.shape[1], context.shape[1] + 1 + BLOCK
        mask = torch.zeros(1, length)
        mask[:, anchor] = 1  # the one place where an anchor may stand
        after = torch.zeros(1, 1 + BLOCK, dtype=torch.long)
        hidden, *_ = model._backbone_forward(
            hidden_states=nn.functional.pad(context, (0, 0, 0, 1 + BLOCK)),
            input_ids=torch.cat([tokens, after], dim=1)[:, :length],
            loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(1, length, context.shape[2] // len(TAPS)),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        return hidden

    def propose(hidden: torch.Tensor, anchor: torch.Tensor, target: Any) -> torch.Tensor:
        slots = hidden if model.config.sample_from_anchor else hidden[:, 1:]
        logits = model.lm_head(slots)
        chosen = [anchor]
        for slot in range(slots.shape[1]):
            chosen.append(speculators_choice(model, logits, slots, slot, torch.stack(chosen, dim=1)))
        return torch.stack(chosen[1:], dim=1)

    return Reference(states, propose, model.config.aux_hidden_state_layer_ids)


def speculators_choice(
    model: Any, logits: torch.Tensor, slots: torch.Tensor, slot: int, previous: torch.Tensor
) -> Any:
    """The target's id of the next proposal, (1,), by the project's heads, given the tokens before, (1, slot + 1)."""
    if getattr(model, "candidate_selector", None) is not None:
        ids, scores = model.candidate_selector.select(logits[:, slot], slots[:, slot], previous[:, -1])
        return ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
    scores = logits[:, slot]
    if getattr(model, "markov_head", None) is not None:
        bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=slots[:, : slot + 1])
        scores = scores + bias[:, slot]
    draft_ids = scores.argmax(-1)
    return draft_ids if model.d2t is None else draft_ids + model.d2t[draft_ids]


def speculators_full(folder: Path) -> Reference:
    return speculators_reference(folder)


def speculators_sliding(folder: Path) -> Reference:
    return speculators_reference(folder, body=SLIDING)


def speculators_non_causal(folder: Path) -> Reference:
    return speculators_reference(folder, body=SLIDING, sliding_window_non_causal=True)


def speculators_reduced(folder: Path) -> Reference:
    return speculators_reference(folder, draft_vocab_size=7)


def speculators_own_embedding(folder: Path) -> Reference:
    """Earlier versions save the embedding and the head they took from the target."""
    reference = speculators_reference(folder)
    generator = torch.Generator().manual_seed(9)
    tables = {name: torch.randn(VOCABULARY, 32, generator=generator) for name in ("embed_tokens", "lm_head")}
    edit_tensors(folder, lambda old: old | {f"{name}.weight": table for name, table in tables.items()})

    class Own:
        def get_input_embeddings(self) -> nn.Module:
            return nn.Embedding.from_pretrained(tables["embed_tokens"])

        def get_output_embeddings(self) -> nn.Module:
            return nn.Embedding.from_pretrained(tables["lm_head"])  # only its `weight` is read

    return Reference(
        lambda tokens, context, target: reference.states(tokens, context, Own()), reference.propose, reference.taps
    )


def speculators_from_anchor(folder: Path) -> Reference:
    return speculators_reference(folder, sample_from_anchor=True)


def speculators_dflash_2(folder: Path) -> Reference:
    fields = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    return speculators_reference(folder, "DFlash2", body=SLIDING, **fields)


def speculators_dspark(folder: Path) -> Reference:
    return speculators_reference(folder, "DSpark", draft_vocab_size=7, markov_rank=6)


def speculators_dspark_gated(folder: Path) -> Reference:
    return speculators_reference(folder, "DSpark", markov_rank=6, markov_head_type="gated", sample_from_anchor=False)


def speculators_dspark_rnn(folder: Path) -> Reference:
    return speculators_reference(folder, "DSpark", markov_rank=6, markov_head_type="rnn")


# --- SpecForge 0.2.0 -------------------------------------------------------------------------------------------------


def specforge_reference(folder: Path, architecture: str, nested: dict[str, Any], **fields: Any) -> Reference:
    """A draft of SpecForge's own class, run under the visibility that it trains with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses flash-attention
        drafts = pytest.importorskip("specforge.modeling.draft")
        training = pytest.importorskip("specforge.algorithms.common.dflash_family_model")
    nested = {"mask_token_id": MASK, "target_layer_ids": TAPS, **nested}
    config = Qwen3Config(**{**BODY, "block_size": BLOCK, "num_target_layers": 4, "dflash_config": nested, **fields})
    config._attn_implementation = "sdpa"
    model = getattr(drafts, architecture)(config)
    scramble(model, seed=6)
    model.eval().save_pretrained(folder)
    is_dspark = architecture == "DSparkDraftModel"

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        anchor = context.shape[1]
        masks = {
            kind: training.create_dflash_sdpa_mask(
                torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool), anchor, BLOCK, "cpu", window
            )
            for kind, window in (("full_attention", None), ("sliding_attention", model.sliding_window))
        }
        embeds = target.get_input_embeddings()(block_of(tokens[:, -1]))
        positions = torch.arange(anchor + BLOCK)[None]
        return model(positions, masks, noise_embedding=embeds, target_hidden=context)

    def propose(hidden: torch.Tensor, anchor: torch.Tensor, target: Any) -> torch.Tensor:
        # DSpark's slots are trained to predict the next token, the anchor's, too; its `spec_generate`, which drops the
        # anchor's slot and reads the others as unshifted, does not follow.
        slots = hidden if is_dspark else hidden[:, 1:]
        logits = target.get_output_embeddings()(slots)
        if getattr(model, "markov_head", None) is None:
            return logits.argmax(-1)
        return model.markov_head.sample_block_tokens(logits, first_prev_token_ids=anchor, hidden_states=slots)[0]

    return Reference(states, propose, [tap + 1 for tap in TAPS])


def specforge(folder: Path) -> Reference:
    return specforge_reference(folder, "DFlashDraftModel", {}, **SLIDING)


def specforge_dspark(folder: Path) -> Reference:
    nested = {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "rnn", "enable_confidence_head": True}
    return specforge_reference(folder, "DSparkDraftModel", nested)


# --- projects that are not on the index ------------------------------------------------------------------------------


def deepspec_plain(folder: Path) -> Reference:
    return deepspec_reference(folder, markov_rank=0)


def deepspec_markov(folder: Path) -> Reference:
    return deepspec_reference(folder, markov_rank=6)


def deepspec_reference(folder: Path, markov_rank: int) -> Reference:
    """DeepSpec: own embedding and head, every slot predicts the next token, tap -1 is the embedding."""
    taps = [-1, 2]
    body = zlab_reference(folder, dflash_config={"target_layer_ids": [0, 2]})
    generator = torch.Generator().manual_seed(7)
    extra = {name: torch.randn(VOCABULARY, 32, generator=generator) for name in ("embed_tokens", "lm_head")}
    tensors = {f"{name}.weight": tensor for name, tensor in extra.items()}
    first = second = torch.zeros(VOCABULARY, 1)
    if markov_rank:
        first, second = (torch.randn(VOCABULARY, markov_rank, generator=generator) for _ in range(2))
        tensors |= {"markov_head.markov_w1.weight": first, "markov_head.markov_w2.weight": second}
    edit_tensors(folder, lambda old: old | tensors)

    def edit(config: dict[str, Any]) -> None:
        del config["dflash_config"]
        config.update(
            architectures=["Qwen3DSparkModel"], target_layer_ids=taps, mask_token_id=MASK, num_anchors=512,
            enable_confidence_head=False, markov_rank=markov_rank,
        )  # fmt: skip

    edit_config(folder, edit)

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        own = type(
            "Own", (), {"get_input_embeddings": lambda self: nn.Embedding.from_pretrained(extra["embed_tokens"])}
        )
        return body.states(tokens, context, own())

    def propose(hidden: torch.Tensor, anchor: torch.Tensor, target: Any) -> torch.Tensor:
        chosen = [anchor]
        for slot in range(BLOCK):
            scores = hidden[:, slot] @ extra["lm_head"].T + first[chosen[-1]] @ second.T
            chosen.append(scores.argmax(-1))
        return torch.stack(chosen[1:], dim=1)

    return Reference(states, propose, [tap + 1 for tap in taps])


def modelopt(folder: Path) -> Reference:
    """ModelOpt: `causal` for all layers, `use_swa`, attention sinks and a value scale, by MiMo's formulas."""
    return modelopt_reference(folder, {"causal": True, "use_swa": True, "swa_window_size": WINDOW})


def modelopt_reference(folder: Path, nested: dict[str, Any]) -> Reference:
    mimo = pytest.importorskip("transformers.models.mimo_v2_flash.modeling_mimo_v2_flash")
    dflash = pytest.importorskip("dflash.model")
    layers = {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    config = Qwen3Config(
        **{**BODY, **layers, "block_size": BLOCK, "num_target_layers": 4, "is_causal": True},
        dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
    )
    model = dflash.DFlashDraftModel(config)
    scramble(model, seed=8)
    model.eval().save_pretrained(folder)
    sinks = [torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1.0, 3.0, -0.5, 0.2])]
    names = [f"layers.{i}.self_attn.attention_sink_bias" for i in range(2)]
    edit_tensors(folder, lambda old: old | dict(zip(names, sinks, strict=True)))

    def edit(config: dict[str, Any]) -> None:
        for name in ("is_causal", "layer_types", "sliding_window", "use_sliding_window"):
            del config[name]
        config["dflash_config"] |= {**nested, "attention_sink_bias": True, "attention_value_scale": 0.5}

    edit_config(folder, edit)
    plain = reference_of_zlab_model(model, [tap + 1 for tap in TAPS])

    def attend(module: Any, queries: Any, keys: Any, values: Any, mask: Any, scaling: float, **_: Any) -> Any:
        module.sinks = sinks[module.layer_idx]
        hidden = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        return mimo.eager_attention_forward(module, queries, keys, values * 0.5, hidden, scaling)

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dflash, "ALL_ATTENTION_FUNCTIONS", {"sdpa": attend})
            return plain.states(tokens, context, target)

    return Reference(states, plain.propose, plain.taps)


def mask_embedding(folder: Path) -> Reference:
    """MiMo's drafts bring a vector for the mask token in a file of its own."""
    reference = zlab_reference(folder)
    vector = torch.linspace(-1, 1, 32)
    torch.save({"mask_token_id": MASK, "embedding": vector}, folder / "mask_embedding.pt")

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        table = target.get_input_embeddings().weight.detach().clone()
        table[MASK] = vector
        own = type("Own", (), {"get_input_embeddings": lambda self: nn.Embedding.from_pretrained(table)})
        return reference.states(tokens, context, own())

    return Reference(states, reference.propose, reference.taps)


def tap_norms(folder: Path) -> Reference:
    """Laguna's drafts fuse queries, keys and values in one matrix and norm every tap before `fc`."""
    reference = zlab_reference(folder)
    weights = [torch.linspace(0.5, 1.5, 32), torch.linspace(2.0, 1.0, 32)]

    def fuse(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for i in range(2):
            parts = [old.pop(f"layers.{i}.self_attn.{part}_proj.weight") for part in "qkv"]
            old[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        return old | {f"aux_hidden_norms.{i}.weight": weight for i, weight in enumerate(weights)}

    edit_tensors(folder, fuse)

    def states(tokens: torch.Tensor, context: torch.Tensor, target: Any) -> torch.Tensor:
        taps = context.split(32, dim=-1)
        scales = [(tap.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() for tap in taps]
        normed = [tap * scale * weight for tap, scale, weight in zip(taps, scales, weights, strict=True)]
        return reference.states(tokens, torch.cat(normed, dim=-1), target)

    return Reference(states, reference.propose, reference.taps)


# --- editing a saved checkpoint --------------------------------------------------------------------------------------


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a folder's config.json by a function that edits its fields in place."""
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change a folder's weights by a function from tensors to tensors."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in edit(load_file(path)).items()}, path, {"format": "pt"})


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    edit_tensors(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
