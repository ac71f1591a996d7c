"""Targets in every dress: quantised, offloaded, wrapped, compiled, of another dtype. No weight of theirs is read."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dflash_hf.generation import decoding, drafting
from dflash_hf.generation.drafting import Drafter
from dflash_hf.generation.target_runner import tapped_states
from helpers import greedy, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft

NEW_TOKENS = 14


def assert_generates_its_own_tokens(target: Any, draft: Any, prompt: torch.Tensor) -> list[int]:
    """The tokens with the draft are those without; returns the acceptance lengths."""
    expected = greedy(target, prompt, NEW_TOKENS)
    output = target.generate(
        input_ids=prompt,
        assistant_model=draft,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    return output.acceptance_lengths[0]


def test_layers_of_several_streams_are_refused_in_a_sentence() -> None:
    """DeepSeek-V4's layers hand on four states per token; no published draft says which it reads."""
    target = tiny_target()
    states = (torch.zeros(1, 2, 32), *[torch.zeros(1, 2, 4, 32)] * 4)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM put out several.*\(1, 2, 4, 32\).*one hidden state"):
        tapped_states(target, SimpleNamespace(hidden_states=states), [1, 3])


@pytest.fixture
def prompt() -> torch.Tensor:
    return random_prompt(9)


# ---------------------------------------------------------------- quantised


class PackedLinear(nn.Module):
    """A stand-in for GPTQ's and AWQ's modules: packed integers, scales, and no `weight`."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 7
        levels = (linear.weight.detach() / scales).round().clamp(-8, 7).to(torch.int32) + 8
        self.register_buffer("qweight", levels[:, ::2] | (levels[:, 1::2] << 4))
        self.register_buffer("scales", scales)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        levels = torch.stack([self.qweight & 15, self.qweight >> 4], dim=-1).flatten(1) - 8
        return states @ (levels * self.scales).to(states.dtype).T


class PackedEmbedding(nn.Module):
    """A quantised embedding: rows are unpacked when they are looked up."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        table = embedding.weight.detach()
        self.register_buffer("scales", table.abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("rows", (table / self.scales).round().to(torch.int8))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.rows[token_ids] * self.scales[token_ids]


def packed(target: Any) -> Any:
    """Every linear layer and the embedding packed: nothing but norms has a `weight`."""
    for module in list(target.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
            elif isinstance(child, nn.Embedding):
                setattr(module, name, PackedEmbedding(child))
    return target


def test_target_of_packed_modules_without_weights(prompt: torch.Tensor) -> None:
    target = packed(tiny_target("qwen3", dtype=torch.float32))
    assert not any("weight" in name and "norm" not in name for name, _ in target.named_parameters())
    lengths = assert_generates_its_own_tokens(target, oracle_draft(target, prompt, NEW_TOKENS, depth=2), prompt)
    assert max(lengths) == 3


def test_target_quantised_by_torchao(prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(sys.prefix) / "torchao")  # where the Makefile puts it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
        target = tiny_target("qwen3", dtype=torch.float32)
        quantization.quantize_(target, quantization.Int8WeightOnlyConfig())
    assert type(target.lm_head.weight).__module__.startswith("torchao")
    lengths = assert_generates_its_own_tokens(target, oracle_draft(target, prompt, NEW_TOKENS, depth=2), prompt)
    assert max(lengths) == 3


# ---------------------------------------------------------------- dtypes


@torch.no_grad()
@pytest.mark.parametrize(
    ("target_dtype", "draft_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_states_are_cast_where_they_pass_between_draft_and_target(
    prompt: torch.Tensor, target_dtype: torch.dtype, draft_dtype: torch.dtype
) -> None:
    target = tiny_target("qwen3", dtype=target_dtype)
    draft = tiny_draft(target, dtype=draft_dtype)
    hidden_states = target(prompt[:, :-1], output_hidden_states=True).hidden_states
    taps = torch.cat([hidden_states[tap + 1] for tap in draft.config.target_layer_ids], dim=-1)
    drafter = Drafter(draft, target.get_input_embeddings(), target.get_output_embeddings())
    drafter.begin(1, 0)
    drafter.observe(taps, [taps.shape[1]])
    logits = drafter.block_logits(prompt[:, -1:], 4)
    block = torch.full((1, 4), draft.config.mask_token_id)
    block[:, 0] = prompt[:, -1]
    embeds = target.get_input_embeddings()(block).to(draft_dtype)
    states = draft(embeds, taps.to(draft_dtype)).last_hidden_state
    assert states.dtype == draft_dtype
    torch.testing.assert_close(logits, target.lm_head(states[:, 1:].to(target_dtype)))


@pytest.mark.parametrize("draft_dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_draft_of_another_dtype_generates(prompt: torch.Tensor, draft_dtype: torch.dtype, do_sample: bool) -> None:
    target = tiny_target("qwen3", dtype=torch.float32)
    draft = tiny_draft(target, dtype=draft_dtype)
    if do_sample:
        output = target.generate(prompt, assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=True)
        assert output.shape[1] == prompt.shape[1] + NEW_TOKENS
    else:
        assert_generates_its_own_tokens(target, draft, prompt)


@pytest.mark.parametrize("parts", [{"own_head": True, "own_embedding": True}, {"markov_rank": 4}], ids=str)
def test_draft_with_parts_of_its_own_in_another_dtype(prompt: torch.Tensor, parts: dict[str, Any]) -> None:
    target = tiny_target("qwen3", dtype=torch.float32)
    draft = tiny_draft(target, dtype=torch.bfloat16, **parts)
    assert_generates_its_own_tokens(target, draft, prompt)


@pytest.mark.parametrize("overflows", [False, True], ids=["large target", "large draft"])
def test_draft_that_overflows_half_precision_is_warned_about(
    prompt: torch.Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, overflows: bool
) -> None:
    """Large states of the target are scaled to fit; a draft whose own do not fit says so, and stays lossless."""
    target = tiny_target("qwen3", dtype=torch.float32)
    draft = tiny_draft(target, dtype=torch.float16)
    with torch.no_grad():
        (draft if overflows else target.model).layers[0].mlp.down_proj.weight.mul_(2e4 if overflows else 1e8)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(drafting.logger, "propagate", True)
    drafting.logger.warning_once.cache_clear()  # another test's draft may have overflowed, too
    assert_generates_its_own_tokens(target, draft, prompt)
    target.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=True)
    assert ("overflowed float16" in caplog.text) == overflows
    assert ("torch.bfloat16" in caplog.text) == overflows


# ---------------------------------------------------------------- placement


def test_target_offloaded_to_disk(prompt: torch.Tensor, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    target = tiny_target("qwen3", dtype=torch.float32)
    draft = oracle_draft(target, prompt, NEW_TOKENS, depth=2)
    accelerate.disk_offload(target, tmp_path, execution_device=torch.device("cpu"))
    assert target.lm_head.weight.device.type == target.model.embed_tokens.weight.device.type == "meta"
    lengths = assert_generates_its_own_tokens(target, draft, prompt)
    assert max(lengths) == 3


def test_target_spread_by_a_device_map(prompt: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    plain = tiny_target("qwen3", dtype=torch.float32)
    draft = oracle_draft(plain, prompt, NEW_TOKENS, depth=2)
    plain.save_pretrained(tmp_path / "target")
    parts = ("embed_tokens", "rotary_emb", "layers.0", "layers.1")
    device_map = {f"model.{part}": "cpu" for part in parts} | {
        f"model.{part}": "disk" for part in ("layers.2", "layers.3", "norm")
    }
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target",
        device_map=device_map | {"lm_head": "disk"},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    )
    assert target.lm_head.weight.device.type == "meta"
    lengths = assert_generates_its_own_tokens(target, draft, prompt)
    assert max(lengths) == 3


# ---------------------------------------------------------------- wrapped


def test_target_wrapped_by_peft(prompt: torch.Tensor) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = peft.get_peft_model(tiny_target("qwen3", dtype=torch.float32), adapter)
    plain = target.get_base_model()
    draft = oracle_draft(plain, prompt, NEW_TOKENS, depth=2)
    assert max(assert_generates_its_own_tokens(target, draft, prompt)) == 3


@pytest.fixture
def undrafted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """The log, with the warning of calls that are not drafted."""
    decoding.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(decoding.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        yield caplog


def test_adapters_named_row_by_row_are_generated_with_but_not_drafted_for(undrafted) -> None:
    peft = pytest.importorskip("peft")
    adapters = [peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False) for _ in range(2)]
    target = peft.get_peft_model(tiny_target("qwen3", dtype=torch.float32), adapters[0], adapter_name="one")
    target.add_adapter("two", adapters[1])
    target.eval()
    draft = tiny_draft(target.get_base_model())
    prompts, names = random_prompt(5, batch_size=2), ["two", "one"]
    kwargs: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    text = target.generate(prompts, adapter_names=names, **kwargs)
    kwargs |= {"eos_token_id": int(text[0, 7]), "pad_token_id": 0}  # one row stops early, and would leave
    expected = target.generate(prompts, adapter_names=names, **kwargs)
    assert torch.equal(
        target.generate(prompts[:1], adapter_names=["two"], assistant_model=draft, **kwargs)[0], expected[0, :8]
    )
    assert "without the draft" not in undrafted.text
    assert torch.equal(target.generate(prompts, adapter_names=names, assistant_model=draft, **kwargs), expected)
    assert "`adapter_names` names an adapter for every row" in undrafted.text


def test_activated_lora_is_generated_with_but_not_drafted_for(undrafted) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        alora_invocation_tokens=[3, 4],
        task_type="CAUSAL_LM",
    )
    target = peft.get_peft_model(tiny_target("qwen3", dtype=torch.float32), adapter)
    prompt = torch.cat([random_prompt(5), torch.tensor([[3, 4, 7]])], dim=1)
    draft = tiny_draft(target.get_base_model())
    kwargs: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = target.generate(input_ids=prompt, **kwargs)
    assert torch.equal(target.generate(input_ids=prompt, assistant_model=draft, **kwargs), expected)
    assert "`alora_offsets`" in undrafted.text


@pytest.fixture
def eager_backend() -> Iterator[str]:
    """Dynamo's graph capture without a compiler: what matters here is that the call goes through the wrapper."""
    yield "eager"
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_target(eager_backend: str) -> None:
    prompt = random_prompt(5)
    target = tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=2)
    draft = oracle_draft(target, prompt, 6, depth=2, target_layer_ids=(0, 1))
    expected = greedy(target, prompt, 6)
    target.forward = torch.compile(target.forward, backend=eager_backend, dynamic=True)
    for compiled in (target, torch.compile(target, backend=eager_backend, dynamic=True)):
        output = compiled.generate(
            prompt, assistant_model=draft, max_new_tokens=6, do_sample=False, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, expected)
        assert output.acceptance_lengths == [[3, 2]]
