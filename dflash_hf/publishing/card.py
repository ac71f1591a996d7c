"""The model card: rendered from a template and a draft's facts; what people wrote into an earlier card stays.

Sections are the card's second-level headings. Those that the template knows are rendered anew each time; every other
section of an earlier card is kept where it stood.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .facts import Facts

CARD_FILE = "README.md"
FIGURES_FOLDER = "figures"
TEMPLATE = Path(__file__).parent / "card.md.jinja"
TAGS = ["dflash", "speculative-decoding", "draft-model", "block-diffusion", "custom_code"]
MARK = "<!-- Rendered by dflash-hf."
# What `push_to_hub` of Transformers writes where there is no card: nobody's words.
PLACEHOLDER = "<!-- Provide a quick summary of what the model is/does. -->"
EARLIER = " (earlier card)"


def render_card(facts: Facts, figures: dict[str, str]) -> str:
    """The card of a draft, metadata included. `figures`: file name in the figures folder -> what it shows."""
    from huggingface_hub import ModelCard

    card = ModelCard.from_template(
        card_metadata(facts),
        template_path=str(TEMPLATE),
        facts=facts,
        figures={f"{FIGURES_FOLDER}/{name}": caption for name, caption in figures.items()},
        training_rows=training_rows(facts.training),
        hooked_methods=hooked_methods(),
        mark=MARK,
    )
    return str(card).rstrip("\n") + "\n"


def card_metadata(facts: Facts) -> Any:
    """The YAML head. No `pipeline_tag`: it would offer the draft as a language model, which it is not."""
    from huggingface_hub import ModelCardData

    return ModelCardData(
        base_model=facts.base_model,
        library_name="transformers",
        license=facts.license,
        language=facts.languages or None,
        tags=list(TAGS),
        datasets=[entry["name"] for entry in facts.datasets if is_hub_name(entry["name"])] or None,
        inference=False,
    )


def is_hub_name(name: str) -> bool:
    """Whether a name is of the form `owner/repository`, as opposed to a folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def hooked_methods() -> list[str]:
    """The methods of Transformers that loading the draft wraps, asked of the code itself."""
    from dflash_hf.generation import _WRAPPERS

    return list(_WRAPPERS)


def training_rows(training: dict[str, Any]) -> list[tuple[str, str]]:
    """The plain values of the training record that have no place of their own in the card."""
    placed = {"target", "license", "languages", "datasets", "thinking", "commands"}
    plain = ((key, value) for key, value in training.items() if key not in placed)
    return [(key.replace("_", " "), _text(value)) for key, value in plain if isinstance(value, (str, int, float))]


def _text(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def merge_cards(new: str, old: str | None) -> str:
    """`new`, with the sections and the metadata that people added to `old`.

    A card that this module did not render is kept whole below the new one; where a heading of its collides with one of
    the new card's, it is marked as the earlier card's.
    """
    from huggingface_hub import ModelCard

    if old is None or PLACEHOLDER in old:
        return new
    fresh, former = ModelCard(new), ModelCard(old, ignore_metadata_errors=True)
    intro, sections = split_sections(fresh.text)
    former_intro, former_sections = split_sections(former.text)
    rendered = {heading for heading, _ in sections}
    if MARK not in old:
        former_sections = [(name + EARLIER if name in rendered else name, body) for name, body in former_sections]
        if former_intro.strip():
            former_sections.insert(0, ("Earlier card", demote_titles(former_intro)))
    merged = _insert_kept(sections, former_sections, rendered)
    fresh.data = _merge_metadata(fresh.data, former.data)
    body = intro + "".join(f"## {heading}\n{text}" for heading, text in merged)
    return f"---\n{fresh.data.to_yaml()}\n---\n{body}".rstrip("\n") + "\n"


def _insert_kept(
    sections: list[tuple[str, str]], former: list[tuple[str, str]], rendered: set[str]
) -> list[tuple[str, str]]:
    """Put each hand-written section behind the section it followed before, or at the end."""
    merged = list(sections)
    previous: str | None = None
    for heading, body in former:
        if heading not in rendered:
            names = [name for name, _ in merged]
            place = names.index(previous) + 1 if previous in names else len(merged)
            merged.insert(place, (heading, body.rstrip("\n") + "\n\n"))
        previous = heading
    return [(heading, body.rstrip("\n") + "\n\n") for heading, body in merged]


def _merge_metadata(fresh: Any, former: Any) -> Any:
    """The new metadata, plus keys and list entries that only the old one has, but never `pipeline_tag`."""
    from huggingface_hub import ModelCardData

    merged = {key: value for key, value in former.to_dict().items() if key != "pipeline_tag"}
    for key, value in fresh.to_dict().items():
        known = merged.get(key)
        if key in ("tags", "datasets", "language") and known:
            listed = known if isinstance(known, list) else [known]
            value = [*value, *(entry for entry in listed if entry not in value)]
        merged[key] = value
    return ModelCardData(
        **{key: value for key, value in merged.items() if value is not None}, ignore_metadata_errors=True
    )


def split_sections(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text before the first second-level heading, and (heading, body) of each. Code fences hide headings."""
    intro: list[str] = []
    sections: list[tuple[str, list[str]]] = []
    fence = None
    for line in text.splitlines(keepends=True):
        marker = re.match(r"\s*(```+|~~~+)", line)
        if marker:
            fence = None if fence and marker[1].startswith(fence) else fence or marker[1]
        if fence is None and line.startswith("## "):
            sections.append((line[3:].strip(), []))
        else:
            (sections[-1][1] if sections else intro).append(line)
    return "".join(intro), [(heading, "".join(body)) for heading, body in sections]


def demote_titles(text: str) -> str:
    """First-level headings as third-level ones: a card has one title."""
    return "\n" + re.sub(r"(?m)^# ", "### ", text.strip()) + "\n"
