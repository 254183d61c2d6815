"""Blocks and tokens that hold what belongs elsewhere, in this request or in another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.sampled_from([8, 16, 32])


def two(noun, a, b):
    return f"{noun}s {min(a, b)} and {max(a, b)}"


@given(st.data(), SIZES)
def test_two_blocks_exchanged(random_kv, best, data, size):
    p = random_kv(tokens=192, size=16)
    a, b = data.draw(st.lists(st.integers(0, 192 // size - 1), min_size=2, max_size=2, unique=True))
    d = p.copy()
    for token in range(size):
        d[:, :, a * size + token] = p[:, :, b * size + token]
        d[:, :, b * size + token] = p[:, :, a * size + token]
    assert best(p, d, size) == ("blocks_exchanged", f"{two('Block position', a, b)} are exchanged.")


@given(st.lists(st.integers(0, 199), min_size=2, max_size=2, unique=True))
def test_two_tokens_exchanged(random_kv, best, pair):
    p = random_kv()
    d = p.copy()
    d[:, :, pair] = p[:, :, pair[::-1]]
    assert best(p, d) == ("tokens_exchanged", f"{two('Token', *pair)} are exchanged.")


@given(st.data(), SIZES)
def test_blocks_shifted(random_kv, best, data, size):
    p = random_kv(tokens=192, size=16)
    blocks = 192 // size
    by = data.draw(st.integers(1, (blocks - 1) // 2)) * data.draw(st.sampled_from([1, -1]))
    d = p.copy()
    for block in range(blocks):
        if 0 <= block + by < blocks:
            d[:, :, block * size : block * size + size] = p[:, :, (block + by) * size : (block + by) * size + size]
    first, last = (0, blocks - 1 - by) if by > 0 else (-by, blocks - 1)
    noun = "block position" if abs(by) == 1 else "block positions"
    way = "later" if by > 0 else "earlier"
    assert best(p, d, size) == (
        "blocks_shifted",
        f"Block positions {first} to {last} hold what belongs {abs(by)} {noun} {way}.",
    )


@given(st.integers(1, 60).filter(lambda by: by % 16))
def test_tokens_shifted(random_kv, best, by):
    p = random_kv()
    d = p.copy()
    d[:, :, by:] = p[:, :, :-by]
    noun = "token" if by == 1 else "tokens"
    assert best(p, d) == ("tokens_shifted", f"Tokens {by} to 199 hold what belongs {by} {noun} earlier.")
    d = p.copy()
    d[:, :, :-by] = p[:, :, by:]
    assert best(p, d)[1] == f"Tokens 0 to {199 - by} hold what belongs {by} {noun} later."


def test_what_a_shift_brings_in_from_outside_is_in_no_dump(random_kv, run):
    p = random_kv()
    d = random_kv(9)
    d[:, :, 32:] = p[:, :, :-32]
    found = run(p, d).hypotheses[0]
    assert found.text == (
        "Block positions 2 to 12 hold what belongs 2 block positions earlier; what tokens 0 to 31 then hold is in no "
        "dump."
    )
    assert 0.8 < found.explained < 0.9


def test_a_move_that_would_leave_most_open_excuses_nothing(random_kv, run):
    p = random_kv()
    d = random_kv(9)
    d[:, :, 176:] = p[:, :, :24]
    (found,) = run(p, d).hypotheses
    assert found.text == "Block positions 11 and 12 hold a copy of 0 and 1 (explains 12% of it)."


def test_a_run_goes_on_over_tokens_that_are_right_by_chance(random_kv, best, run):
    p, b = random_kv(), random_kv(1)
    p[:, :, 25] = p[:, :, 105] = b[:, :, 45]
    d = p.copy()
    d[:, :, 20:30] = p[:, :, 100:110]
    assert best(p, d)[1] == "Tokens 20 to 29 hold this request's own tokens 100 to 109."
    d[:, :, 20:30] = b[:, :, 40:50]
    assert best(p, d, B=b)[1] == "Tokens 20 to 29 hold request B's tokens 40 to 49."
    d[:, :, 23] ^= 0xA5
    assert run(p, d, B=b).texts == (
        "Tokens 20 to 22 hold request B's tokens 40 to 42 and 24 to 29 hold 44 to 49 (explains 89% of it).",
    )


def test_what_another_finding_explains_is_not_outside_of_the_dumps(random_kv, run):
    p = random_kv()
    d = p.copy()
    d[:, :, 32:] = p[:, :, :-32]
    d[:, :, :32] = 0
    texts = run(p, d).texts
    assert texts[0].startswith("Block positions 2 to 12 hold what belongs 2 block positions earlier (explains 8")
    assert texts[1].startswith("Tokens 0 to 31 hold zeros (explains 1")


@pytest.mark.parametrize(
    ("order", "kind", "text"),
    [
        ([5, 4, 3, 2, 1, 0], "blocks_reversed", "Block positions 0 to 5 are in reverse order."),
        ([0, 5, 4, 3, 2, 1], "blocks_reversed", "Block positions 1 to 5 are in reverse order."),
        ([0, 1, 5, 3, 4, 2], "blocks_exchanged", "Block positions 2 and 5 are exchanged."),
        ([3, 4, 5, 0, 1, 2], "blocks_exchanged", "Block positions 0 to 2 are exchanged with 3 to 5."),
        ([0, 1, 1, 3, 4, 5], "blocks_copied", "Block position 2 holds a copy of block position 1."),
        ([0, 2, 2, 2, 4, 5], "blocks_copied", "Block positions 1 and 3 all hold a copy of block position 2."),
        ([4, 5, 2, 3, 4, 5], "blocks_copied", "Block positions 0 and 1 hold a copy of 4 and 5."),
        (
            [5, 0, 1, 2, 3, 4],
            "blocks_rotated",
            "Block positions 0 to 5 are rotated: 0 holds 5, 1 holds 0, 2 holds 1, and so on.",
        ),
        ([1, 0, 2, 3, 5, 4], "blocks_exchanged", "Block positions are exchanged in pairs: 0 with 1 and 4 with 5."),
        (
            [0, 3, 1, 2, 4, 5],
            "blocks_rotated",
            "Block positions 1 to 3 are rotated: 1 holds 3, 2 holds 1, 3 holds 2.",
        ),
        (
            [0, 4, 2, 1, 3, 5],
            "blocks_permuted",
            "Block position 1 holds what belongs to 4, 3 holds what belongs to 1 and 4 holds what belongs to 3.",
        ),
    ],
)
@pytest.mark.parametrize("size", [8, 16, 32])
def test_maps_of_blocks(random_kv, best, order, kind, text, size):
    p = random_kv(tokens=6 * size)
    d = np.concatenate([p[:, :, block * size : block * size + size] for block in order], axis=2)
    assert best(p, d, size) == (kind, text)


@pytest.mark.parametrize(
    ("places", "sources", "kind", "text"),
    [
        (range(20, 30), range(100, 110), "tokens_copied", "Tokens 20 to 29 hold this request's own tokens 100 to 109."),
        ([7], [150], "tokens_copied", "Token 7 holds this request's own token 150."),
        (range(3, 6), [9, 9, 9], "tokens_copied", "Tokens 3 to 5 hold this request's own token 9."),
        ([3, 4, 9, 10], [9, 10, 3, 4], "tokens_exchanged", "Tokens 3 and 4 are exchanged with 9 and 10."),
        (range(10, 15), range(14, 9, -1), "tokens_reversed", "Tokens 10 to 14 are in reverse order."),
    ],
)
def test_maps_of_tokens(random_kv, best, places, sources, kind, text):
    p = random_kv()
    d = p.copy()
    d[:, :, list(places)] = p[:, :, list(sources)]
    assert best(p, d) == (kind, text)


def test_the_last_block_may_be_short(random_kv, run, best):
    p = random_kv(tokens=48)
    d = p.copy()
    d[:, :, 16:32], d[:, :, 32:48] = p[:, :, 32:48], p[:, :, 16:32]
    found = run(p[:, :, :40].copy(), d[:, :, :40].copy()).hypotheses[0]
    assert found.text == "Block positions 1 and 2 are exchanged; what tokens 24 to 31 then hold is in no dump."
    # P's slots after the end are a source if they are there.
    assert best(p, d[:, :, :40].copy())[1] == "Block positions 1 and 2 are exchanged."


def test_only_in_some_layers_heads_or_parts(random_kv, best):
    p = random_kv(layers=3, heads=4)
    for where, says in (
        (np.s_[1], "layer 1"),
        (np.s_[:, 1:3], "heads 1 and 2"),
        (np.s_[1, ..., 32:], "layer 1, V"),
        (np.s_[..., :32], "K"),
    ):
        moved = p.copy()
        moved[:, :, 16:32], moved[:, :, 64:80] = p[:, :, 64:80], p[:, :, 16:32]
        d = p.copy()
        d[where] = moved[where]
        assert best(p, d) == ("blocks_exchanged", f"Block positions 1 and 4 are exchanged in {says}.")


def test_a_consumer_that_holds_a_tail(random_kv, best):
    p = random_kv()
    d = p.copy()
    d[:, :, 48:64], d[:, :, 96:112] = p[:, :, 96:112], p[:, :, 48:64]
    tail = d[:, :, 32:].copy()
    assert best(p, tail, first_token=32)[1] == "Block positions 3 and 6 are exchanged."
    tail = p[:, :, 16:184].copy()
    text = "Block positions 2 to 12 hold what belongs 1 block position earlier."
    assert best(p, tail, first_token=32) == ("blocks_shifted", text)


@pytest.mark.parametrize(("p_size", "d_size"), [(32, 16), (16, 32)])
def test_different_block_sizes(random_kv, best, p_size, d_size):
    p = random_kv()
    d = p.copy()
    d[:, :, 32:64], d[:, :, 96:128] = p[:, :, 96:128], p[:, :, 32:64]
    says = {16: "Block positions 2 and 3 are exchanged with 6 and 7.", 32: "Block positions 1 and 3 are exchanged."}
    assert best(p, d, d_size, producer_block_size=p_size)[1] == says[d_size]


def test_blocks_of_p_s_size_say_so(random_kv, best):
    p = random_kv()
    d = p.copy()
    d[:, :, 16:32], d[:, :, 48:64] = p[:, :, 48:64], p[:, :, 16:32]
    found = best(p, d, 32, producer_block_size=16)
    assert found == ("blocks_exchanged", "P's block positions 1 and 3 are exchanged.")


def test_rows_that_many_tokens_share_do_not_hide_it(random_kv, best):
    """As V of the first layer, where the same token has the same V everywhere."""
    p = random_kv()
    p[0, :, :, 32:] = p[0, :, :1, 32:]
    d = p.copy()
    d[:, :, 16:32], d[:, :, 64:80] = p[:, :, 64:80], p[:, :, 16:32]
    assert best(p, d)[1] == "Block positions 1 and 4 are exchanged."


def test_the_same_words_elsewhere_are_no_move(random_kv, run):
    """A stranger's KV: in the first layer, V of a word is the same wherever it stands, in every request."""
    rng = np.random.default_rng(0)
    v_of_word = rng.integers(0, 256, (60, 2, 32), dtype=np.uint8)

    def request(seed):
        kv = random_kv(seed)
        kv[0, :, :, 32:] = v_of_word[rng.integers(0, 60, 200)].transpose(1, 0, 2)
        return kv

    p, d, b, c = map(request, range(4))
    assert run(p[:1], d[:1], B=b[:1], C=c[:1]).hypotheses == ()
    assert run(p, d, B=b, C=c).hypotheses == ()
    d[:, :, :48] = p[:, :, :48]
    (found,) = run(p, d, B=b, C=c).hypotheses
    assert found.text == (
        "Only the first 3 blocks of 13 arrived (tokens 0 to 47); the rest holds bytes that nothing here explains."
    )
    d[:, :, 48:] = b[:, :, :152]
    assert run(p, d, B=b, C=c).texts[0] == "Tokens 48 to 199 hold request B's tokens 0 to 151."


class TestOtherRequests:
    def test_a_block(self, random_kv, best):
        p, b = random_kv(), random_kv(1, tokens=50)
        d = p.copy()
        d[:, :, 16:32] = b[:, :, :16]
        found = best(p, d, A=random_kv(2), B=b)
        assert found == ("other_request", "Tokens 16 to 31 hold request B's tokens 0 to 15.")

    @given(st.integers(0, 190), st.integers(1, 40), st.integers(0, 60))
    def test_any_run_of_tokens(self, random_kv, best, first, length, there):
        p, b = random_kv(), random_kv(1, tokens=100)
        length = min(length, 200 - first)
        d = p.copy()
        d[:, :, first : first + length] = b[:, :, there : there + length]
        kind, text = best(p, d, A=random_kv(2), B=b)
        assert kind == "other_request"
        if first == 0 and length == 1:
            wanted = f"Token 0 holds request B's token {there}."
        elif length == 1:
            wanted = f"Token {first} holds request B's token {there}."
        elif length == 2:
            wanted = f"Tokens {first} and {first + 1} hold request B's tokens {there} and {there + 1}."
        else:
            wanted = f"Tokens {first} to {first + length - 1} hold request B's tokens {there} to {there + length - 1}."
        assert text == wanted

    def test_everything(self, random_kv, best):
        p, b = random_kv(), random_kv(1, tokens=250)
        assert best(p, b[:, :, :200].copy(), B=b)[1] == "Every token holds what request B has at its position."
        d = p.copy()
        d[1] = b[1, :, :200]
        assert best(p, d, B=b)[1] == "Every token in layer 1 holds what request B has at its position."
        p[:, :, :32] = b[:, :, :32]  # a prefix that both share
        assert best(p, b[:, :, :200].copy(), B=b)[1] == "Every token holds what request B has at its position."

    def test_blocks_in_another_order(self, random_kv, best):
        p, b = random_kv(), random_kv(1, tokens=100)
        d = p.copy()
        d[:, :, 16:32], d[:, :, 32:48] = b[:, :, 48:64], b[:, :, :16]
        assert best(p, d, B=b)[1] == "Tokens 16 to 31 hold request B's tokens 48 to 63 and 32 to 47 hold 0 to 15."

    def test_own_tokens_before_those_of_another_with_the_same_prefix(self, random_kv, best):
        p, b = random_kv(), random_kv(1)
        b[:, :, :64] = p[:, :, :64]
        d = p.copy()
        d[:, :, 32:48] = p[:, :, 16:32]
        assert best(p, d, B=b)[1] == "Block position 2 holds a copy of block position 1."

    def test_two_others(self, random_kv, run):
        p, b, c = random_kv(), random_kv(1), random_kv(2)
        d = p.copy()
        d[:, :, 16:32], d[:, :, 48:56] = b[:, :, :16], c[:, :, 8:16]
        found = run(p, d, B=b, C=c)
        assert found.texts == (
            "Tokens 16 to 31 hold request B's tokens 0 to 15 (explains 67% of it).",
            "Tokens 48 to 55 hold request C's tokens 8 to 15 (explains 33% of it).",
        )
