"""Heads, layers, or K and V in each other's place."""

import numpy as np
import pytest


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("order", "says", "verb"),
    [
        ([0, 3, 2, 1, 4], "{n}s 1 and 3 are exchanged", "exchanged"),
        ([4, 3, 2, 1, 0], "{n}s 0 to 4 are in reverse order", "reversed"),
        ([0, 1, 1, 3, 4], "{n} 2 holds a copy of {l} 1", "copied"),
        ([0, 0, 0, 0, 4], "{n}s 1 to 3 all hold a copy of {l} 0", "copied"),
        ([0, 0, 1, 2, 3], "{n}s 1 to 4 hold what belongs 1 {l} earlier", "shifted"),
        ([1, 0, 2, 4, 3], "{n}s are exchanged in pairs: 0 with 1 and 3 with 4", "exchanged"),
        ([4, 0, 1, 2, 3], "{n}s 0 to 4 are rotated: 0 holds 4, 1 holds 0, 2 holds 1, and so on", "rotated"),
        (
            [0, 2, 4, 1, 3],
            "{n} 1 holds what belongs to 2, 2 holds what belongs to 4, 3 holds what belongs to 1 and 4 holds what "
            "belongs to 3",
            "permuted",
        ),
    ],
)
def test_layers_and_heads(random_kv, best, axis, order, says, verb):
    p = random_kv(layers=5, heads=5, tokens=48)
    noun = ("layer", "head")[axis]
    text = says.format(n=noun.capitalize(), l=noun)
    assert best(p, np.take(p, order, axis=axis)) == (f"{noun}s_{verb}", f"{text}.")


def test_k_and_v(random_kv, best):
    p = random_kv()
    k, v = p[..., :32], p[..., 32:]
    assert best(p, np.concatenate([v, k], -1)) == ("kv_exchanged", "K and V are exchanged.")
    assert best(p, np.concatenate([k, k], -1)) == ("kv_copied", "V holds a copy of K.")
    assert best(p, np.concatenate([v, v], -1)) == ("kv_copied", "K holds a copy of V.")


def test_where(random_kv, best):
    p = random_kv(layers=3, heads=4)
    d = p.copy()
    d[2, [0, 3]] = p[2, [3, 0]]
    assert best(p, d)[1] == "Heads 0 and 3 are exchanged in layer 2."
    d = p.copy()
    d[:, :, 32:64] = np.roll(p[:, :, 32:64], 32, axis=-1)
    assert best(p, d)[1] == "K and V are exchanged in tokens 32 to 63."
    d = p.copy()
    d[[0, 1], :, 5:9] = p[[1, 0], :, 5:9]
    assert best(p, d)[1] == "Layers 0 and 1 are exchanged in tokens 5 to 8."
    d = p.copy()
    d[1, 2] = np.roll(p[1, 2], 32, axis=-1)
    assert best(p, d)[1] == "K and V are exchanged in layer 1, head 2."


def test_heads_that_are_alike_in_a_layer_do_not_hide_it(random_kv, best):
    p = random_kv(layers=3)
    p[1, 0] = p[1, 1]
    assert best(p, p[:, ::-1].copy())[1] == "Heads 0 and 1 are exchanged."


def test_names_of_layers_and_heads():
    from harness.diagnosis import KVBlocks, diagnose

    p = np.random.default_rng(0).integers(0, 256, (2, 2, 32, 16), dtype=np.uint8)
    names = {"layer_numbers": (4, 9), "first_head": 6}
    found = diagnose(KVBlocks(p, 16, **names), KVBlocks(p[::-1].copy(), 16, **names))
    assert found.texts[0] == "Layers 4 and 9 are exchanged."
    found = diagnose(KVBlocks(p, 16, **names), KVBlocks(p[:, ::-1].copy(), 16, **names))
    assert found.texts[0] == "Heads 6 and 7 are exchanged."
    assert found.damage.startswith(
        "layers 4 and 9 of 2, heads 6 and 7 of 2, tokens 0 to 31 (block positions 0 and 1), "
    )
