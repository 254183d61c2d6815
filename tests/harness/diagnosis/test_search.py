"""What is said of nothing, of everything at once, of noise, and of KV so small or so plain that little can be known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.diagnosis import Diagnosis, KVBlocks, diagnose


def test_identical(random_kv, run):
    p = random_kv()
    assert run(p, p.copy()) == Diagnosis(None)
    assert run(p, p.copy()).texts == ()
    assert run(p, p[:, :, 64:].copy(), first_token=64, B=random_kv(1)) == Diagnosis(None)


def test_damage(random_kv, run):
    p = random_kv(tokens=72, size=16)
    d = p.copy()
    d[:, 1, 16:32] ^= 0xFF
    d[0, 1, 40] ^= 0xFF
    assert run(p, d).damage == (
        "layers 0 and 1 of 2, head 1 of 2, tokens 16 to 31 and 40 (block positions 1 and 2), 528 of 4,608 bytes"
    )
    d = p.copy()
    d[1, 0, 5:20:3, 9] ^= 1
    assert run(p, d).damage == (
        "layer 1 of 2, head 0 of 2, V only, tokens 5, 8, 11, 14 and 17 (block positions 0 and 1), 5 of 4,608 bytes"
    )
    d[1, 0, 20::2, 9] ^= 1
    assert "tokens 5, 8, 11, 14, 17 and 26 more (block positions 0 to 4)" in run(p, d).damage


def test_the_damage_counts_what_both_hold(random_kv, run):
    p = random_kv(tokens=64, size=16)
    d = p[:, :, 48:].copy()
    d[0, 0, 1, 2] ^= 4
    found = run(p, d, first_token=48)
    assert found.damage == "layer 0 of 2, head 0 of 2, K only, token 49 (block position 3), 1 of 1,024 bytes"


@pytest.mark.parametrize("size", [2, 6, 18, 4096, 8192])
def test_the_damage_counts_bytes_of_rows_of_any_size(random_kv, run, size):
    p, d = (random_kv(seed, 1, 2, 3, size) for seed in (0, 1))
    assert f" {np.count_nonzero(p != d):,} of {p.size:,} bytes" in run(p, d).damage
    assert f" {p.size:,} of {p.size:,} bytes" in run(p, ~p).damage


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_noise_is_explained_by_nothing(random_kv, run, seed):
    rng = np.random.default_rng(seed)
    p, noise = random_kv(1), random_kv(2)
    assert run(p, noise, B=random_kv(3)).texts == ("None of the known kinds of damage fits.",)
    rows = rng.random(p.shape[:3]) < rng.uniform(0.05, 0.9)
    assert run(p, np.where(rows[..., None], noise, p), B=random_kv(3)).hypotheses == ()
    block = 16 * rng.integers(0, 11)
    d = p.copy()
    d[:, :, block : block + 16] = noise[:, :, block : block + 16]
    assert run(p, d, B=random_kv(3)).hypotheses == ()


def test_own_rows_in_no_order(random_kv, run):
    p = random_kv(layers=8, heads=8, tokens=64, size=32)
    rng = np.random.default_rng(0)
    d = p.copy()
    for layer in range(8):
        for head in range(8):
            d[layer, head] = p[layer, head, rng.permutation(64)]
    (found,) = run(p, d).hypotheses
    assert (found.kind, found.explained) == ("scattered", 0.0)
    assert found.text == "100% of it is this request's own KV from other places, in no pattern known here."


class TestCombinations:
    def test_three_at_once(self, random_kv, run):
        p, b = random_kv(), random_kv(1)
        d = p.copy()
        d[:, :, 16:32], d[:, :, 32:48] = p[:, :, 32:48], p[:, :, 16:32]
        d[:, :, 80:96] = b[:, :, 80:96]
        d[:, :, 120:124] = 0
        found = run(p, d, B=b)
        assert found.texts == (
            "Block positions 1 and 2 are exchanged (explains 62% of it).",
            "Tokens 80 to 95 hold request B's tokens 80 to 95 (explains 31% of it).",
            "Tokens 120 to 123 hold zeros (explains 8% of it).",
        )
        assert sum(hypothesis.explained for hypothesis in found.hypotheses) == pytest.approx(1)

    def test_a_flipped_bit_in_a_moved_block(self, random_kv, run):
        p = random_kv()
        d = p.copy()
        d[:, :, 16:32], d[:, :, 32:48] = p[:, :, 32:48], p[:, :, 16:32]
        d[1, 1, 20, 35] ^= 0x80
        found = run(p, d)
        assert found.texts == (
            "Block positions 1 and 2 are exchanged (explains more than 99% of it).",
            "Besides, 1 bit is flipped: bit 7 of byte 3 of V of token 20 (layer 1, head 1) (the sign of a 16-bit "
            "float) (explains less than 1% of it).",
        )
        assert sum(hypothesis.explained for hypothesis in found.hypotheses) == pytest.approx(1)

    @pytest.mark.parametrize("token", [20, 199])
    def test_a_flipped_bit_after_heads_were_exchanged(self, random_kv, run, token):
        p = random_kv()
        d = p[:, ::-1].copy()
        d[0, 1, token, 3] ^= 1
        kinds = [hypothesis.kind for hypothesis in run(p, d).hypotheses]
        assert kinds == ["heads_exchanged", "bits"]

    def test_layers_with_different_damage(self, random_kv, run):
        p = random_kv(layers=3)
        d = p.copy()
        d[0, :, 16:32], d[0, :, 32:48] = p[0, :, 32:48], p[0, :, 16:32]
        d[2, :, 16:32], d[2, :, 48:64] = p[2, :, 48:64], p[2, :, 16:32]
        d[1, :, 16:32] = 0
        texts = run(p, d).texts
        assert sorted(text.split(" (")[0] for text in texts) == [
            "Block positions 1 and 2 are exchanged in layer 0",
            "Block positions 1 and 3 are exchanged in layer 2",
            "Tokens 16 to 31 hold zeros in layer 1",
        ]

    def test_noise_beside_an_explanation(self, random_kv, run):
        p = random_kv()
        d = p.copy()
        d[:, :, 16:48] = 0
        d[:, :, 96:112] = random_kv(5)[:, :, 96:112]
        assert run(p, d).texts == ("Tokens 16 to 47 hold zeros (explains 67% of it).",)

    def test_a_crumb_of_an_explanation_is_none(self, random_kv, run):
        p, d = random_kv(), random_kv(5)
        d[:, :, 7] = p[:, :, 150]
        assert run(p, d).hypotheses == ()


class TestSmallAndPlain:
    """Where several explanations are equally good, or chance explains as much: no crash, no boast."""

    @given(st.data())
    def test_anything_goes_in(self, data):
        layers, heads, tokens, half = (data.draw(st.integers(1, most)) for most in (3, 3, 20, 9))
        letters = data.draw(st.sampled_from([1, 2, 3, 256]))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        first = data.draw(st.integers(0, tokens - 1))
        shape = (layers, heads, tokens, 2 * half)
        p, d, b = (rng.integers(0, letters, shape, dtype=np.uint8) for _ in range(3))
        if data.draw(st.booleans()):
            keep = rng.random(shape) < 0.9
            d = np.where(keep, p, d)
        sizes = [data.draw(st.integers(1, 17)) for _ in range(3)]
        found = diagnose(
            KVBlocks(p, sizes[0]), KVBlocks(d[:, :, first:], sizes[1], first), {"B": KVBlocks(b, sizes[2])}
        )
        assert (found.damage is None) == np.array_equal(p[:, :, first:], d[:, :, first:])
        assert len(found.hypotheses) <= 5
        for hypothesis in found.hypotheses:
            assert 0 <= hypothesis.explained <= 1
            assert hypothesis.text[0] == hypothesis.text[0].upper()
            assert hypothesis.text.endswith(".")
            assert ("explains" in hypothesis.text) <= (hypothesis.explained < 1)

    def test_one_token_of_one_head(self, random_kv, run, best):
        p = random_kv(layers=1, heads=1, tokens=1, size=16)
        d = p.copy()
        d[0, 0, 0, 3] ^= 2
        assert best(p, d)[0] == "bits"
        assert best(p, np.zeros_like(p))[1] == "Every token holds zeros."
        assert best(p, np.roll(p, 8, axis=-1))[1] == "K and V are exchanged."
        assert run(p, random_kv(9, layers=1, heads=1, tokens=1, size=16)).hypotheses == ()

    def test_one_block(self, random_kv, best):
        p = random_kv(layers=1, heads=1, tokens=16, size=16)
        d = p.copy()
        d[:, :, [3, 9]] = p[:, :, [9, 3]]
        assert best(p, d)[1] == "Tokens 3 and 9 are exchanged."

    def test_constant_contents(self, run, best):
        p = np.full((2, 2, 48, 16), 7, np.uint8)
        assert run(p, p.copy()).damage is None
        assert best(p, np.full_like(p, 9)) == ("pattern", "Every token holds the byte 0x09 over and over.")
        d = p.copy()
        d[:, :, 16:32] = 0
        assert best(p, d)[1] == "Tokens 16 to 31 hold zeros."

    def test_the_same_in_every_token(self, random_kv, best):
        p = np.repeat(random_kv(tokens=1), 48, axis=2)
        assert best(p, p[:, ::-1].copy())[1] == "Heads 0 and 1 are exchanged."

    def test_the_same_in_every_head(self, random_kv, best):
        p = np.repeat(random_kv(heads=1), 4, axis=1)
        d = p.copy()
        d[:, :, 16:32], d[:, :, 32:48] = p[:, :, 32:48], p[:, :, 16:32]
        assert best(p, d)[1] == "Block positions 1 and 2 are exchanged."

    def test_a_few_equal_bytes_are_no_move(self, random_kv, run):
        """Rows of one byte have twins everywhere."""
        p = random_kv(layers=1, heads=1, tokens=300, size=2)
        d = p.copy()
        d[0, 0, 7] = d[0, 0, 7] ^ np.array([0x5B, 0x6E], np.uint8)
        assert run(p, d).hypotheses == ()
        d = p.copy()
        d[0, 0, 7, 0] ^= 0x5B
        p[0, 0, 33, 0] = d[0, 0, 33, 0] = d[0, 0, 7, 0]
        assert run(p, d).hypotheses == ()


def test_what_cannot_be_compared(random_kv):
    p = random_kv()
    whole = KVBlocks(p, 16)
    with pytest.raises(ValueError, match=r"the consumer has \(2, 1, 64\) .* the producer \(2, 2, 64\)"):
        diagnose(whole, KVBlocks(p[:, :1], 16))
    with pytest.raises(ValueError, match="request B has"):
        diagnose(whole, whole, {"B": KVBlocks(p[:1], 16)})
    with pytest.raises(ValueError, match="tokens 0 to 199 and the consumer 208 to 407: they have none in common"):
        diagnose(whole, KVBlocks(p, 16, 208))
    for wrong in (p.astype(np.int8), p[0], p[..., :3], p[:, :, :0]):
        with pytest.raises(ValueError, match="it must be uint8"):
            KVBlocks(wrong, 16)
    for numbers in ({"block_size": 0}, {"block_size": 16, "first_token": -1}):
        with pytest.raises(ValueError, match="block_size is"):
            KVBlocks(p, **numbers)
    with pytest.raises(ValueError, match="layer_numbers are 1 for 2 layers"):
        KVBlocks(p, 16, layer_numbers=(3,))


def test_views_of_any_strides(random_kv, run):
    p = random_kv()
    d = p[:, ::-1]
    for array in (np.asfortranarray(d), np.ascontiguousarray(d.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)):
        assert run(p, array).texts == run(p, d.copy()).texts
