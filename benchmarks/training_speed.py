"""Training speed: one optimiser step of ours against those of SpecForge and speculators, on the same pair and data.

    python benchmarks/training_speed.py --output training_speed.json [--steps 5] [--rounds 3]

The same target, draft size, sequences, anchors and optimiser; every step includes the target's forward. Each
implementation runs in a process of its own, so that its peak memory is its own; rounds alternate between them, and
the best round counts. Speed is given twice: by the clock, and by the processor time that the step used, which other
programs on the machine hardly change. An implementation that does not run is reported with its error.

    pip install --no-deps specforge==0.2.0 speculators==0.9.0

Shapes: B batch, S context, L taps, H hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPLEMENTATIONS = ("ours", "specforge", "speculators")
SHAPE = {"sequences": 4, "length": 256, "prompt_length": 32, "anchors": 64, "block_size": 8, "draft_layers": 2}
TAPS = [1, 8, 14, 20, 27]
MASK_TOKEN = 5
LEARNING_RATE = 6e-4


def draft_fields(text: Any) -> dict[str, Any]:
    """The fields of a Qwen3 configuration for a draft of the target's width."""
    from dflash_hf.training.draft_setup import draft_config_for

    config = draft_config_for(text, MASK_TOKEN, SHAPE["block_size"], SHAPE["draft_layers"], TAPS)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    return {name: getattr(config, name) for name in names}


def load_target() -> tuple[Any, Any]:
    """The embedded target in bf16, and random sequences (B, S)."""
    import torch

    from dflash_hf.embedded import load_embedded_target

    target, _ = load_embedded_target()
    generator = torch.Generator().manual_seed(0)
    shape = (SHAPE["sequences"], SHAPE["length"])
    return target, torch.randint(100, target.config.vocab_size, shape, generator=generator)


def optimiser_step(parameters: list[Any], loss: Callable[[], Any]) -> Callable[[], float]:
    """Forward, backward, clipping and AdamW, as one function; the two others are stepped by this."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(value)

    return step


def prepare_ours() -> Callable[[], float]:
    """A step of `DFlashTrainer` as its training loop runs it."""
    import torch

    from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
    from dflash_hf.training.attention import BLOCKWISE
    from dflash_hf.training.draft_setup import draft_config_for
    from dflash_hf.training.target import FrozenTarget
    from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments

    target, tokens = load_target()
    draft = Qwen3DFlashForDraft(
        draft_config_for(target.config, MASK_TOKEN, SHAPE["block_size"], SHAPE["draft_layers"], TAPS)
    )
    draft.set_attn_implementation(BLOCKWISE)
    rows = [
        {"input_ids": ids, "prompt_length": SHAPE["prompt_length"], "sequence": number}
        for number, ids in enumerate(tokens.tolist())
    ]
    arguments = DFlashTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=True,
        num_anchors=SHAPE["anchors"],
        learning_rate=LEARNING_RATE,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=SHAPE["sequences"],
    )
    trainer = DFlashTrainer(draft, FrozenTarget(target, TAPS), arguments, train_dataset=rows)
    trainer.create_optimizer_and_scheduler(1000)
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)

    def step() -> float:
        batches, weight = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
        value = trainer.training_step(model, batches[0], weight)
        trainer._clip_grad_norm(model)
        trainer.optimizer.step()
        model.zero_grad()
        return float(value)

    return step


def prepare_specforge() -> Callable[[], float]:
    """SpecForge's `OnlineDFlashModel` on the states of the same target."""
    import torch
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    from dflash_hf.training.target import FrozenTarget

    target, tokens = load_target()
    frozen = FrozenTarget(target, TAPS)
    config = Qwen3Config(**draft_fields(target.config))
    config.dflash_config = {"mask_token_id": MASK_TOKEN, "target_layer_ids": TAPS}
    config.block_size, config.num_target_layers = SHAPE["block_size"], target.config.num_hidden_layers
    config._attn_implementation = "sdpa"
    draft = DFlashDraftModel(config)
    model = OnlineDFlashModel(
        draft,
        frozen.head,
        frozen.embeddings,
        MASK_TOKEN,
        block_size=SHAPE["block_size"],
        attention_backend="sdpa",
        num_anchors=SHAPE["anchors"],
        loss_decay_gamma=4.0,
    )
    mask = (torch.arange(SHAPE["length"]) >= SHAPE["prompt_length"]).float().expand(len(tokens), -1)

    def loss() -> Any:
        return model(tokens, frozen.states(tokens, torch.ones_like(tokens)), mask)[0]

    return optimiser_step(list(draft.parameters()), loss)


def prepare_speculators() -> Callable[[], float]:
    """speculators' `DFlashDraftModel`, which takes all sequences packed into one row."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    from dflash_hf.embedded import embedded_target_path
    from dflash_hf.training.target import FrozenTarget

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    target, tokens = load_target()
    frozen = FrozenTarget(target, TAPS)
    draft = DFlashDraftModel.from_training_args(
        Qwen3Config(**draft_fields(target.config)),
        draft_vocab_size=target.config.vocab_size,
        block_size=SHAPE["block_size"],
        mask_token_id=MASK_TOKEN,
        target_layer_ids=[tap + 1 for tap in TAPS],
        verifier_name_or_path=str(embedded_target_path()),
        draft_attn_impl="eager",
    )
    width = len(TAPS) * target.config.hidden_size
    number, length = tokens.shape
    documents = torch.arange(number).repeat_interleave(length)[None]
    positions = torch.arange(length).repeat(number)[None]
    mask = (positions >= SHAPE["prompt_length"]).float()
    loss_config = resolve_loss_config("ce", "eager")  # its fused losses need Triton

    def loss() -> Any:
        states = frozen.states(tokens, torch.ones_like(tokens), with_head_inputs=True).flatten(0, 1)[None]
        return draft(
            states[..., :width],
            tokens.flatten()[None],
            mask,
            states[..., width:],
            documents,
            positions,
            loss_config=loss_config,
            max_anchors=SHAPE["anchors"] * number,
        )[1]

    return optimiser_step([parameter for parameter in draft.parameters() if parameter.requires_grad], loss)


PREPARE = {"ours": prepare_ours, "specforge": prepare_specforge, "speculators": prepare_speculators}


def measure(name: str, steps: int, threads: int) -> dict[str, Any]:
    """Run one implementation in this process: one step to warm up, then the timed ones."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = PREPARE[name]()
    values = [step()]
    wall, processor = time.perf_counter(), time.process_time()
    values += [step() for _ in range(steps)]
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    tokens = steps * SHAPE["sequences"] * SHAPE["length"]
    return {
        "tokens_per_second": tokens / wall,
        "tokens_per_processor_second": tokens / processor,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": values,
    }


def run_child(name: str, steps: int, threads: int) -> dict[str, Any]:
    """Measure in a process of its own; a failure becomes `{"error": its last line}`."""
    command = [sys.executable, __file__, "--child", name, "--steps", str(steps), "--threads", str(threads)]
    finished = subprocess.run(command, capture_output=True, text=True)
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return json.loads(finished.stdout.splitlines()[-1])
    return {"error": (finished.stderr.strip().splitlines() or ["no output"])[-1]}


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The best figure of each kind; an error if no round has one."""
    good = [entry for entry in rounds if "error" not in entry]
    if not good:
        return rounds[-1]
    speeds = {key: max(entry[key] for entry in good) for key in ("tokens_per_second", "tokens_per_processor_second")}
    return speeds | {"peak_memory_mib": min(entry["peak_memory_mib"] for entry in good), "losses": good[0]["losses"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--child", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.steps, args.threads)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in range(args.rounds):
        for name in IMPLEMENTATIONS:
            rounds[name].append(run_child(name, args.steps, args.threads))
    results = {name: best(entries) for name, entries in rounds.items()}
    print("| implementation | tokens/s | tokens/processor second | peak memory, MiB |\n|---|---|---|---|")
    for name, entry in results.items():
        if "error" in entry:
            print(f"| {name} | does not run: {entry['error']} | | |")
        else:
            speeds = f"{entry['tokens_per_second']:.0f} | {entry['tokens_per_processor_second']:.0f}"
            print(f"| {name} | {speeds} | {entry['peak_memory_mib']:.0f} |")
    if args.output:
        args.output.write_text(json.dumps({"shape": SHAPE, "results": results, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
