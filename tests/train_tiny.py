"""A training run in a process of its own, for tests that kill it or start several: `train_tiny.py FOLDER JSON`.

Writes the loss curve to `FOLDER/curve-RANK.json` and the draft to `FOLDER/final`. With `kill_in_step` in the JSON the
process ends itself by SIGKILL in the middle of that step, between forward and backward.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from helpers import tiny_target
from training_runs import answers_of, losses_of, make_trainer


def main() -> None:
    torch.set_num_threads(1)
    folder, fields = Path(sys.argv[1]), json.loads(sys.argv[2])
    kill_in_step, shard_target = fields.pop("kill_in_step", None), fields.pop("shard_target", False)
    target = tiny_target("qwen3", dtype=torch.float32)
    rows = answers_of(target, 12)
    trainer = make_trainer(target, folder, rows, num_anchors=3, logging_steps=1, real_eval_prompts=2, **fields)
    if shard_target:
        trainer.target.shard()
    if kill_in_step is not None:
        original = trainer._sum_of_losses

        def deadly(*args: object) -> torch.Tensor:
            if trainer.state.global_step == kill_in_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        trainer._sum_of_losses = deadly
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    metrics = {} if shard_target else trainer.evaluate()
    trainer.save_model(str(folder / "final"))
    result = {"losses": losses_of(trainer), "metrics": metrics, "processes": trainer.args.world_size}
    (folder / f"curve-{trainer.args.process_index}.json").write_text(json.dumps(result))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
