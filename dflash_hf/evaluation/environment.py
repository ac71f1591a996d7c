"""Where and with what something was measured. A figure without this means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("dflash-hf", "transformers", "torch", "accelerate", "datasets", "dflash", "flash-attn")


def hardware(device: Any) -> dict[str, Any]:
    """CPU, memory, and the GPU that `device` is."""
    import torch

    name = getattr(device, "type", str(device))
    is_gpu = name.startswith("cuda") and torch.cuda.is_available()
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "gpu": torch.cuda.get_device_name(device) if is_gpu else None,
        "gpus": torch.cuda.device_count() if is_gpu else 0,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def versions() -> dict[str, str]:
    """What is installed of the packages that matter, Python, and the platform."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in PACKAGES:
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the code that runs, with "-dirty" if it was changed since; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return "unknown"
    try:
        describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=7", "--exclude=*"]
        head = subprocess.run(describe, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        status = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", "dflash_hf"]
        changed = subprocess.run(status, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Peak:
    """A peak of memory, in MiB; `None` where the platform does not tell."""

    mib: float | None = None


@contextmanager
def peak_memory(device: Any) -> Iterator[Peak]:
    """The peak during the body: of the GPU's allocations, or of the process's resident memory."""
    import torch

    peak = Peak()
    is_gpu = getattr(device, "type", str(device)).startswith("cuda")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _reset_high_water_mark()
    yield peak
    peak.mib = torch.cuda.max_memory_allocated(device) / 2**20 if is_gpu else _high_water_mark()


def _reset_high_water_mark() -> None:
    with suppress(OSError):  # without it, the peak is that since the start of the process
        Path("/proc/self/clear_refs").write_text("5")


def _high_water_mark() -> float | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


__all__ = ["commit", "hardware", "now", "peak_memory", "versions"]
