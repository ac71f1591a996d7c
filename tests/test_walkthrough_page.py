"""The walkthrough shows what `dflash-hf explain` says today, but for probabilities, which differ between machines."""

from __future__ import annotations

import re

import pytest

from walkthrough_page import PAGE, ROUNDS, explain, filled, sections


def stable(text: str) -> str:
    """Without probabilities and column widths; the default draft may lie elsewhere, but has its name."""
    return re.sub(r" +", " ", re.sub(r"\d+%", "%", text)).replace(" \n", "\n")


def test_filling_the_page_puts_every_part_in_its_place() -> None:
    page = "a\n<!-- explain: one -->\nold\n<!-- end -->\nb\n<!-- explain: two -->\n<!-- end -->\n"
    parts = {"one": "x\ny", "two": "z"}
    assert sections(filled(page, parts)) == parts
    assert filled(filled(page, parts), parts) == filled(page, parts)
    assert filled(page, parts).startswith("a\n<!-- explain: one -->\n```text\nx\ny\n```\n<!-- end -->\nb\n")


def test_page_has_all_parts_in_order() -> None:
    assert list(sections(PAGE.read_text())) == ["models", "prefill", *(f"round {n + 1}" for n in range(ROUNDS))]


@pytest.mark.real
def test_page_shows_what_explain_says_today() -> None:
    from dflash_hf.embedded import default_draft_path

    try:
        default_draft_path()
    except ValueError as error:
        pytest.skip(str(error))
    shown = sections(PAGE.read_text())
    today = explain()
    for part in shown:
        assert stable(shown[part]) == stable(today[part]), "run `python tests/walkthrough_page.py`"
