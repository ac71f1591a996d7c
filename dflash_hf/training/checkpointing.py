"""Checkpoints of a run: whole or absent, tensors in safetensors, everything else in JSON; nothing is pickled.

A checkpoint is written into a folder aside and renamed when it is complete, so a run killed while it saves resumes
from the one before. Each is also a repository of the draft, which `from_pretrained` loads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import rotate_checkpoints

ASIDE = ".checkpoint-in-work"
OPTIMIZER_TENSORS = "optimizer.safetensors"
OPTIMIZER_SETTINGS = "optimizer.json"
SCHEDULER = "scheduler.json"


class AtomicCheckpoints:
    """Mixin in front of [`~transformers.Trainer`]: how checkpoints are written and read.

    Under FSDP and DeepSpeed the optimiser's state is sharded and stays in the format of those.
    """

    # Of the Trainer behind the mixin.
    args: Any
    state: Any
    control: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    _is_writing_aside = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial=trial)  # type: ignore[misc]
        return os.path.join(folder, ASIDE) if self._is_writing_aside else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        aside, name = run_dir / ASIDE, f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._is_writing_aside = True
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._is_writing_aside = False
        self.accelerator.wait_for_everyone()
        self._name_best_checkpoint(aside, run_dir)
        if self.args.should_save:
            self.state.save_to_json(str(aside / name / "trainer_state.json"))
            shutil.rmtree(run_dir / name, ignore_errors=True)
            os.replace(aside / name, run_dir / name)
            aside.rmdir()
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,
            )
        self.accelerator.wait_for_everyone()

    def _name_best_checkpoint(self, aside: Path, run_dir: Path) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent == aside:
            self.state.best_model_checkpoint = str(run_dir / Path(best).name)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        folder = Path(output_dir or self.args.output_dir)
        pickled = folder / "training_args.bin"
        if self.args.should_save and pickled.is_file():
            pickled.unlink()
            (folder / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    @property
    def _has_sharded_optimizer(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._has_sharded_optimizer:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        elif self.args.should_save:
            save_optimizer(self.optimizer, Path(output_dir))
            scheduler = {k: v for k, v in self.lr_scheduler.state_dict().items() if k != "lr_lambdas"}
            (Path(output_dir) / SCHEDULER).write_text(json.dumps(scheduler), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._has_sharded_optimizer:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load_optimizer(self.optimizer, Path(checkpoint))
        scheduler = json.loads((Path(checkpoint) / SCHEDULER).read_text(encoding="utf-8"))
        self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **scheduler})

    def _rng_path(self, folder: str) -> Path:
        return Path(folder) / f"rng_state_{self.args.process_index}"

    def _save_rng_state(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        path = self._rng_path(output_dir)
        version, numbers, cached = random.getstate()
        name, keys, place, has_gauss, gauss = np.random.get_state()
        tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
        if torch.cuda.is_available():
            tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
        save_file(tensors, path.with_suffix(".safetensors"))
        rest = {"python": [version, list(numbers), cached], "numpy": [name, place, has_gauss, gauss]}
        path.with_suffix(".json").write_text(json.dumps(rest), encoding="utf-8")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (path := self._rng_path(checkpoint).with_suffix(".safetensors")).is_file():
            return
        tensors = load_file(path)
        rest = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        version, numbers, cached = rest["python"]
        random.setstate((version, tuple(numbers), cached))
        name, place, has_gauss, gauss = rest["numpy"]
        np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), place, has_gauss, gauss))
        torch.set_rng_state(tensors["torch"])
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


def save_optimizer(optimizer: Any, folder: Path) -> None:
    """The optimiser's tensors as safetensors, its settings as JSON."""
    content = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {"param_groups": content["param_groups"], "state": {}}
    for number, state in content["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{key}"] = value.contiguous()
            else:
                settings["state"].setdefault(str(number), {})[key] = value
    save_file(tensors, folder / OPTIMIZER_TENSORS)
    (folder / OPTIMIZER_SETTINGS).write_text(json.dumps(settings), encoding="utf-8")


def load_optimizer(optimizer: Any, folder: Path) -> None:
    """What `save_optimizer` wrote."""
    settings = json.loads((folder / OPTIMIZER_SETTINGS).read_text(encoding="utf-8"))
    state: dict[int, dict[str, Any]] = {int(number): dict(rest) for number, rest in settings["state"].items()}
    for name, tensor in load_file(folder / OPTIMIZER_TENSORS).items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": settings["param_groups"]})
