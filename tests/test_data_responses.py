"""Local batched answers are what plain `generate` gives row by row; how an answer is cut; how a batch fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_helpers import EOS, chat_target, plain_answer
from dflash_hf.training.prompts import Failure, Prompt
from dflash_hf.training.responses import LocalResponder, Response, Sampling, finish, loop_start
from evaluation_helpers import tiny_tokenizer
from helpers import tiny_target

PLAIN = Sampling(max_new_tokens=24, loop_repeats=0)


def prompts(number: int = 9) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + (5 * i) % 11 for i in range(number)]
    return [Prompt(i, [], torch.randint(8, 60, (n,), generator=generator).tolist()) for i, n in enumerate(lengths)]


def cut_at_eos(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


@pytest.mark.parametrize(
    ("family", "segment"), [("llama", 1), ("llama", 5), ("llama", 24), ("mistral", 5), ("gemma3", 5), ("gpt2", 5)]
)
def test_answers_are_those_of_generate_row_by_row(family: str, segment: int) -> None:
    target = tiny_target(family)
    target.generation_config.eos_token_id = EOS
    responder = LocalResponder(target, tiny_tokenizer(), PLAIN, batch_size=4, segment=segment)
    answers = responder.answer(prompts(), seed=0)
    expected = [cut_at_eos(plain_answer(target, prompt.token_ids, 24)) for prompt in prompts()]
    # An answer that is empty but for its end is set aside.
    assert [answer.token_ids if isinstance(answer, Response) else [EOS] for answer in answers] == expected


def test_some_rows_of_the_llama_leave_early_and_some_do_not() -> None:
    # Else the test above would say nothing about rows that leave a batch.
    lengths = {len(cut_at_eos(plain_answer(chat_target(), prompt.token_ids, 24))) for prompt in prompts()}
    assert 24 in lengths and min(lengths) < 24


def test_target_with_recurrent_states_answers_in_one_piece() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    target = transformers.MambaForCausalLM(config).double().eval()
    target.generation_config.eos_token_id = EOS
    responder = LocalResponder(target, tiny_tokenizer(), PLAIN, batch_size=1, segment=5)
    assert responder.segment == PLAIN.max_new_tokens
    (answer,) = responder.answer(prompts()[:1], seed=0)
    assert isinstance(answer, Response)
    assert answer.token_ids == cut_at_eos(plain_answer(target, prompts()[0].token_ids, 24))


def test_sampled_answers_repeat_with_the_seed_and_change_with_it() -> None:
    sampling = Sampling(max_new_tokens=24, temperature=1.0, loop_repeats=0)
    responder = LocalResponder(chat_target(), tiny_tokenizer(), sampling, batch_size=4)
    runs = [[a.token_ids for a in responder.answer(prompts(), seed=s) if isinstance(a, Response)] for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_top_k_is_not_taken_from_a_default() -> None:
    # Transformers' own default of top_k=50 would bend the distribution that the manifest promises.
    sampling = Sampling(max_new_tokens=1, temperature=100.0, loop_repeats=0)
    target = chat_target()
    target.generation_config.eos_token_id = None
    responder = LocalResponder(target, tiny_tokenizer(), sampling, batch_size=400)
    many = [Prompt(i, [], [9, 10]) for i in range(800)]
    seen = {a.token_ids[0] for a in responder.answer(many, seed=0) if isinstance(a, Response)}
    assert len(seen) > 55  # of 64 about equally likely tokens


def test_row_that_breaks_its_batch_is_set_aside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chat_target()
    rows = prompts()
    whole = target.generate

    def generate(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if any(rows[4].token_ids == row[-len(rows[4].token_ids) :] for row in ids.tolist()):
            raise RuntimeError("out of memory")
        return whole(ids, **kwargs)

    expected = LocalResponder(target, tiny_tokenizer(), PLAIN, batch_size=9).answer(rows, seed=0)
    monkeypatch.setattr(target, "generate", generate)
    progress: list[tuple[int, int]] = []
    responder = LocalResponder(
        target, tiny_tokenizer(), PLAIN, batch_size=9, progress=lambda rows, tokens: progress.append((rows, tokens))
    )
    answers = responder.answer(rows, seed=0)
    assert answers[4] == Failure(4, "RuntimeError: out of memory")
    assert [*answers[:4], *answers[5:]] == [*expected[:4], *expected[5:]]
    assert sum(rows for rows, _ in progress) == 9
    assert sum(tokens for _, tokens in progress) == sum(len(a.token_ids) for a in answers if isinstance(a, Response))


def count_until(ids: Sequence[int], ngram: int, repeats: int) -> int | None:
    """The definition, by looking at every prefix."""
    for end in range(ngram, len(ids) + 1):
        last = ids[end - ngram : end]
        if sum(ids[i : i + ngram] == last for i in range(end - ngram + 1)) >= repeats:
            return end
    return None


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4), st.integers(1, 4))
def test_loop_start_follows_its_definition(ids: list[int], ngram: int, repeats: int) -> None:
    assert loop_start(ids, ngram, repeats) == count_until(ids, ngram, repeats)


def test_loop_is_cut_after_the_repetition_that_proves_it() -> None:
    sampling = Sampling(loop_ngram=3, loop_repeats=2)
    answer = finish(Prompt(0, [], [9]), [10, 11, 12, 13, 11, 12, 13, 11, 12, 13], [EOS], sampling)
    assert isinstance(answer, Response)
    assert (answer.token_ids, answer.finish_reason) == ([10, 11, 12, 13, 11, 12, 13], "loop")


@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [([9, EOS, 10], [9, EOS], "stop"), ([9, 10], [9, 10], "length"), ([9, 10, EOS], [9, 10, EOS], "stop")],
)
def test_answer_ends_with_its_end_token(ids: list[int], kept: list[int], reason: str) -> None:
    answer = finish(Prompt(0, [], [9]), ids, [EOS, 6], PLAIN)
    assert isinstance(answer, Response)
    assert (answer.token_ids, answer.finish_reason) == (kept, reason)


@pytest.mark.parametrize("ids", [[], [EOS], [EOS, 9]])
def test_empty_answer_is_a_failure(ids: list[int]) -> None:
    assert finish(Prompt(5, [], [9]), ids, [EOS], PLAIN) == Failure(5, "the target gave an empty response")
