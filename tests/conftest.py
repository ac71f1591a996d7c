"""Fixtures that several test files share. The models themselves are made in `helpers.py`."""

from __future__ import annotations

import os
import tempfile
from typing import Any, NamedTuple

# Read at import; tests fork and start processes, and two test processes must not share the code they load.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="dflash-hf-modules-")

import pytest
import torch
from hypothesis import settings

from helpers import FAMILIES, SHARED_DRAFT, tiny_draft, tiny_target

# `pytest --hypothesis-profile explore` draws new cases every time; the suite draws the same ones.
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("suite")

torch.set_num_threads(1)  # tiny models, and two test processes on two cores


class Pair(NamedTuple):
    """A target, its tokenizer, and a draft for it."""

    target: Any
    tokenizer: Any
    draft: Any


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the real pair, so that `-m "not real"` needs no discipline."""
    for item in items:
        if {"real_pair", "embedded_target"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("real")


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every target family in turn."""
    return request.param


@pytest.fixture
def target(family: str) -> Any:
    """A tiny float64 target of every family in turn."""
    return tiny_target(family)


@pytest.fixture
def qwen3() -> Any:
    """A tiny float64 Qwen3 target, for tests that the family does not matter to."""
    return tiny_target("qwen3")


@pytest.fixture
def qwen3_draft(qwen3: Any) -> Any:
    """A random draft for the `qwen3` fixture."""
    return tiny_draft(qwen3)


@pytest.fixture(scope="session")
def embedded_target() -> tuple[Any, Any]:
    """The embedded SmolLM2 and its tokenizer, float32. Shared by all tests: do not change it."""
    from dflash_hf.embedded import load_embedded_target

    return load_embedded_target(dtype="float32")


@pytest.fixture(scope="session")
def real_pair(embedded_target: tuple[Any, Any]) -> Pair:
    """The embedded target with a trained draft that drafts chains, float32. Shared by all tests: do not change it.

    The draft is the test data's, which is smaller, or else the repository's own.
    """
    from dflash_hf.embedded import default_draft_path
    from dflash_hf.modeling_dflash import Qwen3DFlashForDraft

    folder = SHARED_DRAFT if SHARED_DRAFT.is_dir() else default_draft_path()
    draft = Qwen3DFlashForDraft.from_pretrained(folder, dtype=torch.float32).eval()
    draft.generation_config.draft_tree_budget = 0
    return Pair(*embedded_target, draft)
