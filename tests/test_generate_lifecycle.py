"""From call to call: drafts used again, aborted, shared, hooked in; knobs, pairings, dtypes, wrapped targets.

Shapes: B batch, S context, K block, V vocabulary, L taps.
"""

from __future__ import annotations

import importlib.util
import sys
from threading import Thread

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GenerationMixin,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import dflash_hf.generation as generation
from comparing import Recorder, assert_same_text, forwards_of, letter_tokenizer, shared_target
from dflash_hf.checkpoints.loading import load_draft
from dflash_hf.generation.drafting import Drafter
from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from dflash_hf.training.draft_setup import draft_config_for
from helpers import VOCABULARY, greedy, left_padded, random_prompt, scramble, tiny_draft, tiny_target
from oracle import OracleDraft, oracle_draft


def told(draft, target, prompts, num_tokens=30):
    """An oracle that knows the texts of several prompts."""
    draft.tell(target, [greedy(target, prompt, num_tokens)[0] for prompt in prompts], [2, 0, 3, 1])
    return draft


# --- the same draft, again and again (case K04) ----------------------------------------------------------------------


def test_same_draft_for_one_prompt_a_shorter_one_and_the_first_again():
    target = shared_target()
    prompts = [random_prompt(12, seed=1), random_prompt(3, seed=2)]
    draft = told(tiny_draft(target, draft_class=OracleDraft), target, prompts)
    lengths = []
    for prompt in (prompts[0], prompts[1], prompts[0]):
        lengths.append(assert_same_text(target, draft, prompt, 24).acceptance_lengths)
    assert lengths[0] == lengths[2]
    for prompt, seen in zip(prompts, lengths, strict=False):  # as with a fresh draft
        fresh = told(tiny_draft(target, draft_class=OracleDraft), target, [prompt])
        assert assert_same_text(target, fresh, prompt, 24).acceptance_lengths == seen


def test_same_draft_for_a_batch_then_a_single_prompt():
    target = shared_target()
    prompts = [random_prompt(12, seed=1), random_prompt(3, seed=2)]
    draft = told(tiny_draft(target, draft_class=OracleDraft), target, prompts)
    assert_same_text(target, draft, left_padded([prompt[0] for prompt in prompts]), 16)
    assert_same_text(target, draft, prompts[1], 16)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [1, 4, 7])
def test_generation_aborted_by_a_streamer_leaves_nothing_behind(error, place):
    class Aborting(BaseStreamer):
        def __init__(self):
            self.calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls > place:
                raise error("enough")

        def end(self):
            raise AssertionError("an aborted generation has no end")

    target, prompt = shared_target(), random_prompt(9)
    draft = oracle_draft(target, prompt, 24, [2, 0, 3, 1])
    hooks = len(target._forward_hooks), len(draft._forward_hooks)
    with pytest.raises(error, match="enough"):
        target.generate(prompt, assistant_model=draft, max_new_tokens=24, do_sample=False, streamer=Aborting())
    assert (len(target._forward_hooks), len(draft._forward_hooks)) == hooks
    assert_same_text(target, draft, prompt, 24)


def test_target_that_fails_in_its_prefill_keeps_no_hook():
    target, prompt = tiny_target(), random_prompt(9)
    draft = tiny_draft(target)
    handle = target.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=False)
    handle.remove()
    assert not target._forward_hooks
    assert_same_text(target, draft, prompt, 8)


def test_two_targets_share_a_draft_in_threads():
    targets = [tiny_target(seed=seed) for seed in (0, 5)]
    prompts = [random_prompt(9, seed=seed) for seed in range(4)]
    draft = tiny_draft(targets[0])
    jobs = [(target, prompt) for target in targets for prompt in prompts]
    expected = [greedy(target, prompt, 16).tolist() for target, prompt in jobs]
    results = {}

    def work(number, target, prompt):
        out = target.generate(
            prompt, assistant_model=draft, max_new_tokens=16, do_sample=False, return_dict_in_generate=True
        )
        results[number] = out.sequences.tolist(), out.acceptance_lengths

    single = []
    for target, prompt in jobs:
        work(0, target, prompt)
        single.append(results[0])
    threads = [Thread(target=work, args=(number, *job)) for number, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number][0] for number in range(len(jobs))] == expected
    assert [results[number] for number in range(len(jobs))] == single


def test_two_generations_stepped_in_turns():
    """Case B03: each waits for the other at every token."""
    target = shared_target()
    prompts = [random_prompt(9, seed=1), random_prompt(4, seed=2)]
    draft = tiny_draft(target)
    turns = []

    class Nested(BaseStreamer):
        """At its third call runs the other generation from start to end."""

        def put(self, value):
            turns.append(value.flatten().tolist())
            if len(turns) == 5:
                turns.append(self.run(prompts[1]).tolist())

        def end(self):
            pass

        def run(self, prompt, **kwargs):
            return target.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=False, **kwargs)

    streamer = Nested()
    outer = streamer.run(prompts[0], streamer=streamer)
    assert outer.tolist() == greedy(target, prompts[0], 12).tolist()
    assert turns[5] == greedy(target, prompts[1], 12).tolist()


def test_draft_may_be_in_training_mode_or_need_gradients():
    target, prompt = shared_target(), random_prompt(9)
    draft = tiny_draft(target).train()
    out = assert_same_text(target, draft, prompt, 8)
    assert not out.sequences.requires_grad
    assert all(parameter.grad is None for parameter in draft.parameters())


# --- the hook --------------------------------------------------------------------------------------------------------

HOOKED = ("_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding")


@pytest.fixture
def hook_restored():
    """The hook as it was, whatever a test does to it."""
    yield
    generation.install_hook()


def methods():
    return [getattr(GenerationMixin, name) for name in HOOKED]


def test_hook_is_installed_once(hook_restored):
    before = methods()
    generation.install_hook()
    assert methods() == before


def test_hook_can_be_removed_and_installed_again(hook_restored):
    target, prompt = shared_target(), random_prompt(9)
    draft = tiny_draft(target)
    wrapped = methods()
    generation.remove_hook()
    originals = methods()
    assert all(a is not b for a, b in zip(originals, wrapped, strict=True))
    assert all(method.__module__ == "transformers.generation.utils" for method in originals)
    assert all(not hasattr(method, "__wrapped__") for method in originals)
    with pytest.raises(Exception):  # noqa: B017  # Transformers alone does not know a draft; how it fails is its own
        target.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=False)
    generation.remove_hook()  # again: nothing happens
    assert methods() == originals
    generation.install_hook()
    assert [method.__wrapped__ for method in methods()] == originals
    assert_same_text(target, draft, prompt, 8)


def test_second_copy_of_the_module_leaves_the_hook_alone(hook_restored, tmp_path):
    """As code loaded from a Hub repository beside the installed package: flat files under another name."""
    from pathlib import Path

    folder = tmp_path / "flat_copy"
    folder.mkdir()
    source = Path(generation.__file__).parent
    for file in source.glob("*.py"):
        (folder / ("generation.py" if file.name == "__init__.py" else file.name)).write_text(file.read_text())
    (folder / "__init__.py").write_text("")
    before = methods()
    sys.path.insert(0, str(tmp_path))
    try:
        copy = importlib.import_module("flat_copy.generation")
        assert copy.install_hook is not generation.install_hook
        copy.install_hook()
        assert methods() == before
        copy.remove_hook()  # either may undo it
        assert [method.__module__ for method in methods()] == ["transformers.generation.utils"] * 3
        copy.install_hook()
        target, prompt = shared_target(), random_prompt(9)
        assert_same_text(target, tiny_draft(target), prompt, 8)  # the copy's hook serves the package's draft
        copy.remove_hook()
    finally:
        sys.path.remove(str(tmp_path))
        for name in [name for name in sys.modules if name.startswith("flat_copy")]:
            del sys.modules[name]


def test_other_ways_to_assist_are_untouched(hook_restored):
    """An ordinary assistant, prompt lookup, no assistant: the same tokens and calls with and without the hook."""
    target, prompt = shared_target(), random_prompt(9)
    assistant = tiny_target(seed=3, num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = 3
    ways = [{"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {}]
    seen = []
    for act in (generation.install_hook, generation.remove_hook):
        act()
        for way in ways:
            with forwards_of(target) as calls:
                ids = target.generate(prompt, max_new_tokens=12, do_sample=False, **way)
            seen.append((ids.tolist(), [kwargs["input_ids"].shape for kwargs, _ in calls]))
    assert seen[: len(ways)] == seen[len(ways) :]


# --- knobs and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["draft", "call"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_number_of_candidates(where, num_tokens):
    target, prompt = shared_target(), random_prompt(9)
    draft = oracle_draft(target, prompt, 24, 3)
    kwargs = {}
    if where == "draft":
        draft.generation_config.num_assistant_tokens = num_tokens
    else:
        kwargs["num_assistant_tokens"] = num_tokens
    out = assert_same_text(target, draft, prompt, 13, **kwargs)
    assert out.acceptance_lengths == [[num_tokens + 1] * (12 // (num_tokens + 1))]


@pytest.mark.parametrize("value", [4, -1, 2.5])
def test_number_of_candidates_out_of_range_is_refused(value):
    target, draft = shared_target(), tiny_draft(shared_target())
    draft.generation_config.num_assistant_tokens = value
    with forwards_of(target) as calls, pytest.raises(ValueError) as error:
        target.generate(random_prompt(9), assistant_model=draft, max_new_tokens=4)
    for part in ("num_assistant_tokens", str(value), "block_size", "4", "between 0 and 3"):
        assert part in str(error.value)
    assert not calls and "\n" not in str(error.value)


def test_confidence_threshold_shortens_blocks():
    """The first candidate below the threshold is verified; none behind it is."""
    target, prompt = shared_target(), random_prompt(9)
    draft = oracle_draft(target, prompt, 40, 1, block_size=8)  # slots 0 and 1 are sharp, the others as they come
    draft.generation_config.assistant_confidence_threshold = 0.95
    with forwards_of(target) as calls:
        out = target.generate(
            prompt, assistant_model=draft, max_new_tokens=30, do_sample=False, return_dict_in_generate=True
        )
    assert out.sequences.tolist() == greedy(target, prompt, 30).tolist()
    widths = [kwargs["input_ids"].shape[1] for kwargs, _ in calls[1:]]
    assert max(widths) <= 5 and min(widths[:-1]) >= 3  # anchor, two sharp ones, the first unsure one


@pytest.mark.parametrize("value", [-0.1, 1.5, "high"])
def test_confidence_threshold_out_of_range_is_refused(value):
    target, draft = shared_target(), tiny_draft(shared_target())
    draft.generation_config.assistant_confidence_threshold = value
    with pytest.raises(ValueError, match=f"assistant_confidence_threshold.*from 0 to 1, got {value!r}"):
        target.generate(random_prompt(9), assistant_model=draft, max_new_tokens=4)


def test_generation_without_a_cache_is_refused():
    target = shared_target()
    with (
        forwards_of(target) as calls,
        pytest.raises(ValueError, match=r"`use_cache` is False.*leave `use_cache` at True"),
    ):
        target.generate(random_prompt(9), assistant_model=tiny_draft(target), max_new_tokens=4, use_cache=False)
    assert not calls


def test_beam_search_is_as_without_a_draft_or_refused():
    target, prompt = shared_target(), random_prompt(9)
    try:
        out = target.generate(
            prompt, assistant_model=tiny_draft(target), max_new_tokens=8, do_sample=False, num_beams=3
        )
    except ValueError as error:
        assert "beam" in str(error)
    else:
        assert out.tolist() == target.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=3).tolist()


def test_encoder_decoder_target_is_refused():
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    target = T5ForConditionalGeneration(config)
    draft = tiny_draft(shared_target())
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration is an encoder-decoder.*decoder-only"):
        target.generate(random_prompt(9), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"hidden_size": 64}, ("hidden_size", "64", "32")),
        (
            {"target_layer_ids": [0, 4], "num_target_layers": None},
            ("target_layer_ids", "layer 4", "num_hidden_layers", "4"),
        ),
        ({"num_target_layers": 6}, ("num_target_layers", "6", "4")),
        ({"mask_token_id": 64, "vocab_size": 65}, ("mask_token_id", "64", "64 rows")),
    ],
)
def test_draft_of_another_target_is_refused_before_any_forward(fields, parts):
    """Cases L10, T06."""
    target = shared_target()
    draft = tiny_draft(target, **fields)
    with forwards_of(target) as calls, pytest.raises(ValueError) as error:
        target.generate(random_prompt(9), assistant_model=draft, max_new_tokens=4)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert not calls and "\n" not in str(error.value)


def test_target_whose_table_has_spare_rows_may_lend_one_as_mask():
    """Case T06: padded tables have reserved rows; the id is below the table's rows though no token has it."""
    target = shared_target(vocab_size=72)
    prompt = random_prompt(9)
    assert_same_text(target, oracle_draft(target, prompt, 20, [2, 0, 3, 1], mask_token_id=71), prompt, 20)


def test_prompt_longer_than_the_context_is_as_without_a_draft(caplog):
    target = tiny_target(max_position_embeddings=8)
    prompt = random_prompt(12)
    assert_same_text(target, tiny_draft(target, max_position_embeddings=8), prompt, 8)
    gpt2 = tiny_target("gpt2", n_positions=8)
    errors = []
    for draft in (None, tiny_draft(gpt2)):
        with pytest.raises((IndexError, ValueError)) as error:
            gpt2.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=False)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


# --- what the draft is given (cases C06, K06, P03) -------------------------------------------------------------------


def test_draft_reads_the_outputs_of_the_layers_it_names():
    """Each layer is hooked directly; 0 is the first layer's output, never the embeddings.

    The last layer's is taken behind the final norm, where Transformers and the drafts trained on it have it.
    """
    target, prompt = shared_target(), random_prompt(9)
    taps = [[layer] for layer in range(4)] + [[0, 3], [1, 2, 3]]
    for chosen in taps:
        outputs, handles = {}, []
        for number, layer in enumerate([*target.model.layers[:-1], target.model.norm]):
            handles.append(
                layer.register_forward_hook(
                    lambda module, args, output, n=number, seen=outputs: seen.setdefault(n, []).append(
                        output[0] if isinstance(output, tuple) else output
                    )
                )
            )
        draft = tiny_draft(target, target_layer_ids=chosen)
        with forwards_of(draft) as calls:
            target.generate(prompt, assistant_model=draft, max_new_tokens=3, do_sample=False)
        for handle in handles:
            handle.remove()
        seen = calls[0][0]["context_hidden_states"]
        torch.testing.assert_close(seen, torch.cat([outputs[layer][0] for layer in chosen], dim=-1))


def test_positions_are_absolute_and_do_not_drift():
    """Context keys keep their positions, the block sits right behind them, every round, also after refusals."""
    target, prompt = shared_target(), random_prompt(9)
    for context_length in (None, 6):
        draft = oracle_draft(target, prompt, 60, [2, 0, 3, 1, 0, 0, 3])
        draft.generation_config.draft_context_length = context_length
        with forwards_of(draft) as calls:
            out = target.generate(
                prompt, assistant_model=draft, max_new_tokens=50, do_sample=False, return_dict_in_generate=True
            )
        anchor, start = 9, 0
        for (kwargs, _), length in zip(calls, out.acceptance_lengths[0], strict=False):
            positions = kwargs["position_ids"][0].tolist()
            new = kwargs["context_hidden_states"].shape[1]
            assert positions[:new] == list(range(start, anchor))
            assert positions[new:] == list(range(anchor, anchor + len(positions) - new))
            start, anchor = anchor, anchor + length


def test_context_bound_longer_than_the_text_gives_the_same_drafts():
    target, prompt = shared_target(), random_prompt(9)
    proposals = []
    for bound in (None, 100, 5):
        draft = tiny_draft(target)
        draft.generation_config.draft_context_length = bound
        seen = []
        original = draft.compute_logits
        draft.compute_logits = lambda *args, o=original, s=seen: (s.append(o(*args)), s[-1])[1]
        assert_same_text(target, draft, prompt, 20)
        proposals.append(torch.cat([logits.flatten() for logits in seen]))
    torch.testing.assert_close(proposals[0], proposals[1])
    assert not torch.allclose(proposals[0], proposals[2])


def test_incremental_context_gives_the_proposals_of_a_fresh_start():
    """Every round's proposals, against a draft that reads the whole context at once."""
    target, prompt = shared_target(), random_prompt(9)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    draft = oracle_draft(target, prompt, 60, [2, 0, 1], **layers)
    seen = []
    original = Drafter.block_logits

    def spy(drafter, anchors, num_slots, depth):
        seen.append(
            (
                drafter.positions[0] + sum(lengths[0] for _, lengths in drafter.pending),
                anchors.item(),
                drafter.draft.config.block_size,
            )
        )
        return original(drafter, anchors, num_slots, depth)

    with forwards_of(draft) as calls:
        Drafter.block_logits = spy
        try:
            out = target.generate(prompt, assistant_model=draft, max_new_tokens=50, do_sample=False)
        finally:
            Drafter.block_logits = original
    with torch.no_grad():
        states = target(out, output_hidden_states=True).hidden_states
        context = torch.cat([states[tap + 1] for tap in draft.config.target_layer_ids], dim=-1)
        assert len(seen) == len(calls) > 12
        plain = tiny_draft(target, **layers)
        plain.load_state_dict(draft.state_dict())
        for (at, anchor, _), (kwargs, output) in zip(seen, calls, strict=True):
            assert out[0, at] == anchor
            width = kwargs["noise_embeds"].shape[1]
            fresh = plain(
                noise_embeds=kwargs["noise_embeds"],
                context_hidden_states=context[:, :at],
                position_ids=torch.arange(at + width)[None],
            )
            torch.testing.assert_close(output.last_hidden_state, fresh.last_hidden_state, rtol=1e-4, atol=1e-4)


def test_only_the_tapped_states_are_captured():
    """Case P03: memory of the prefill grows with the taps, not with the layers."""
    target, prompt = tiny_target(num_hidden_layers=12), random_prompt(40)
    draft = tiny_draft(target, target_layer_ids=[1, 5])
    kept = []
    handle = target.register_forward_hook(lambda module, args, output: kept.append(output.hidden_states))
    try:
        target.generate(prompt, assistant_model=draft, max_new_tokens=6, do_sample=False)
    finally:
        handle.remove()
    for states in kept:
        assert sum(state is not None for state in states) <= 3


# --- dtypes (case T03) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("draft_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_target_and_draft_of_different_dtypes(target_dtype, draft_dtype):
    target = tiny_target(dtype=target_dtype)
    prompt = random_prompt(9)
    draft = tiny_draft(target, dtype=draft_dtype)
    with forwards_of(draft) as calls:
        drafted = target.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=False)
    assert all(torch.isfinite(output.last_hidden_state).all() for _, output in calls)
    assert {output.last_hidden_state.dtype for _, output in calls} == {draft_dtype}
    if target_dtype != torch.bfloat16:
        assert drafted.tolist() == greedy(target, prompt, 12).tolist()
    sampled = target.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=True)
    assert sampled.shape == (1, 21)


def test_states_beyond_the_range_of_float16_reach_the_draft_unharmed():
    """The fusion's norm undoes a scale, so a draft in float16 proposes what the same draft in float32 does."""
    target, prompt = tiny_target(dtype=torch.float32), random_prompt(9)
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    states = target(prompt, output_hidden_states=True).hidden_states[1]
    assert states.abs().max() > 1e5
    fused = []
    for dtype in (torch.float32, torch.float16):
        draft = tiny_draft(target, dtype=dtype)
        with forwards_of(draft) as calls, forwards_of(draft.hidden_norm) as contexts:
            assert_same_text(target, draft, prompt, 12)
        assert all(output.last_hidden_state.isfinite().all() for _, output in calls)
        fused.append(contexts[0][1].float())
    torch.testing.assert_close(*fused, rtol=0.02, atol=0.02)


# --- targets in other clothes (cases T01, T05) -----------------------------------------------------------------------


def test_target_with_other_names_for_its_parts():
    """GPT-NeoX: `gpt_neox.embed_in`, `embed_out`."""
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=1,
    )
    target = GPTNeoXForCausalLM(config)
    scramble(target, 0)
    target = target.double().eval()
    target.generation_config.pad_token_id = 0
    prompt = random_prompt(9)
    assert not hasattr(target, "lm_head") or not hasattr(target, "model")
    assert_same_text(target, oracle_draft(target, prompt, 20, [2, 0, 3, 1]), prompt, 20)


def test_parts_reached_through_the_accessors_alone():
    class Renamed(type(shared_target())):
        def get_input_embeddings(self):
            return self.tokens_in

        def get_output_embeddings(self):
            return self.tokens_out

    target = tiny_target()
    target.tokens_in, target.tokens_out = target.model.embed_tokens, target.lm_head
    target.__class__ = Renamed
    prompt = random_prompt(9)
    draft = oracle_draft(target, prompt, 20, [2, 0, 3, 1])
    asked = []
    target.tokens_in.register_forward_hook(lambda *_: asked.append("in"))
    assert_same_text(target, draft, prompt, 20)
    assert asked


def test_target_without_a_head_is_refused():
    target = shared_target()
    headless = tiny_target()
    headless.__class__ = type("Headless", (type(target),), {"get_output_embeddings": lambda self: None})
    with pytest.raises(ValueError, match="no language-model head"):
        headless.generate(random_prompt(9), assistant_model=tiny_draft(target), max_new_tokens=4)


def test_target_wrapped_by_peft():
    peft = pytest.importorskip("peft")
    base = tiny_target()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    target = peft.get_peft_model(base, config).double().eval()
    prompt = random_prompt(9)
    alone = target.generate(input_ids=prompt, max_new_tokens=16, do_sample=False)
    draft = tiny_draft(base)
    out = target.generate(input_ids=prompt, assistant_model=draft, max_new_tokens=16, do_sample=False)
    assert out.tolist() == alone.tolist()
    with target.disable_adapter():
        assert out.tolist() != greedy(target.base_model.model, prompt, 16).tolist()


def test_compiled_target():
    target, prompt = tiny_target(num_hidden_layers=2), random_prompt(9)
    draft = tiny_draft(target, target_layer_ids=[0, 1])
    expected = greedy(target, prompt, 12).tolist()
    compiled = torch.compile(target, backend="eager", dynamic=True)
    out = compiled.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=False)
    assert out.tolist() == expected
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    out = target.generate(prompt, assistant_model=draft, max_new_tokens=12, do_sample=False)
    assert out.tolist() == expected


def test_offloaded_head_and_embeddings(tmp_path):
    """Weights that lie elsewhere until their module is called: never read, only called."""
    accelerate = pytest.importorskip("accelerate")
    target, prompt = tiny_target(dtype=torch.float32), random_prompt(9)
    expected = greedy(target, prompt, 16).tolist()
    draft = oracle_draft(target, prompt, 16, [2, 0, 3, 1])
    accelerate.cpu_offload(target.lm_head, execution_device="cpu")
    accelerate.cpu_offload(target.model.embed_tokens, execution_device="cpu")
    assert target.lm_head.weight.device.type == "meta"
    out = target.generate(prompt, assistant_model=draft, max_new_tokens=16, do_sample=False)
    assert out.tolist() == expected


def tiny_vision_target(dtype=torch.float64):
    """LLaVA: 4 image tokens of id 60 for an 8 x 8 picture in 4 x 4 patches."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=16,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        ),
        image_token_index=60,
        vision_feature_layer=-1,
    )
    target = LlavaForConditionalGeneration(config)
    scramble(target, 0)
    target = target.to(dtype).eval()
    target.generation_config.pad_token_id = 0
    return target


@pytest.mark.parametrize("batch_size", [1, 2])
def test_pictures_reach_the_target(batch_size):
    """Case G11: the text is that of plain `generate` with the picture, and differs from another picture's."""
    target = tiny_vision_target()
    texts = []
    for seed in range(2):
        rows = [
            torch.cat([random_prompt(2 + row, seed=row)[0] % 59 + 1, torch.full((4,), 60), torch.tensor([5, 9])])
            for row in range(batch_size)
        ]
        batch = left_padded(rows)
        pictures = torch.randn(batch_size, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        inputs = {**batch, "pixel_values": pictures}
        options = {
            "suppress_tokens": [60],
            "output_scores": True,
        }  # an image token in the text would ask for a picture
        out = assert_same_text(target, tiny_draft(target), inputs, 16, **options)
        texts.append(out.sequences[:, batch["input_ids"].shape[1] :].tolist())
    assert texts[0] != texts[1]


# --- pipelines -------------------------------------------------------------------------------------------------------


SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # of the tiny targets


def test_pipeline_takes_the_draft():
    target, tokenizer = tiny_target(), letter_tokenizer()
    draft = tiny_draft(target, **SPECIAL_TOKENS)
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    text = plain("abcQ7", **options)[0]["generated_text"]
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    with forwards_of(draft) as calls:
        assert assisted("abcQ7", **options)[0]["generated_text"] == text
    assert calls, "the draft must have been at work"
    assert text.startswith("abcQ7") and len(text) > 12


def test_pipeline_takes_a_draft_whose_config_names_other_special_tokens():
    """Then the pipeline asks for a tokenizer of the draft, which is the target's."""
    target, tokenizer = tiny_target(), letter_tokenizer()
    draft = tiny_draft(target, **(SPECIAL_TOKENS | {"eos_token_id": 5}))
    options = {"max_new_tokens": 12, "do_sample": False}
    text = pipeline("text-generation", model=target, tokenizer=tokenizer)("abcQ7", **options)[0]["generated_text"]
    assisted = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, assistant_model=draft, assistant_tokenizer=tokenizer
    )
    with forwards_of(draft) as calls:
        assert assisted("abcQ7", **options)[0]["generated_text"] == text
    assert calls


@pytest.mark.parametrize("made_by", ["training", "load_draft"])
def test_pipeline_takes_a_draft_made_for_the_target_without_more_ado(made_by, tmp_path):
    """A pipeline compares the special tokens of both configs, and asks for a tokenizer where they differ."""
    target, tokenizer = tiny_target(eos_token_id=[3, 4]), letter_tokenizer()
    if made_by == "training":
        draft = Qwen3DFlashForDraft(draft_config_for(target.config, mask_token_id=63)).to(target.dtype)
    else:
        tiny_draft(target).save_pretrained(tmp_path)
        draft = load_draft(tmp_path, target=target)
    options = {"max_new_tokens": 12, "do_sample": False}
    text = pipeline("text-generation", model=target, tokenizer=tokenizer)("abcQ7", **options)[0]["generated_text"]
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    with forwards_of(draft) as calls:
        assert assisted("abcQ7", **options)[0]["generated_text"] == text
    assert calls


def test_pipeline_with_a_draft_for_its_model_says_how_to_use_it():
    """Case L09: nothing about an attribute that is missing somewhere in Transformers."""
    draft = tiny_draft(shared_target(), **SPECIAL_TOKENS)
    pipe = pipeline("text-generation", model=draft, tokenizer=letter_tokenizer())
    with pytest.raises(
        ValueError, match=r"cannot generate alone.*target\.generate\(\*\*inputs, assistant_model=draft\)"
    ):
        pipe("abcQ7")


def test_pipeline_takes_the_draft_for_a_batch():
    target, tokenizer = tiny_target(), letter_tokenizer()
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 3}
    prompts = ["abcQ7", "x", "Hello12"]
    texts = []
    for kwargs in ({}, {"assistant_model": tiny_draft(target, **SPECIAL_TOKENS)}):
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, **kwargs)
        texts.append([out[0]["generated_text"] for out in pipe(prompts, **options)])
    assert texts[0] == texts[1]


def test_streamer_and_draft_work_in_a_call_of_a_subclass():
    """A target class of the caller's own that overrides nothing is served through the mixin."""
    target, prompt = tiny_target(), random_prompt(9)
    target.__class__ = type("OwnTarget", (type(target),), {})
    streamer = Recorder()
    out = target.generate(
        prompt, assistant_model=tiny_draft(target), max_new_tokens=8, do_sample=False, streamer=streamer
    )
    assert out.tolist() == greedy(target, prompt, 8).tolist()
    assert len(streamer.calls) == 10 and isinstance(target, nn.Module)
