"""The target's tapped states on disk, computed once and read in every epoch after.

A file holds the states of some consecutive sequences, and its name is a hash of all they depend on: the target's
weights, the taps, the dtype and the token ids. Other tokens or another target therefore find no file and make a new
one; nothing stale is ever read. More data at the end of a dataset leaves the files of the rest as they are.

Shapes: B batch, S context, L taps, H hidden, T tokens of a file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .target import FrozenTarget

if TYPE_CHECKING:
    from datasets import Dataset

SEQUENCES_PER_FILE = 256
TOKENS_PER_FORWARD = 4096
POLL_SECONDS = 0.5


class StateCache:
    """Memory-mapped states of a dataset's sequences, two bytes a number in bf16.

    Args:
        folder: Where the files are; made if missing.
        target: Computes what is not there yet.
        sequences: Rows with `input_ids` and `sequence`.
        with_head_inputs: Whether to keep the inputs of the target's head, too (for distillation).
        share: Number of this process and of all processes of this machine: each makes its share of the files and waits
            for the others' to appear.
    """

    def __init__(
        self,
        folder: str | Path,
        target: FrozenTarget,
        sequences: Dataset,
        with_head_inputs: bool = False,
        share: tuple[int, int] = (0, 1),
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.target = target
        self.with_head_inputs = with_head_inputs
        self.width = target.hidden_size * (len(target.target_layer_ids) + with_head_inputs)
        self.places: dict[int, tuple[Path, int, int]] = {}  # sequence -> file, first token, end
        self.maps: dict[Path, np.ndarray] = {}
        self._fill(sequences, *share)

    def batch(self, sequences: Sequence[int], length: int) -> torch.Tensor:
        """States of these sequences, zeros behind their ends, (B, length, L * H)."""
        states = torch.zeros(len(sequences), length, self.width, dtype=self.target.dtype)
        for row, sequence in zip(states, sequences, strict=True):
            path, start, end = self.places[sequence]
            if path not in self.maps:
                self.maps[path] = np.memmap(path, mode="r", dtype=np.uint8).reshape(-1, self._row_bytes)
            stored = torch.from_numpy(self.maps[path][start:end].copy())
            row[: end - start] = stored.view(self.target.dtype)
        return states

    @property
    def _row_bytes(self) -> int:
        return self.width * self.target.dtype.itemsize

    def _fill(self, sequences: Dataset, process: int, processes: int) -> None:
        from tqdm.auto import tqdm

        digest = _target_digest(self.target, self.with_head_inputs)
        starts = range(0, len(sequences), SEQUENCES_PER_FILE)
        paths: list[Path] = []
        bar = tqdm(starts, desc="target states", unit="file", disable=len(starts) < 2 or process > 0)
        for number, start in enumerate(bar):
            rows = sequences[start : start + SEQUENCES_PER_FILE]
            path = self.folder / f"{_file_digest(digest, rows['input_ids'])}.states"
            paths.append(path)
            if number % processes == process and not path.is_file():
                self._write(path, rows["input_ids"])
            end = 0
            for sequence, token_ids in zip(rows["sequence"], rows["input_ids"], strict=True):
                self.places[sequence] = path, end, end + len(token_ids)
                end += len(token_ids)
        while not all(path.is_file() for path in paths):  # no barrier: it would run into its timeout
            time.sleep(POLL_SECONDS)

    def _write(self, path: Path, sequences: Sequence[Sequence[int]]) -> None:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        ends = np.cumsum([len(token_ids) for token_ids in sequences])
        buffer = np.memmap(aside, mode="w+", dtype=np.uint8, shape=(int(ends[-1]), self._row_bytes))
        for batch in _batches_by_length(sequences):
            longest = max(len(sequences[index]) for index in batch)
            input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(input_ids)
            for row, index in enumerate(batch):
                input_ids[row, : len(sequences[index])] = torch.as_tensor(sequences[index])
                mask[row, : len(sequences[index])] = 1
            device = self.target.model.device
            states = self.target.states(input_ids.to(device), mask.to(device), self.with_head_inputs).cpu()
            for row, index in zip(states, batch, strict=True):
                length = len(sequences[index])
                stored = row[:length].contiguous().view(torch.uint8).numpy()
                buffer[ends[index] - length : ends[index]] = stored
        buffer.flush()
        os.replace(aside, path)


def _batches_by_length(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of sequences of similar length, some thousand tokens a batch."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
        length = len(sequences[index])
        if not batches or room < length:
            batches.append([])
            room = max(TOKENS_PER_FORWARD, length)
        batches[-1].append(index)
        room -= len(sequences[batches[-1][0]])  # what the row takes once padded
    return batches


def _target_digest(target: FrozenTarget, with_head_inputs: bool) -> bytes:
    facts: tuple[Any, ...] = (target.target_layer_ids, str(target.dtype), with_head_inputs)
    digest = hashlib.sha256(repr(facts).encode())
    for name, tensor in sorted(target.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()


def _file_digest(target_digest: bytes, sequences: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256(target_digest)
    for token_ids in sequences:
        digest.update(np.asarray([len(token_ids), *token_ids], dtype=np.int64).tobytes())
    return digest.hexdigest()[:32]
