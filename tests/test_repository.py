"""Every save of a draft is a repository that loads alone, from the package's class and from a remote class alike."""

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_imports

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.generation.repository import AUTO_MAP, code_files
from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from helpers import greedy, random_prompt, tiny_draft, tiny_target
from hub_server import HubServer

PACKAGE = Path(__file__).resolve().parent.parent / "dflash_hf"


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def draft(target):
    return tiny_draft(target)


def remote(folder: Path):
    """The draft of a folder, loaded with the folder's own code."""
    remote_class = get_class_from_dynamic_module(AUTO_MAP["AutoModel"], str(folder))
    assert remote_class.__module__.startswith("transformers_modules.")
    return remote_class.from_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same_tensors(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- saving ------------------------------------------------------------------------------------------------------


def test_save_writes_weights_config_settings_and_code(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    others = {"config.json", "generation_config.json", "model.safetensors"}
    assert set(contents(tmp_path / "a")) == set(code_files()) | others
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert config["model_type"] == "dflash"


def test_code_is_copied_byte_for_byte_and_flat(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    saved = contents(tmp_path / "a")
    assert saved["generation.py"] == (PACKAGE / "generation" / "__init__.py").read_bytes()
    assert saved["drafting.py"] == (PACKAGE / "generation" / "drafting.py").read_bytes()
    for name in ("configuration_dflash.py", "modeling_dflash.py"):
        assert saved[name] == (PACKAGE / name).read_bytes()


def test_every_module_of_generation_travels():
    modules = {path.name for path in (PACKAGE / "generation").glob("*.py")} - {"__init__.py"} | {"generation.py"}
    assert modules <= set(code_files())


def test_saved_again_and_again_by_either_class_the_folder_stays_the_same(draft, tmp_path):
    draft.generation_config.num_assistant_tokens = 2
    draft.save_pretrained(tmp_path / "a")
    remote(tmp_path / "a").save_pretrained(tmp_path / "b")
    remote(tmp_path / "b").save_pretrained(tmp_path / "c")
    Qwen3DFlashForDraft.from_pretrained(tmp_path / "c").save_pretrained(tmp_path / "c")
    last = remote(tmp_path / "c")
    last.save_pretrained(tmp_path / "c")
    first = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == first
    assert contents(tmp_path / "c") == first
    assert last.generation_config.num_assistant_tokens == 2
    assert same_tensors(draft, last)


def test_drafts_of_both_classes_generate_the_targets_own_tokens(target, draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    prompt = random_prompt(6)
    plain = greedy(target, prompt, 20)
    for candidate in (draft, remote(tmp_path / "a")):
        assert torch.equal(greedy(target, prompt, 20, assistant_model=candidate), plain)


def test_registering_for_an_auto_class_changes_nothing(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    Qwen3DFlashForDraft.register_for_auto_class("AutoModel")
    draft.save_pretrained(tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_auto_map_that_points_to_another_repository_is_not_kept(draft, tmp_path):
    draft.config.auto_map = {"AutoModel": "someone/code--modeling_dflash.Qwen3DFlashForDraft", "": "config.X"}
    draft.save_pretrained(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_attached_target_is_not_saved(draft, tmp_path):
    tied = tiny_target(dtype=torch.float32, tie_word_embeddings=True)
    draft.save_pretrained(tmp_path / "a")
    draft.target = tied
    draft.lm_head = tied.lm_head
    draft.save_pretrained(tmp_path / "b")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert not [name for name in tensors if "embed" in name or "lm_head" in name]
    del draft.target, draft.lm_head
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in draft.parameters())
    assert same_tensors(remote(tmp_path / "b"), draft)


def test_sharded_save_over_a_whole_one_and_back_loads_what_was_saved_last(target, tmp_path):
    first, second = tiny_draft(target, seed=1), tiny_draft(target, seed=2)
    first.save_pretrained(tmp_path / "a")
    second.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("model-*-of-*.safetensors"))) > 1
    assert (tmp_path / "a" / "model.safetensors.index.json").is_file()
    assert same_tensors(Qwen3DFlashForDraft.from_pretrained(tmp_path / "a"), second)
    first.save_pretrained(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").glob("model*.s*")] == ["model.safetensors"]
    assert same_tensors(Qwen3DFlashForDraft.from_pretrained(tmp_path / "a"), first)


def test_other_process_of_a_distributed_run_writes_nothing(draft, tmp_path):
    (tmp_path / "a").mkdir()
    draft.save_pretrained(tmp_path / "a", is_main_process=False)
    assert contents(tmp_path / "a") == {}


def test_missing_module_is_named_and_not_left_out(draft, tmp_path):
    draft.save_pretrained(tmp_path / "incomplete")
    loaded = remote(tmp_path / "incomplete")
    code = Path(sys.modules[type(loaded).__module__].__file__)
    code.with_name("configuration_dflash.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"configuration_dflash\.py is missing"):
        loaded.save_pretrained(tmp_path / "b")


# -- loading -----------------------------------------------------------------------------------------------------


def test_generation_settings_beside_the_weights_are_read(draft, tmp_path):
    draft.generation_config.num_assistant_tokens = 1
    draft.generation_config.draft_tree_budget = 5
    draft.save_pretrained(tmp_path / "a")
    for loaded in (AutoModel.from_pretrained(tmp_path / "a"), remote(tmp_path / "a")):
        assert loaded.generation_config.num_assistant_tokens == 1
        assert loaded.generation_config.draft_tree_budget == 5
    (tmp_path / "a" / "generation_config.json").unlink()
    assert AutoModel.from_pretrained(tmp_path / "a").generation_config.num_assistant_tokens == 3


def test_good_repository_loads_without_a_remark(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    _, info = AutoModel.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "fc.weight"),
        (lambda tensors: tensors.update({"layers.0.conv.weight": torch.ones(3)}), "layers.0.conv.weight"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(5)}), "norm.weight"),
    ],
    ids=["missing", "unexpected", "another shape"],
)
def test_tensor_that_does_not_fit_is_refused_with_its_name(draft, tmp_path, change, tensor):
    draft.save_pretrained(tmp_path / "a")
    change_weights(tmp_path / "a", change)
    for load in (AutoModel.from_pretrained, remote):
        with pytest.raises(ValueError, match=tensor.replace(".", r"\.")) as caught:
            load(tmp_path / "a")
        assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_opened(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    torch.save(draft.state_dict(), tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        Qwen3DFlashForDraft.from_pretrained(tmp_path / "a")


def test_config_class_survives_every_way_of_loading(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    assert type(AutoConfig.from_pretrained(tmp_path / "a")) is DFlashConfig
    loaded = AutoModel.from_pretrained(tmp_path / "a")
    assert type(loaded).config_class is type(loaded.config) is DFlashConfig
    other = remote(tmp_path / "a")
    assert type(other).config_class is type(other.config)
    assert type(other.config).__module__.startswith("transformers_modules.")


class Derived(Qwen3DFlashForDraft):
    """A user's own draft class."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = 0


def test_every_model_class_has_been_through_post_init(target, tmp_path):
    derived = tiny_draft(target, draft_class=Derived)
    derived.save_pretrained(tmp_path / "a")
    for model in (derived, Derived.from_pretrained(tmp_path / "a"), remote(tmp_path / "a")):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                assert module.all_tied_weights_keys == {}
                assert not module._tied_weights_keys


# -- the code that travels ---------------------------------------------------------------------------------------


def test_flat_code_imports_only_siblings_that_are_there(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    files = list((tmp_path / "a").glob("*.py"))
    imported = {name for path in files for name in get_relative_imports(path)}
    assert imported <= {path.stem for path in files}
    assert {path.stem for path in files} - imported == {"modeling_dflash"}


def test_modules_three_imports_deep_are_found(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    folder = tmp_path / "a"
    (folder / "second.py").write_text("from .third import VALUE\n")
    (folder / "third.py").write_text("VALUE = 3\n")
    code = folder / "generation.py"
    code.write_text(code.read_text().replace("from .protocol", "from .second import VALUE\nfrom .protocol", 1))
    loaded = remote(folder)
    loaded.save_pretrained(tmp_path / "b")
    assert contents(tmp_path / "b") == contents(folder)


def test_custom_generate_of_the_users_gets_the_draft(target, draft, tmp_path):
    folder = tmp_path / "custom" / "custom_generate"
    folder.mkdir(parents=True)
    (folder / "generate.py").write_text("def generate(model, **kwargs):\n    return kwargs\n")
    arguments = {"assistant_model": draft, "custom_generate": str(folder.parent), "max_new_tokens": 3}
    with pytest.raises((ValueError, OSError), match="trust_remote_code"):
        target.generate(random_prompt(4), trust_remote_code=False, **arguments)
    seen = target.generate(random_prompt(4), trust_remote_code=True, **arguments)
    assert seen["assistant_model"] is draft
    assert seen["max_new_tokens"] == 3


# -- pushing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", server.WRITE)
        yield server


def pushed(hub: HubServer) -> dict[str, bytes]:
    files = dict(hub.repositories["org/draft"].files())
    del files[".gitattributes"]
    return files


def push(draft, tmp_path) -> None:
    draft.push_to_hub("org/draft")


def save_and_push(draft, tmp_path) -> None:
    draft.save_pretrained(tmp_path / "draft", push_to_hub=True, repo_id="org/draft")


@pytest.mark.parametrize("way", [push, save_and_push], ids=["push_to_hub", "save_pretrained"])
@pytest.mark.parametrize("kind", ["package", "remote"])
def test_pushed_repository_is_the_saved_folder_with_a_card(hub, draft, tmp_path, way, kind):
    draft.save_pretrained(tmp_path / "a")
    way(draft if kind == "package" else remote(tmp_path / "a"), tmp_path)
    files = pushed(hub)
    card = files.pop("README.md").decode()
    assert files == contents(tmp_path / "a")
    assert "This is a drafter, not a language model" in card
    assert "More Information Needed" not in card
    assert huggingface_hub.ModelCard(card).data.tags[0] == "dflash"


def test_pushing_leaves_a_card_that_somebody_wrote(hub, draft, tmp_path):
    hub.add_repository("org/draft", {"README.md": b"---\nlicense: mit\n---\n# Mine\n"})
    draft.push_to_hub("org/draft")
    assert b"# Mine" in pushed(hub)["README.md"]


def test_saving_a_copy_elsewhere_needs_nothing_of_the_first_folder(draft, tmp_path):
    draft.save_pretrained(tmp_path / "a")
    loaded = remote(tmp_path / "a")
    expected = contents(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    assert contents(tmp_path / "b") == expected
