"""The model card says what is known, nothing else, and keeps what people wrote."""

import dataclasses
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from dflash_hf.publishing.card import EARLIER, MARK, PLACEHOLDER, merge_cards, render_card, split_sections
from dflash_hf.publishing.facts import Facts
from dflash_hf.publishing.results import draw_plots, read_results

RECORD = {
    "schema": "dflash-hf/benchmark",
    "schema_version": 1,
    "date": "2026-11-29T23:00:00Z",
    "commit": "6d4661e",
    "dtype": "bfloat16",
    "hardware": {"cpu": "Some CPU", "cores": 2, "gpu": None},
    "versions": {"dflash_hf": "0.1.0", "transformers": "5.24.0", "torch": "2.13.0", "python": "3.11"},
    "settings": {"max_new_tokens": 128, "temperature": 0.0},
    "rows": [
        {
            "task": "gsm8k",
            "method": "plain",
            "tokens_per_second": 20.0,
            "speedup": 1.0,
            "correct": True,
            "samples": 10,
        },
        {
            "task": "gsm8k",
            "method": "dflash",
            "tokens_per_second": 31.04,
            "tokens_per_second_ci": [30.0, 32.0],
            "speedup": 1.55,
            "acceptance_length": 2.25,
            "acceptance_histogram": [1, 2, 1],
            "correct": True,
            "samples": 10,
        },
        {"task": "mt-bench", "method": "dflash", "speedup": 1.2, "acceptance_length": 1.9, "by_position": [0.7, 0.2]},
        {"task": "mt-bench", "method": "dflash-tree", "speedup": 9.9, "acceptance_length": 9.9, "correct": False},
        {"task": "gsm8k", "method": "prompt-lookup", "speedup": 1.7, "acceptance_length": 1.3},
    ],
}
TRAINING = {
    "datasets": ["org/prompts", {"name": "NQ-open", "license": "cc-by-sa-3.0", "rows": 20000}],
    "languages": ["en"],
    "thinking": "off",
    "max_length": 2048,
    "steps": 12345,
    "seed": 3,
    "commands": ["dflash-hf data ...", "dflash-hf train recipe.yaml"],
    "curve": [[1, 2.0], [2, 1.0]],
}


@pytest.fixture
def bare() -> Facts:
    """A draft of which nothing is known but what its own files say."""
    return Facts(
        name="Tiny-DFlash",
        base_model="org/Tiny",
        license="apache-2.0",
        block_size=8,
        mask_token_id=5,
        target_layer_ids=[1, 8, 14],
        num_layers=2,
        max_position_embeddings=8192,
        parameters=8_700_000,
        dtype="bfloat16",
        repo_id="me/Tiny-DFlash",
        revision="dflash-0123456789ab",
        weight_bytes=17_400_000,
        code_files=["configuration_dflash.py", "modeling_dflash.py"],
    )


@pytest.fixture
def full(bare: Facts) -> Facts:
    return dataclasses.replace(bare, training=TRAINING, results=read_results(RECORD, Path("benchmark.json")))


def sections(card: str) -> dict[str, str]:
    return dict(split_sections(ModelCard(card).text)[1])


# -- rendering ---------------------------------------------------------------------------------------------------


def test_metadata_does_not_offer_the_draft_as_a_language_model(full):
    data = ModelCard(render_card(full, {})).data.to_dict()
    assert "pipeline_tag" not in data
    assert data["inference"] is False
    assert data["base_model"] == "org/Tiny"
    assert data["library_name"] == "transformers"
    assert data["license"] == "apache-2.0"
    assert data["language"] == ["en"]
    assert data["datasets"] == ["org/prompts"]  # NQ-open is no name on the Hub
    assert {"dflash", "speculative-decoding", "draft-model", "block-diffusion", "custom_code"} == set(data["tags"])


def test_first_words_are_that_it_is_no_language_model(full):
    lines = [
        line for line in ModelCard(render_card(full, {})).text.splitlines() if line and not line.startswith("<!--")
    ]
    assert lines[0] == "# Tiny-DFlash"
    assert lines[1].startswith("**This is a drafter, not a language model.**")


def test_snippet_is_python_and_pins_the_revision(full):
    snippet = re.search(r"```python\n(.*?)```", render_card(full, {}), re.DOTALL)[1]
    compile(snippet, "snippet", "exec")
    assert '"me/Tiny-DFlash",\n    revision="dflash-0123456789ab",\n    trust_remote_code=True' in snippet


def test_snippet_of_a_staged_folder_without_a_repository_pins_nothing(bare):
    card = render_card(dataclasses.replace(bare, repo_id=None, revision=None), {})
    assert '"path/to/Tiny-DFlash",\n    trust_remote_code=True' in card
    assert 'revision="' not in card


def test_every_figure_of_the_results_is_in_the_record(full):
    results = sections(render_card(full, {}))["Results"]
    assert "| task | method | tokens/s | speed-up | acceptance length | prompts |" in results
    assert "| gsm8k | dflash | 31.0 (30.0 to 32.0) | 1.55x | 2.25 | 10 |" in results
    assert "| gsm8k | plain | 20.0 | 1.00x | - | 10 |" in results
    assert "| mt-bench | dflash | - | 1.20x | 1.90 | - |" in results
    assert "Measured 2026-11-29 on Some CPU (2 cores), bfloat16" in results
    assert "dflash_hf 0.1.0, transformers 5.24.0, torch 2.13.0, commit 6d4661e" in results
    assert "up to 128 new tokens, temperature 0.0" in results


def test_row_with_wrong_output_is_left_out_and_counted(full):
    card = render_card(full, {})
    assert "9.9" not in card
    assert "Left out: 1 rows" in card


def test_headline_speed_up_is_this_drafts_own(full):
    assert "| Measured speed-up | 1.20x to 1.55x, by task, on Some CPU (2 cores) |" in render_card(full, {})


def test_nothing_that_was_not_measured_or_recorded_is_on_the_card(bare):
    card = render_card(bare, {})
    names = sections(card)
    assert "Results" not in names
    assert "Training" not in names
    assert "Measured" not in card
    assert "1.00x" not in card
    assert "is not recorded" in names["Limits"]
    assert "Not measured for this card" in names["Limits"]
    assert "None" not in card


def test_training_section_states_data_settings_and_commands(full):
    training = sections(render_card(full, {}))["Training"]
    assert "- NQ-open, 20,000 rows (licence: cc-by-sa-3.0)\n" in training
    assert "| steps | 12,345 |" in training
    assert "| seed | 3 |" in training
    assert "dflash-hf data ...\ndflash-hf train recipe.yaml\n```" in training
    assert "curve" not in training


def test_limits_name_thinking_context_and_language(full):
    limits = sections(render_card(full, {}))["Limits"]
    assert "with thinking off" in limits
    assert "up to 2,048 tokens" in limits
    assert "Trained on en" in limits


def test_serving_commands_carry_the_drafts_own_numbers(full):
    serving = sections(render_card(full, {}))["Serving with vLLM and SGLang"]
    assert '"num_speculative_tokens": 7' in serving
    assert "dflash-hf convert me/Tiny-DFlash ./Tiny-DFlash-zlab --to zlab" in serving
    assert "--speculative-algorithm DFLASH" in serving


def test_security_section_lists_the_code_and_what_it_wraps(full):
    from dflash_hf.generation import _WRAPPERS

    security = sections(render_card(full, {}))["Code and security"]
    assert "`configuration_dflash.py`, `modeling_dflash.py`" in security
    assert f"wrap {len(_WRAPPERS)} methods" in security
    assert all(f"`{name}`" in security for name in _WRAPPERS)


def test_same_facts_give_the_same_card_and_plots(full, tmp_path):
    for name in ("a", "b"):
        figures = draw_plots(full.results, tmp_path / name)
        (tmp_path / name / "card").write_text(render_card(full, figures))
    assert set(figures) == {"acceptance_by_task.png", "acceptance_by_position.png"}
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert "![Acceptance length by task](figures/acceptance_by_task.png)" in (tmp_path / "a" / "card").read_text()


# -- the benchmark record ----------------------------------------------------------------------------------------


def test_acceptance_by_position_is_counted_from_the_histogram(full):
    # 4 rounds committed 1, 2, 2 and 3 tokens: 3 of 4 accepted the first proposal, 1 of 4 the second.
    assert full.results.by_position() == {"gsm8k, dflash": [0.75, 0.25], "mt-bench, dflash": [0.7, 0.2]}


def test_results_without_an_accepting_draft_draw_nothing(tmp_path):
    plain = {**RECORD, "rows": RECORD["rows"][:1]}
    assert draw_plots(read_results(plain, Path("x")), tmp_path / "figures") == {}
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hardware": None}, "does not state `hardware`"),
        ({"date": ""}, "does not state `date`"),
        ({"rows": []}, "has no `rows`"),
        ({"schema_version": 99}, "`schema_version` 99"),
        ({"schema": None}, "is not a benchmark record"),
    ],
)
def test_record_that_cannot_be_trusted_is_refused(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_results({**RECORD, **change}, Path("benchmark.json"))


# -- merging -----------------------------------------------------------------------------------------------------


def test_hand_written_sections_stay_where_they_stood(full, bare):
    old = render_card(bare, {})
    old = old.replace("## Limits\n", "## Our experience\n\nIt is *fine*.\n\n## Limits\n") + "\n## Thanks\n\nTo all.\n"
    merged = merge_cards(render_card(full, {}), old)
    names = list(sections(merged))
    assert names.index("Our experience") == names.index("Serving with vLLM and SGLang") + 1
    assert names[-1] == "Thanks"
    assert sections(merged)["Our experience"].strip() == "It is *fine*."
    assert "| gsm8k | dflash |" in merged


def test_merging_again_changes_nothing(full, bare):
    new = render_card(full, {})
    once = merge_cards(new, render_card(bare, {}) + "\n## Thanks\n\nTo all.\n")
    assert merge_cards(new, once) == once
    assert merge_cards(new, new) == new


def test_first_card_and_placeholder_give_the_new_card(full):
    new = render_card(full, {})
    assert merge_cards(new, None) == new
    assert merge_cards(new, f"---\ntags: [x]\n---\n# Model Card\n{PLACEHOLDER}\n## Uses\n") == new


def test_card_written_by_somebody_is_kept_whole(full):
    old = "---\nlicense: apache-2.0\n---\n\n# Mine\n\nBy me.\n\n## Limits\n\nMy limits.\n\n## More\n\nText.\n"
    new = render_card(full, {})
    merged = merge_cards(new, old)
    names = sections(merged)
    assert "By me." in names["Earlier card"]
    assert "My limits." in names["Limits" + EARLIER]
    assert "Text." in names["More"]
    assert names["Limits"] == sections(new)["Limits"]
    assert merge_cards(new, merged) == merged
    assert len(re.findall(r"(?m)^# ", re.sub(r"(?s)```.*?```", "", merged))) == 1


def test_metadata_of_the_old_card_is_kept_but_ours_wins(full):
    old = f"---\nlicense: mit\ntags: [mine, dflash]\npipeline_tag: text-generation\ndoi: 10/x\n---\n{MARK} -->\n# T\n"
    data = ModelCard(merge_cards(render_card(full, {}), old)).data.to_dict()
    assert data["license"] == "apache-2.0"
    assert data["tags"][-1] == "mine"
    assert data["tags"].count("dflash") == 1
    assert data["doi"] == "10/x"
    assert "pipeline_tag" not in data


def test_heading_inside_a_code_fence_is_no_section():
    text = "intro\n## One\n```sh\n## not a section\n```\n~~~\n## nor this\n```\n~~~\n## Two\nend\n"
    intro, found = split_sections(text)
    assert intro == "intro\n"
    assert [heading for heading, _ in found] == ["One", "Two"]
    assert "## not a section" in found[0][1]
