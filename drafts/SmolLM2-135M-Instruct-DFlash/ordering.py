"""Tokens of every row in an order of its own. `gather` and `scatter` are many times as slow on a CPU.

Shapes: B batch, N tokens, M of them, n anything; G heads, T columns, D head size.
"""

from collections.abc import Sequence

import torch


def in_order(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens `order` (B, M) of states (B, N, n), copied whole."""
    rows = torch.arange(len(states), device=states.device)[:, None]
    return states[rows, order.to(states.device)]


def real_first(states: torch.Tensor, is_real: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """States (B, N, n) with the tokens that `is_real` (B, N) before the others, else in turn; the first `count`."""
    return in_order(states, (~is_real).to(torch.uint8).argsort(dim=1, stable=True)[:, :count])


def take_columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns (B, M) of states (B, G, T, D), copied."""
    if len(states) == 1:
        return states.index_select(2, columns[0])
    batch_size, num_heads, _, head_dim = states.shape
    taken = states.reshape(-1, head_dim).index_select(0, flat_columns(states, columns))
    return taken.view(batch_size, -1, num_heads, head_dim).transpose(1, 2)


def put_columns(states: torch.Tensor, flat: torch.Tensor, new: torch.Tensor) -> None:
    """Write (B, G, M, D) into `flat_columns` of contiguous states (B, G, T, D); of equal ones any may win."""
    head_dim = states.shape[-1]
    states.view(-1, head_dim).index_copy_(0, flat, new.transpose(1, 2).reshape(-1, head_dim))


def flat_columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Where columns (B, M) of every head are among all columns of all rows: (B * M * G,), as layers compute them."""
    batch_size, num_heads, num_columns, _ = states.shape
    first = torch.arange(0, batch_size * num_heads * num_columns, num_columns, device=states.device)
    return (columns[:, :, None] + first.view(batch_size, 1, num_heads)).flatten()


def filled_gaps(staying: Sequence[int]) -> list[int]:
    """Numbers in ascending order, such as rows that stay, with the last ones where others have left gaps.

    So most keep their place, and what is kept of them need not be moved.
    """
    present = set(staying)
    movers = [number for number in staying if number >= len(staying)]
    return [number if number in present else movers.pop() for number in range(len(staying))]


def close_up(states: torch.Tensor, rows: Sequence[int], in_use: int) -> torch.Tensor:
    """The first rows of states (B, G, T, D), into which `filled_gaps` has been written; of each, `in_use` columns."""
    for place, row in enumerate(rows):
        if row != place:
            states[place, :, :in_use] = states[row, :, :in_use]
    return states[: len(rows)]


__all__ = ["close_up", "filled_gaps", "flat_columns", "in_order", "put_columns", "real_first", "take_columns"]
