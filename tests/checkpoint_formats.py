"""The table of published formats: what the parity tests run over, and the source of docs/checkpoints.md.

`python tests/checkpoint_formats.py` writes the document anew; a test fails while it is out of date.
"""

# ruff: noqa: E501 (rows of a Markdown table)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import reference_drafts as drafts

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md"


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        detected_by: What tells it, in words.
        differs: What differs from z-lab's first format, and the fields that say so here.
        peer: `package==version` whose own code the tests run; empty where the index has none.
        writers: Makers of tiny checkpoints, in `reference_drafts`.
        reading: What `read_draft` calls the format.
        note: How the expectation is made where there is no peer.
    """

    name: str
    detected_by: str
    differs: str
    peer: str
    writers: tuple[Callable[..., drafts.Reference], ...]
    reading: str
    note: str = ""

    @property
    def tested_against(self) -> str:
        return f"`{self.peer}`" + (f"; {self.note}" if self.note else "") if self.peer else self.note


FORMATS = [
    Format(
        "z-lab v1",
        "`fc` and `hidden_norm` in the weights and no other format's mark; fields at the top level or in `dflash_config`",
        "sliding layers causal and full ones bidirectional unless `is_causal` says otherwise; `input_embedding_scale`, "
        "`output_multiplier`, `final_logit_softcapping`; the block is looked up in the bare embedding table",
        "dflash==0.1.0",
        (
            drafts.zlab,
            drafts.zlab_sliding,
            drafts.zlab_sliding_bidirectional,
            drafts.zlab_nested_scaled,
            drafts.zlab_yarn,
        ),
        "zlab",
    ),
    Format(
        "DFlash 2",
        "as z-lab v1, with convolutions and a selector in the weights (`DFlash2DraftModel`)",
        "`conv_kernel_size`, `conv_group_size`, `selector_rank`, `selector_top_k`; proposals are chosen one after the other",
        "dflash==0.1.0",
        (drafts.dflash_2,),
        "zlab",
    ),
    Format(
        "Transformers' own",
        "`model_type` ends in `_assistant`, or `encoder.fc` in the weights",
        "`encoder.fc` and `encoder.output_norm_enc`; bidirectional everywhere; the window includes the distance it "
        "names (`sliding_window` is read as one more); the target's embedding module is called, scale and all",
        "transformers",
        (drafts.native,),
        "native",
    ),
    Format(
        "speculators",
        "`speculators_model_type` is `dflash`, `dflash2` or `dspark`",
        "`aux_hidden_state_layer_ids` count the embedding as 0; `own_embedding`, `own_head`, `draft_vocab_size` (`d2t` "
        "holds offsets); `sample_from_anchor` is `slots_predict_next`; sliding layers causal unless "
        "`sliding_window_non_causal`, their window measured from the anchor (`window_from_anchor`)",
        "speculators==0.9.0",
        (
            drafts.speculators_full,
            drafts.speculators_sliding,
            drafts.speculators_non_causal,
            drafts.speculators_reduced,
            drafts.speculators_own_embedding,
            drafts.speculators_from_anchor,
            drafts.speculators_dflash_2,
        ),
        "speculators",
    ),
    Format(
        "DSpark",
        "as speculators, or as z-lab v1 with `projector_type: dspark` (SpecForge), an architecture `DSparkDraftModel` or a "
        "`markov_rank`",
        "`markov_rank`, `markov_head_type`, `confidence_head`; every slot predicts the next token; proposals are chosen "
        "one after the other",
        "speculators==0.9.0",
        (drafts.speculators_dspark, drafts.speculators_dspark_gated, drafts.speculators_dspark_rnn),
        "speculators",
    ),
    Format(
        "SpecForge",
        "as z-lab v1",
        "z-lab's fields; its DSpark drafts shift their slots by one, as their training does (its `spec_generate` reads "
        "them unshifted)",
        "specforge==0.2.0",
        (drafts.specforge, drafts.specforge_dspark),
        "zlab",
    ),
    Format(
        "DeepSpec",
        "an architecture that ends in `DSparkModel`",
        "own embedding and head; every slot predicts the next token (`slots_predict_next`); tap -1 is the embedding",
        "",
        (drafts.deepspec_plain, drafts.deepspec_markov),
        "deepspec",
        "body by `dflash==0.1.0`, the rest by hand from the documented fields",
    ),
    Format(
        "ModelOpt",
        "as z-lab v1",
        "`dflash_config.causal` is `is_causal`; `use_swa` and `swa_window_size` make every layer sliding where none is, and "
        "bidirectional (MiMo's drafts) where no causality is named; "
        "`attention_sinks`, `attention_value_scale`; `mask_embedding.pt` is `own_mask_embedding`",
        "",
        (drafts.modelopt, drafts.mask_embedding),
        "zlab",
        "body by `dflash==0.1.0`, sinks by the attention of `transformers`' MiMo-V2-Flash, the rest by hand",
    ),
    Format(
        "Laguna's",
        "as z-lab v1",
        "`aux_hidden_norms` norm every tap before the fusion (`tap_norms`); `qkv_proj` is split; gated attention "
        "(`g_proj`) is refused",
        "",
        (drafts.tap_norms,),
        "zlab",
        "body by `dflash==0.1.0`, norms by hand",
    ),
]

HEADER = """\
# Published checkpoint formats

`dflash_hf.load_draft(name_or_path)` opens any of these, `dflash-hf convert SRC DST --to FORMAT` writes some of them. The
format is told from config.json and the names of the tensors, never from the repository's name; what differs becomes a
field of `DFlashConfig`. Every tensor of the file has a place in the model or loading fails and names it, and so does a
field that is known to matter and is not understood.

This page is made from the table that the tests run over; `python tests/checkpoint_formats.py` rewrites it
(in the `dev` environment, `make venv`).

| format | detected by | what differs, and the fields for it here | tested against |
|---|---|---|---|
"""

FOOTER = """
`tested against` means: the tests have that project's own code write tiny checkpoints, and compare hidden states,
proposals and acceptance lengths of its own forward with ours. `transformers` is tested in the oldest and the newest
supported version.

## Conventions here

* Taps count layer outputs from 0: tap `i` is `hidden_states[i + 1]`; -1 is the embedding's output.
* A window of w shows keys at a distance below w. A format that counts otherwise is converted by its number.
* Fields that say one thing in two places (`target_layer_ids`, `eagle_aux_hidden_state_layer_ids`, `layer_ids`; the top
  level and `dflash_config`; `sliding_window` and `swa_window_size`) must agree, or loading fails with both values.
* A draft with an embedding, a head or a mask vector of its own uses it. Proposals of a reduced vocabulary are mapped to
  the target's ids, and under sampling its distribution is over the whole vocabulary, with zeros for what it leaves out.

## Writing

| `--to` | read by | cannot express |
|---|---|---|
| `dflash` | this package, `AutoModel` with `trust_remote_code=True` | nothing: every field has a place |
| `zlab` | vLLM, SGLang, `dflash` | own embedding or head, shifted slots without DSpark's head, tap -1, norms per tap, windows from the anchor |
| `speculators` | vLLM, `speculators` | causal full layers, scales, caps, sinks, norms per tap, own mask vector |
| `native` | `generate` with `generation_config.speculation_type = "dflash"` | everything but z-lab v1's bidirectional drafts without biases |

What a format cannot express is refused with a sentence. Tensors keep their bits in every conversion. An export to
`speculators` says `window_from_anchor`, which its own classes and vLLM ignore: vLLM reads the window's number per query,
as z-lab does, speculators' training measures it from the anchor.

vLLM 0.32 reads `sliding_window_non_causal` for all layers of a speculators draft: where full layers are bidirectional
and sliding ones causal, prefer `zlab`. It reads no scale or cap of a z-lab draft but `output_multiplier` (as
`logit_scale`), and only the `vanilla` Markov head. Layers of both kinds need `VLLM_USE_V2_MODEL_RUNNER=1`.

Serving: `vllm serve TARGET --speculative-config '{"method": "dflash", "model": "DST", "num_speculative_tokens": N}'`,
where N is the block size less one. DSpark's drafts are served with the method `dspark` and N the block size: their
anchor's slot proposes, too, and vLLM knows no class for them under `dflash`.

Name the target (`--target`) wherever a format needs a fact of it: z-lab's its number of layers, every format but
Transformers' own its vocabulary (which that format does not state), and all of them what its embedding multiplies by.
Transformers' own calls the target's embedding module, the other formats' engines look up the bare table; for a target
like Gemma, whose module scales, the factor is written (`zlab`) or the conversion refused. Without `--target` a draft
that leaves the factor to the target is converted as for a target that does not scale, with a warning.

`make interop` serves a draft's exports with vLLM 0.32 on the CPU and compares. SmolLM2's default draft, bf16, greedy, ten
questions of 96 tokens, 30 November 2026: along vLLM's text 1.63 tokens a round here, in float32 as well, and 1.65 there for
`speculators`; for `zlab` 1.67 by vLLM's own counter, which takes in tokens beyond the end. Four of our texts are vLLM's;
the others part, at the same places for both exports, where the target in float32 prefers one of two tokens by 0.02 to
0.10, while bf16 shifts such a difference by up to 0.35 in Transformers and 0.46 in vLLM. A `native` export was not served:
vLLM's CPU runner overlooks the taps in it.
"""


def document() -> str:
    """docs/checkpoints.md as this table says it."""
    rows = [f"| {f.name} | {f.detected_by} | {f.differs} | {f.tested_against} |\n" for f in FORMATS]
    return HEADER + "".join(rows) + FOOTER


def installed(peer: str) -> bool:
    """Whether the package of `package==version` is here, in that version."""
    name, _, wanted = peer.partition("==")
    try:
        return not wanted or version(name) == wanted
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
