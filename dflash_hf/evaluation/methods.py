"""The ways to generate that a benchmark compares: one table, and what it takes to run each.

Every method continues the same prompt with the same target and generation config. `NAME:KEY=VALUE,...` on the command
line sets knobs of a method, such as `dflash-tree:draft_tree_budget=32`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .knobs import ASSISTANT, DRAFT, PROMPT_LOOKUP, Knob, check_knob
from .models import Pair

PLAIN = "plain"
ZLAB_REQUIREMENT = "dflash==0.1.0"


@dataclass(frozen=True)
class Method:
    """A way to generate.

    Attributes:
        assistant: Who drafts: "draft", "assistant" (an ordinary model), "zlab" (their model and loop), or nobody.
        draft_settings: Set on the draft's generation config for this method.
        generate_settings: Set on the target's generation config for this method.
        name: As the user wrote it.
        knobs: What the user may set.
    """

    assistant: str | None = None
    draft_settings: dict[str, Any] = field(default_factory=dict)
    generate_settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    knobs: dict[str, Knob] = field(default_factory=dict, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """All knobs, for the record."""
        return {**self.draft_settings, **self.generate_settings}


_OURS = {"num_assistant_tokens_schedule": "constant"}
METHODS: dict[str, Method] = {
    PLAIN: Method(),
    "dflash": Method("draft", {"draft_tree_budget": 0, **_OURS}, knobs=DRAFT),
    "dflash-tree": Method("draft", {"draft_tree_budget": 64, **_OURS}, knobs=DRAFT),
    "dflash-auto": Method("draft", {"draft_tree_budget": "auto"}, knobs=DRAFT),
    "native": Method("draft", {}, {"speculation_type": "dflash"}),
    "prompt-lookup": Method(None, {}, {"prompt_lookup_num_tokens": 10}, knobs=PROMPT_LOOKUP),
    "assistant": Method("assistant", knobs=ASSISTANT),
    "zlab": Method("zlab"),
}
DEFAULT = (PLAIN, "dflash", "dflash-tree", "dflash-auto", "native", "prompt-lookup", "assistant", "zlab")


def parse_methods(specs: Sequence[str] | None, has_draft: bool, has_assistant: bool) -> list[Method]:
    """Methods by name; without names all that can run here. Plain `generate` always runs, as what others are held to.

    Raises:
        ValueError: For an unknown name or knob, a knob's wrong value, or a method that lacks what it needs.
    """
    chosen = [parse_method(spec) for spec in specs or DEFAULT]
    missing = [_what_is_missing(method, has_draft, has_assistant) for method in chosen]
    if specs:
        for method, reason in zip(chosen, missing, strict=True):
            if reason is not None:
                raise ValueError(f"The method {method.name!r} needs {reason}.")
    kept = [method for method, reason in zip(chosen, missing, strict=True) if reason is None]
    if not any(method.name == PLAIN for method in kept):
        kept.insert(0, parse_method(PLAIN))
    names = [method.name for method in kept]
    if len(set(names)) < len(names):
        raise ValueError(f"--methods names one of {', '.join(sorted(names))} twice; give each once.")
    return kept


def say_what_is_left_out(has_draft: bool, has_assistant: bool) -> None:
    """A line on standard error for each default method that lacks what it needs."""
    for method in map(parse_method, DEFAULT):
        if (reason := _what_is_missing(method, has_draft, has_assistant)) is not None:
            print(f"Left out the method {method.name}: it needs {reason}.", file=sys.stderr)


def parse_method(spec: str, flag: str = "--methods") -> Method:
    """One method by its name and knobs; `flag` is where the user wrote them.

    Raises:
        ValueError: For an unknown name or knob, or a knob's wrong value.
    """
    name, _, settings = spec.partition(":")
    if name not in METHODS:
        raise ValueError(f"{flag} names {name!r}, which is none of {', '.join(METHODS)}; choose one of them.")
    base = METHODS[name]
    draft, generate = dict(base.draft_settings), dict(base.generate_settings)
    for setting in filter(None, settings.split(",")):
        key, is_set, text = setting.partition("=")
        if not is_set:
            raise ValueError(f"{flag} has {spec!r}, where {setting!r} is no KEY=VALUE.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        check_knob(flag, spec, base.knobs, key, value)
        # What drafting is steered by belongs to the draft; prompt lookup has none.
        (draft if base.assistant in ("draft", "assistant") else generate)[key] = value
    return Method(base.assistant, draft, generate, spec, base.knobs)


def _what_is_missing(method: Method, has_draft: bool, has_assistant: bool) -> str | None:
    if method.assistant in ("draft", "zlab") and not has_draft:
        return "a draft; name one with --draft"
    if method.assistant == "assistant" and not has_assistant:
        return "an ordinary assistant model; name one with --assistant"
    if method.assistant == "zlab" and importlib.util.find_spec("dflash") is None:
        return f"z-lab's package; run `pip install --no-deps {ZLAB_REQUIREMENT}`"
    return None


@dataclass
class Output:
    """New tokens, and the tokens that each round committed where the method says so."""

    tokens: list[int]
    rounds: list[int] | None = None


class Runner:
    """Runs methods on one pair.

    Args:
        pair: Target and draft.
        assistant: An ordinary assistant model, for the method of that name.
    """

    def __init__(self, pair: Pair, assistant: Any = None):
        self.pair = pair
        self.assistant = assistant
        self._zlab_draft: Any = None

    def watched(self, method: Method) -> dict[str, Any]:
        """The modules whose time is told apart, by name."""
        modules = {"target": self.pair.target}
        drafter = self.drafter(method)
        if drafter is not None:
            modules["draft"] = drafter
            head = self.pair.target.get_output_embeddings()
            if method.assistant != "assistant" and head is not None:
                modules["head"] = head
        return modules

    def drafter(self, method: Method) -> Any:
        """The model that drafts for a method; `None` where none does.

        Raises:
            ValueError: If z-lab's format cannot express the draft.
        """
        if method.assistant == "zlab":
            if self._zlab_draft is None:
                self._zlab_draft = zlab_draft(self.pair.draft, self.pair.target.config._name_or_path)
            return self._zlab_draft
        return {"draft": self.pair.draft, "assistant": self.assistant, None: None}[method.assistant]

    def run(self, method: Method, input_ids: Any, generation_config: Any, streamer: Any) -> Output:
        """Continue `input_ids` (1, S) under a generation config that has everything but the method's own knobs."""
        if method.assistant == "zlab":
            return self._run_zlab(input_ids, generation_config)
        import copy

        import torch

        config = copy.deepcopy(generation_config)
        config.return_dict_in_generate = True
        for key, value in method.generate_settings.items():
            setattr(config, key, value)
        drafter = self.drafter(method)
        with nullcontext() if drafter is None else knobs_set(drafter.generation_config, method.draft_settings):
            output = self.pair.target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                streamer=streamer,
                **({} if drafter is None else {"assistant_model": drafter}),
            )
        rounds = getattr(output, "acceptance_lengths", None)
        return Output(output.sequences[0, input_ids.shape[1] :].tolist(), rounds[0] if rounds else None)

    def _run_zlab(self, input_ids: Any, config: Any) -> Output:
        import torch
        from dflash import model as zlab

        stop = config.eos_token_id
        with torch.no_grad(), _timer_without_gpu(zlab):
            stats = zlab.dflash_generate(
                self.drafter(METHODS["zlab"]),
                self.pair.target,
                input_ids,
                config.max_new_tokens,
                [stop] if isinstance(stop, int) else stop,
                temperature=(config.temperature or 0.0) if config.do_sample else 0.0,
                top_p=(config.top_p or 1.0) if config.do_sample else 1.0,
                top_k=(config.top_k or 0) if config.do_sample else 0,
                return_stats=True,
            )
        return Output(stats.output_ids[0, input_ids.shape[1] :].tolist(), list(stats.acceptance_lengths))


@contextmanager
def knobs_set(generation_config: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Set attributes for the time of one call."""
    before = {key: getattr(generation_config, key, None) for key in settings}
    for key, value in settings.items():
        setattr(generation_config, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(generation_config, key, value)


@contextmanager
def _timer_without_gpu(zlab: Any) -> Iterator[None]:
    """z-lab's loop waits for CUDA before it looks at the clock; without a GPU it has nobody to wait for."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    original, zlab._cuda_time = zlab._cuda_time, time.perf_counter
    try:
        yield
    finally:
        zlab._cuda_time = original


def zlab_draft(draft: Any, target: str) -> Any:
    """The same weights in z-lab's own model class, in the same dtype and on the same device.

    Args:
        draft: Ours.
        target: Where its target was loaded from.

    Raises:
        ValueError: If their format cannot express the draft.
    """
    from dflash import model as zlab
    from safetensors.torch import save_file

    from ..checkpoints.exporting import export_draft

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}
    fields, tensors = export_draft(draft.config, tensors, "zlab", target)
    name = fields["architectures"][0]
    if not hasattr(zlab, name):
        raise ValueError(f"z-lab's package has no {name!r}; leave the method 'zlab' out, or update that package.")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model = getattr(zlab, name).from_pretrained(folder, dtype=draft.dtype, attn_implementation="sdpa")
    return model.to(draft.device).eval()


__all__ = ["METHODS", "PLAIN", "Method", "Output", "Runner", "knobs_set", "parse_method", "parse_methods"]
