"""Changes of whole pieces that a sum need not see are named, and nothing else is taken for them."""

import numpy as np
import pytest


def pieces(kv: np.ndarray) -> np.ndarray:
    """uint64 [layers, heads, tokens, pieces a token]; a view."""
    return kv.view("<u8")


@pytest.mark.req("GAP-10")
def test_two_exchanged_pieces(random_kv, best):
    p = random_kv()
    d = p.copy()
    x = pieces(d)
    x[0, 0, 3, 1], x[0, 1, 2, 6] = x[0, 1, 2, 6].copy(), x[0, 0, 3, 1].copy()
    assert best(p, d) == (
        "pieces_exchanged",
        "Two 8-byte pieces are exchanged: piece 2 of V of token 2 (layer 0, head 1) and piece 1 of K of token 3 "
        "(layer 0, head 0).",
    )


@pytest.mark.req("GAP-11")
@pytest.mark.parametrize("first", [(3, 0), (3, 2), (3, 3), (3, 6), (3, 7)])
def test_d_minus_two_d_and_d(random_kv, best, first):
    p = random_kv()
    d = p.copy()
    flat = pieces(d)[1, 0].reshape(-1)
    start = first[0] * 8 + first[1]
    step = np.uint64(0x123456789ABCDEF1)
    with np.errstate(over="ignore"):
        flat[start] += step
        flat[start + 1] -= step + step
        flat[start + 2] += step
    kind, text = best(p, d)
    assert kind == "pieces_cancel"
    assert text.startswith("Three 8-byte pieces changed by d, -2d and d, which add up to nothing: piece ")


def test_two_pieces_of_other_content_are_no_exchange(random_kv, run):
    p = random_kv()
    d = p.copy()
    pieces(d)[0, 0, 3, 1] = 1
    pieces(d)[0, 1, 2, 6] = 2
    assert {hypothesis.kind for hypothesis in run(p, d).hypotheses}.isdisjoint({"pieces_exchanged", "pieces_cancel"})
