"""A call runs under `torch.inference_mode` where no tensor of it outlives it, and only there.

Shapes: B batch, S context, V vocabulary.
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from dflash_hf.evaluation.stopwatch import Stopwatch
from dflash_hf.evaluation.timing import Recorder, clock_for
from dflash_hf.evaluation.trace import loops_watched
from dflash_hf.generation.compat import CACHE_KEY, get_cache
from helpers import greedy, left_padded, random_prompt, tiny_draft, tiny_target
from hybrid_targets import hybrid_target

NTK = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # its rotary embedding keeps what a forward made


@contextmanager
def modes_of(target):
    """Whether inference mode was on, at every forward of `target`."""
    modes, forward = [], target.forward

    def recording(*args, **kwargs):
        modes.append(torch.is_inference_mode_enabled())
        return forward(*args, **kwargs)

    target.forward = recording
    try:
        yield modes
    finally:
        del target.forward


def modes_in(target, draft, prompt=None, **options):
    """Whether inference mode was on in the forwards of a `generate` call: one value, unless it came and went."""
    prompt = random_prompt(6) if prompt is None else prompt
    inputs = prompt if isinstance(prompt, dict) else {"input_ids": prompt}
    with modes_of(target) as modes:
        target.generate(**inputs, assistant_model=draft, **{"max_new_tokens": 9, "do_sample": False, **options})
    assert len(modes) > 1
    return set(modes)


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5}, {"max_time": 60.0}],
    ids=["greedy", "sampling", "time limit"],
)
def test_private_call_runs_in_inference_mode(options):
    target = tiny_target()
    assert modes_in(target, tiny_draft(target), **options) == {True}


def test_private_tree_runs_in_inference_mode():
    target = tiny_target()
    draft = tiny_draft(target)
    draft.generation_config.draft_tree_budget = 8
    assert modes_in(target, draft) == {True}


def test_private_batch_runs_in_inference_mode():
    target = tiny_target()
    batch = left_padded([random_prompt(5)[0], random_prompt(3)[0]])
    assert modes_in(target, tiny_draft(target), batch) == {True}


class Halving:
    def __call__(self, input_ids, scores):
        return scores / 2


class Never:
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"return_dict_in_generate": True, "output_hidden_states": True},
        {CACHE_KEY: DynamicCache},
        {"cache_implementation": "static"},
        {"logits_processor": LogitsProcessorList([Halving()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20))},
        {"stopping_criteria": StoppingCriteriaList([Never()])},
    ],
    ids=["scores", "states", "cache of the caller's", "cache that is kept", "processor", "constraint", "criterion"],
)
def test_call_that_shows_its_tensors_does_not(options):
    target = tiny_target()
    options = {
        key: DynamicCache(config=target.config) if value is DynamicCache else value for key, value in options.items()
    }
    assert modes_in(target, tiny_draft(target), **options) == {False}


def test_target_in_training_does_not():
    target = tiny_target().train()
    assert modes_in(target, tiny_draft(target)) == {False}


def test_states_caught_by_a_hook_can_be_trained_on():
    target = tiny_target()
    draft = tiny_draft(target)
    caught = []
    target.model.layers[0].mlp.register_forward_hook(lambda module, args, output: caught.append(output))
    assert modes_in(target, draft) == {False}
    probe = torch.nn.Linear(caught[0].shape[-1], 1, dtype=caught[0].dtype)
    probe(caught[0]).sum().backward()
    assert probe.weight.grad.abs().sum() > 0


def test_hook_that_says_it_keeps_nothing_changes_nothing():
    def hook(module, args, output):
        assert output is not None

    hook.keeps_no_tensors = True
    target = tiny_target()
    target.register_forward_hook(hook)
    assert modes_in(target, tiny_draft(target)) == {True}


def test_hooks_may_come_while_they_are_looked_at():
    """As other threads' do that generate with the same target."""
    target = tiny_target()

    class Arriving:
        @property
        def keeps_no_tensors(self):
            target.register_forward_hook(quiet)
            return True

        def __call__(self, module, args, output):
            return None

    def quiet(module, args, output):
        return None

    quiet.keeps_no_tensors = True
    target.register_forward_hook(Arriving())
    target.register_forward_hook(quiet)
    assert modes_in(target, tiny_draft(target)) == {True}


def test_being_timed_changes_nothing():
    target = tiny_target()
    draft = tiny_draft(target)
    modules = {"target": target, "draft": draft, "head": target.get_output_embeddings()}
    with Recorder(clock_for(target.device), modules):
        assert modes_in(target, draft) == {True}
    stopwatch = Stopwatch(time.perf_counter)
    with loops_watched(draft, stopwatch.watching):
        assert modes_in(target, draft) == {True}


@pytest.mark.parametrize("make_target", [tiny_target, lambda: hybrid_target("lfm2")], ids=["dense", "hybrid"])
def test_returned_cache_can_be_continued_in_training(make_target):
    target = make_target()
    prompt = random_prompt(6)
    with modes_of(target) as modes:
        output = target.generate(
            prompt, assistant_model=tiny_draft(target), max_new_tokens=9, do_sample=False, return_dict_in_generate=True
        )
    assert set(modes) == {True}
    inputs = {"input_ids": output.sequences[:, -1:], CACHE_KEY: get_cache(output), "use_cache": True}
    target(**inputs).logits.sum().backward()
    assert target.get_input_embeddings().weight.grad is not None


def test_mode_of_the_caller_stays_on():
    target = tiny_target()
    with torch.inference_mode():
        assert modes_in(target, tiny_draft(target), return_dict_in_generate=True, output_scores=True) == {True}
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_returned_ids_can_be_trained_on(length):
    target = tiny_target()
    ids = target.generate(random_prompt(6), assistant_model=tiny_draft(target), max_new_tokens=length, do_sample=False)
    assert not ids.is_inference()
    target(input_ids=ids, labels=ids).loss.backward()
    ids += 1  # in place, as a caller may


@pytest.mark.parametrize(
    "overrides", [{}, {"rope_parameters": NTK, "max_position_embeddings": 8}], ids=["plain", "NTK"]
)
def test_target_can_be_trained_afterwards(overrides):
    target = tiny_target(**overrides)
    prompt = random_prompt(6)
    assert modes_in(target, tiny_draft(target), prompt, max_new_tokens=24) == {True}
    target.train()
    target(input_ids=random_prompt(20), labels=random_prompt(20)).loss.backward()
    assert all(parameter.grad is not None for parameter in target.parameters())
    target.eval()
    fresh = tiny_target(**overrides)
    assert torch.equal(greedy(target, prompt, 12), greedy(fresh, prompt, 12))


def test_streamer_is_given_ordinary_tensors_and_no_gradients():
    class Looking(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append((value.is_inference(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        def end(self):
            self.seen.append("end")

    target, streamer = tiny_target(), Looking()
    assert modes_in(target, tiny_draft(target), streamer=streamer) == {True}
    assert set(streamer.seen) == {(False, False, False), "end"}
