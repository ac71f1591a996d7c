"""Where the time of one `generate` call goes: prefill and decoding apart, and decoding by who was running.

Modules are watched by hooks, deliveries of tokens by a streamer; nothing is patched: all methods are measured alike.
Decoding starts when the first tokens are delivered, and its speed counts the tokens after them: the first token comes
from the prefill. On a GPU the marks are events of the stream, so watching makes nobody wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.streamers import BaseStreamer


class HostClock:
    """Seconds on the host, for devices that work synchronously."""

    def mark(self) -> Any:
        """This moment."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks."""
        return end - start


class DeviceClock:
    """Seconds between CUDA events, which the device stamps when it gets there."""

    def mark(self) -> Any:
        """This point of the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits until the device has passed the second."""
        end.synchronize()
        return start.elapsed_time(end) / 1000


def clock_for(device: Any) -> HostClock | DeviceClock:
    """The clock that is right for models on this device."""
    return DeviceClock() if getattr(device, "type", str(device)).startswith("cuda") else HostClock()


@dataclass(frozen=True)
class Span:
    """One call of a watched module: who, from, to, and how many tokens wide."""

    name: str
    start: Any
    end: Any
    width: int


@dataclass(frozen=True)
class Delivery:
    """Tokens handed to the streamer."""

    mark: Any
    tokens: int


@dataclass
class Timing:
    """The seconds of one call.

    Attributes:
        prefill: Until the first tokens are there.
        decode: From then on.
        parts: Decoding by who was running: "target", "draft", "head", "elsewhere".
        first_tokens: Tokens that the prefill yielded.
        decoded_tokens: Tokens after them.
        deliveries: Tokens of each delivery after the first.
        spans: Watched calls of decoding as (name, start, end, width), seconds from its start.
    """

    prefill: float
    decode: float
    parts: dict[str, float]
    first_tokens: int
    decoded_tokens: int
    deliveries: list[int] = field(default_factory=list)
    spans: list[tuple[str, float, float, int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; `None` if the prefill's token was all."""
        return self.decoded_tokens / self.decode if self.decoded_tokens and self.decode > 0 else None


class Recorder(BaseStreamer):
    """Watches modules and stands in as the streamer for one `generate` call.

        recorder = Recorder(clock, {"target": target, "draft": draft})
        with recorder:
            output = target.generate(..., streamer=recorder)
        timing = recorder.timing(num_new_tokens)

    Args:
        clock: Where marks come from.
        modules: Watched modules by name. A module called inside another watched one is part of that one.
        streamer: Gets the deliveries, too.
    """

    def __init__(self, clock: Any, modules: dict[str, Any], streamer: Any = None):
        self.clock = clock
        self.modules = modules
        self.streamer = streamer
        self.log: list[Span | Delivery] = []
        self.open: list[tuple[str, Any, int]] = []
        self.handles: list[Any] = []
        self.has_prompt = False

    def __enter__(self) -> Recorder:
        for name, module in self.modules.items():
            before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
            after = module.register_forward_hook(self._leaving, always_call=True)
            self.handles += [before, after]
        self.start = self.clock.mark()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end_mark = self.clock.mark()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _entering(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.open.append((name, self.clock.mark() if not self.open else None, _width(args, kwargs)))

        hook.keeps_no_tensors = True  # type: ignore[attr-defined]  # being watched must not change how a call runs
        return hook

    def _leaving(self, module: Any, args: Any, output: Any) -> None:
        name, start, width = self.open.pop()
        if not self.open:
            self.log.append(Span(name, start, self.clock.mark(), width))

    _leaving.keeps_no_tensors = True  # type: ignore[attr-defined]

    def put(self, value: Any) -> None:
        """A delivery; the first is the prompt."""
        if self.has_prompt:
            self.log.append(Delivery(self.clock.mark(), value.numel()))
        self.has_prompt = True
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        """The last delivery has been made."""
        if self.streamer is not None:
            self.streamer.end()

    def timing(self, num_new_tokens: int) -> Timing:
        """The seconds of the call, which has yielded `num_new_tokens` in all.

        Raises:
            ValueError: If neither a delivery nor a forward of the target was seen.
        """
        first, delivery = next(((i, e) for i, e in enumerate(self.log) if isinstance(e, Delivery)), (None, None))
        if delivery is not None:
            boundary, first_tokens = delivery.mark, delivery.tokens
        else:  # a loop that takes no streamer
            forwards = ((i, e) for i, e in enumerate(self.log) if isinstance(e, Span) and e.name == "target")
            first, prefill = next(forwards, (None, None))
            if prefill is None:
                raise ValueError("nothing was generated: the target did not run and no token was delivered")
            boundary, first_tokens = prefill.end, 1
        later = self.log[first + 1 :]
        seconds = self.clock.seconds
        decode = seconds(boundary, self.end_mark)
        spans = [entry for entry in later if isinstance(entry, Span)]
        return Timing(
            prefill=seconds(self.start, boundary),
            decode=decode,
            parts=_parts(((s.name, seconds(s.start, s.end)) for s in spans), decode),
            first_tokens=min(first_tokens, num_new_tokens),
            decoded_tokens=max(num_new_tokens - first_tokens, 0),
            deliveries=[entry.tokens for entry in later if isinstance(entry, Delivery)],
            spans=[(s.name, seconds(boundary, s.start), seconds(boundary, s.end), s.width) for s in spans],
        )


def _parts(spans: Iterable[tuple[str, float]], total: float) -> dict[str, float]:
    parts = dict.fromkeys(("target", "draft", "head"), 0.0)
    for name, seconds in spans:
        parts[name] += seconds
    return {**parts, "elsewhere": total - sum(parts.values())}


def _width(args: Any, kwargs: Any) -> int:
    """Tokens that a module is called on: the second dimension of the first tensor it gets."""
    tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "dim") and value.dim() >= 2]
    return tensors[0].shape[1] if tensors else 0


__all__ = ["Recorder", "Timing", "clock_for"]
