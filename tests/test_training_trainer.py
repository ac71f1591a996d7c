"""What a training run guarantees: the loss's normalisation, what it trains and leaves alone, and that it learns."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModel, TrainerCallback

from dflash_hf.training import losses, state_cache
from dflash_hf.training.blocks import IGNORED, batch_anchors, make_blocks
from dflash_hf.training.sequences import SequenceCollator
from dflash_hf.training.state_cache import StateCache
from dflash_hf.training.target import FrozenTarget, RestrictedHead
from helpers import greedy, random_prompt, tiny_draft, tiny_target
from training_runs import answers_of, losses_of, make_trainer, parameters_of


def first_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first optimiser step, before they are clipped."""
    captured: dict[str, torch.Tensor] = {}

    def clip(model: Any) -> torch.Tensor:
        if not captured:
            captured.update({name: p.grad.clone() for name, p in trainer.draft.named_parameters()})
        return torch.zeros(())

    trainer._clip_grad_norm = clip
    trainer.train()
    return captured


@torch.no_grad()
def states_of_one_block(draft: Any, target: Any, tokens: list[int], anchor: int) -> torch.Tensor:
    """A block alone, through the inference forward over its own context, (1, K, H); differentiable."""
    frozen = FrozenTarget(target, draft.config.target_layer_ids)
    taps = frozen.states(torch.tensor([tokens[:anchor]]), torch.ones(1, anchor, dtype=torch.long))
    block = torch.tensor([[tokens[anchor]] + [draft.config.mask_token_id] * (draft.config.block_size - 1)])
    with torch.enable_grad():
        return draft(draft.embed_block(block, frozen.embeddings), taps).last_hidden_state


def loss_by_hand(draft: Any, target: Any, rows: Dataset, anchors: torch.Tensor, kind: str) -> torch.Tensor:
    """The definition, block by block and slot by slot, each through the inference forward."""
    block_size = draft.config.block_size
    decay = losses.decay_weights(block_size, losses.default_gamma(block_size)).double()
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for row, own_anchors in zip(rows, anchors.tolist(), strict=True):
        tokens = row["input_ids"]
        target_logits = target(torch.tensor([tokens])).logits[0]
        for anchor in own_anchors:
            if anchor < 0:
                continue
            states = states_of_one_block(draft, target, tokens, anchor)
            logits = draft.compute_logits(states, target.get_output_embeddings())[0]
            for slot in range(1, block_size):
                if anchor + slot >= len(tokens):
                    continue
                log_q = logits[slot - 1].log_softmax(-1)
                if kind == "kl":
                    log_p = target_logits[anchor + slot - 1].log_softmax(-1)
                    value = (log_p.exp() * (log_p - log_q)).sum()
                else:
                    value = -log_q[tokens[anchor + slot]]
                total = total + decay[slot - 1] * value
                weight_sum += float(decay[slot - 1])
    return total / weight_sum


@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_first_step_is_the_definition_computed_block_by_block(tmp_path: Path, kind: str, family: str) -> None:
    softcap = {"final_logit_softcapping": 5.0} if family == "gemma3" else {}
    target = tiny_target(family, **softcap)
    rows = answers_of(target, 3)
    draft = tiny_draft(target, **softcap)
    trainer = make_trainer(
        target,
        tmp_path,
        rows,
        draft=draft,
        loss=kind,
        max_steps=1,
        per_device_train_batch_size=3,
        num_anchors=4,
        logging_steps=1,
    )
    anchors = batch_anchors(
        torch.arange(3), torch.tensor(rows["prompt_length"]), torch.tensor(rows["length"]), 4, (trainer.args.seed, 0)
    )
    reference = tiny_draft(target, **softcap)
    by_hand = loss_by_hand(reference, target, rows, anchors, kind)
    by_hand.backward()
    gradients = first_gradients(trainer)
    assert losses_of(trainer) == [pytest.approx(by_hand.item(), rel=1e-3)]  # as logged, four digits
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_micro_batches_and_accumulation_do_not_change_the_step(tmp_path: Path, qwen3: Any, kind: str) -> None:
    rows = answers_of(qwen3, 8)
    results = []
    for batch_size, accumulation in ((8, 1), (2, 4), (1, 8)):
        trainer = make_trainer(
            qwen3,
            tmp_path,
            rows,
            loss=kind,
            max_steps=3,
            num_anchors=3,
            learning_rate=1e-3,
            logging_steps=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            adam_epsilon=1e-3,
        )
        trainer.train()
        results.append((losses_of(trainer), parameters_of(trainer)))
    for curve, parameters in results[1:]:
        assert curve == pytest.approx(results[0][0], rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=1e-5, atol=1e-7, msg=name)


def test_only_the_draft_is_trained_and_saved(tmp_path: Path, qwen3: Any) -> None:
    before = {name: value.clone() for name, value in qwen3.state_dict().items()}
    trainer = make_trainer(qwen3, tmp_path, answers_of(qwen3, 2), max_steps=2)
    start = parameters_of(trainer)
    trainer.train()
    trainer.save_model()
    own = {id(parameter) for parameter in trainer.draft.parameters()}
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == own
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in qwen3.parameters())
    assert all(torch.equal(before[name], value) for name, value in qwen3.state_dict().items())
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(start)
    unmoved = [name for name, value in parameters_of(trainer).items() if torch.equal(value, start[name])]
    assert not unmoved


def test_a_saved_draft_loads_by_itself_and_drafts(tmp_path: Path, qwen3: Any) -> None:
    trainer = make_trainer(qwen3, tmp_path, answers_of(qwen3, 2), max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    draft = AutoModel.from_pretrained(checkpoint, trust_remote_code=True, dtype=torch.float64).eval()
    prompt = random_prompt(6)
    outputs = qwen3.generate(prompt, assistant_model=draft, max_new_tokens=10, do_sample=False)
    assert torch.equal(outputs, greedy(qwen3, prompt, 10))
    assert {path.suffix for path in checkpoint.iterdir()} <= {".safetensors", ".json", ".py"}


def test_a_draft_overfitted_on_one_sequence_is_accepted_whole(tmp_path: Path) -> None:
    target = tiny_target("qwen3", dtype=torch.float32)
    prompt = random_prompt(8)
    tokens = greedy(target, prompt, 25)[0].tolist()
    rows = Dataset.from_list([{"input_ids": tokens, "prompt_length": 8, "sequence": 0, "length": len(tokens)}])
    trainer = make_trainer(
        target, tmp_path, rows, max_steps=150, learning_rate=3e-3, lr_scheduler_type="constant", warmup_steps=0
    )
    trainer.train()
    outputs = target.generate(
        prompt, assistant_model=trainer.draft.eval(), max_new_tokens=25, do_sample=False, return_dict_in_generate=True
    )
    assert outputs.acceptance_lengths == [[trainer.draft.config.block_size] * 6]


def test_states_from_the_cache_train_the_same(tmp_path: Path, qwen3: Any) -> None:
    rows = answers_of(qwen3, 5)
    runs = []
    for cached in (False, True):
        draft = tiny_draft(qwen3)
        collator = SequenceCollator()
        if cached:
            cache = StateCache(tmp_path / "states", FrozenTarget(qwen3, draft.config.target_layer_ids), rows, True)
            collator = SequenceCollator(cache)
        trainer = make_trainer(
            qwen3, tmp_path, rows, draft=draft, data_collator=collator, loss="kl", max_steps=2, num_anchors=3
        )
        if cached:
            trainer.target.states = None  # the target is not run again
        trainer.train()
        runs.append(parameters_of(trainer))
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, rtol=1e-6, atol=1e-8, msg=name)


def test_cached_states_belong_to_their_tokens_and_target(tmp_path: Path, qwen3: Any) -> None:
    rows = answers_of(qwen3, 3)
    folder = tmp_path / "states"
    target = FrozenTarget(qwen3, [0, 2])
    StateCache(folder, target, rows)
    first = set(folder.iterdir())
    StateCache(folder, target, rows)
    assert set(folder.iterdir()) == first  # found again
    StateCache(folder, FrozenTarget(qwen3, [0, 1]), rows)
    StateCache(folder, FrozenTarget(tiny_target("qwen3", seed=9), [0, 2]), rows)
    StateCache(folder, target, rows.map(lambda row: {"input_ids": [*row["input_ids"][:-1], 7]}))
    assert len(set(folder.iterdir())) == 4


def test_processes_share_the_work_of_a_cache(tmp_path: Path, qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "SEQUENCES_PER_FILE", 1)
    monkeypatch.setattr(state_cache, "POLL_SECONDS", 0.01)
    rows, target = answers_of(qwen3, 4), FrozenTarget(qwen3, [0, 2])
    written: list[tuple[str, str]] = []
    write = StateCache._write

    def spy(cache: StateCache, path: Path, sequences: Any) -> None:
        written.append((threading.current_thread().name, path.name))
        write(cache, path, sequences)

    monkeypatch.setattr(StateCache, "_write", spy)
    caches: dict[int, StateCache] = {}

    def fill(process: int) -> None:
        caches[process] = StateCache(tmp_path, target, rows, share=(process, 2))

    threads = [threading.Thread(target=fill, args=(process,), name=str(process)) for process in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in written) == ["0", "0", "1", "1"]
    assert len({path for _, path in written}) == 4
    assert torch.equal(caches[0].batch([0, 3], 30), StateCache(tmp_path, target, rows).batch([0, 3], 30))


def test_a_head_over_the_tokens_in_use_gives_their_gradient(tmp_path: Path, qwen3: Any) -> None:
    rows = answers_of(qwen3, 3)
    everything = torch.arange(qwen3.config.vocab_size)
    gradients = []
    for head in (None, RestrictedHead(qwen3.get_output_embeddings(), everything)):
        trainer = make_trainer(qwen3, tmp_path, rows, head=head, max_steps=1, num_anchors=3)
        gradients.append(first_gradients(trainer))
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, msg=name)
    some = torch.tensor([3, 5, 9])
    restricted = RestrictedHead(qwen3.get_output_embeddings(), some)
    states = torch.randn(4, 32, dtype=torch.float64)
    torch.testing.assert_close(restricted(states), qwen3.get_output_embeddings()(states)[:, some])
    assert restricted.places[some].tolist() == [0, 1, 2]


def test_infinite_states_skip_the_step_and_leave_the_parameters_finite(tmp_path: Path, qwen3: Any) -> None:
    rows = answers_of(qwen3, 4)
    trainer = make_trainer(qwen3, tmp_path, rows, max_steps=3, per_device_train_batch_size=4, logging_steps=1)
    start = parameters_of(trainer)
    states, calls = trainer.target.states, []

    def broken_once(*args: Any) -> torch.Tensor:
        calls.append(None)
        return states(*args) if len(calls) > 1 else torch.full_like(states(*args), torch.inf)

    trainer.target.states = broken_once
    after_first: list[dict[str, torch.Tensor]] = []
    trainer.add_callback(
        type("Spy", (TrainerCallback,), {"on_step_end": lambda *a, **k: after_first.append(parameters_of(trainer))})()
    )
    trainer.train()
    assert all(torch.equal(after_first[0][name], value) for name, value in start.items())
    assert not any(torch.equal(after_first[2][name], value) for name, value in start.items())
    assert all(torch.isfinite(value).all() for value in after_first[2].values())
    assert trainer.state.log_history[0]["skipped_steps"] == 1


def test_a_response_of_two_tokens_trains_and_padding_blocks_change_nothing(tmp_path: Path, qwen3: Any) -> None:
    short = {"input_ids": [4, 5, 6, 7, 8], "prompt_length": 3, "sequence": 0, "length": 5}
    trainer = make_trainer(qwen3, tmp_path, Dataset.from_list([short]), max_steps=1, logging_steps=1)
    trainer.train()
    expected = loss_by_hand(tiny_draft(qwen3), qwen3, Dataset.from_list([short]), torch.tensor([[3, -1]]), "ce")
    assert losses_of(trainer) == [pytest.approx(expected.item(), rel=1e-5)]


def test_gradient_checkpointing_changes_memory_only(tmp_path: Path, qwen3: Any) -> None:
    rows = answers_of(qwen3, 2)
    plain = first_gradients(make_trainer(qwen3, tmp_path, rows, max_steps=1))
    checkpointed = first_gradients(make_trainer(qwen3, tmp_path, rows, max_steps=1, gradient_checkpointing=True))
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, msg=name)


@pytest.mark.parametrize("field", ["own_head", "own_embedding", "slots_predict_next"])
def test_drafts_with_parts_that_are_not_trained_are_refused(tmp_path: Path, qwen3: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"`{field}` is True"):
        make_trainer(qwen3, tmp_path, answers_of(qwen3, 1), draft=tiny_draft(qwen3, **{field: True}))


def test_blocks_are_those_of_the_anchors(qwen3: Any) -> None:
    rows = answers_of(qwen3, 2)
    batch = SequenceCollator()(list(rows))
    anchors = batch_anchors(batch["sequences"], batch["prompt_lengths"], batch["lengths"], 50, (0, 0))
    blocks = make_blocks(batch["input_ids"], batch["lengths"], anchors, 4, 63)
    for row, number in enumerate(rows["length"]):
        labels = blocks.labels[row]
        assert int((labels != IGNORED).any(-1).sum()) == number - 1 - rows[row]["prompt_length"]
