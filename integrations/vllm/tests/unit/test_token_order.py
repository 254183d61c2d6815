"""Where a backend puts a token's elements, found by asking it: backends that are played here, with every odd habit."""

from __future__ import annotations

import pytest
import torch
from kvchaos_vllm.token_order import token_order

TOKENS, HEAD = 8, 6
COUNT = TOKENS * 2 * HEAD


def rows(key, value, cache):
    """A token's K, then its V, in its row."""
    cache[0, 0] = torch.cat([key[:, 0], value[:, 0]], dim=1)


def columns(key, value, cache):
    """As vLLM's CPU backend without tiles: all K, column by column, then all V, row by row."""
    flat = cache.view(-1)
    flat[: COUNT // 2] = key[:, 0].T.reshape(-1)
    flat[COUNT // 2 :] = value[:, 0].reshape(-1)


def pairs(key, value, cache):
    """As with matrix tiles: two elements of K side by side, tokens in between."""
    flat = cache.view(-1)
    flat[: COUNT // 2] = key[:, 0].reshape(TOKENS, HEAD // 2, 2).transpose(0, 1).reshape(-1)
    flat[COUNT // 2 :] = value[:, 0].reshape(TOKENS // 2, 2, HEAD).transpose(1, 2).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [rows, columns, pairs])
def test_the_order_finds_what_was_written(write, dtype):
    order = token_order(write, dtype, TOKENS, HEAD)
    assert order is not None
    assert order.shape == (TOKENS, 2 * HEAD)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(TOKENS, 1, HEAD, generator=generator).to(dtype) for _ in range(2))
    cache = torch.zeros(1, 1, TOKENS, 2 * HEAD, dtype=dtype)
    write(key, value, cache)
    assert torch.equal(cache.view(-1)[order], torch.cat([key[:, 0], value[:, 0]], dim=1))


def test_rows_are_in_order():
    order = token_order(rows, torch.float32, TOKENS, HEAD)
    assert order is not None
    assert order.view(-1).tolist() == list(range(COUNT))


def test_more_elements_than_two_digits_can_count():
    def write(key, value, cache):
        cache[0, 0] = torch.cat([key[:, 0], value[:, 0]], dim=1).flip(0)

    order = token_order(write, torch.bfloat16, 128, 64)
    assert order is not None
    assert order[0].tolist() == list(range(127 * 128, 128 * 128))


def nothing(key, value, cache):
    """Writes nothing at all."""


def half(key, value, cache):
    cache[0, 0, :, :HEAD] = key[:, 0]


def twice(key, value, cache):
    cache[0, 0] = torch.cat([key[:, 0], key[:, 0]], dim=1)


def scaled(key, value, cache):
    cache[0, 0] = torch.cat([key[:, 0], value[:, 0]], dim=1) * 3


@pytest.mark.parametrize("write", [nothing, half, twice, scaled])
def test_a_backend_that_does_not_store_each_element_as_it_is_in_a_place_of_its_own(write):
    assert token_order(write, torch.float32, TOKENS, HEAD) is None
