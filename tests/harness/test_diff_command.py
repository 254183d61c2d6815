"""`kvchaos diff`, called as the command line calls it."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from engine.errors import EXIT_USAGE
from harness.commands.diff import diff
from harness.dump import DumpError

P = np.random.default_rng(0).integers(0, 256, (2, 2, 48, 32), dtype=np.uint8)
B = np.random.default_rng(1).integers(0, 256, (2, 2, 64, 32), dtype=np.uint8)
EXCHANGED = P.copy()
EXCHANGED[:, :, 16:32], EXCHANGED[:, :, 32:48] = P[:, :, 32:48], P[:, :, 16:32]


@pytest.fixture
def save(tmp_path):
    def save(name, kv, **changes):
        numbers = {"layer_numbers": [4, 9], "first_head": 0, "block_size": 16, "first_token": 0, "num_tokens": 40}
        path = tmp_path / f"{name}.npz"
        np.savez(path, kv=kv, **(numbers | changes))
        return path

    return save


def run(*arguments):
    result = CliRunner().invoke(diff, list(map(str, arguments)), catch_exceptions=False)
    return result.exit_code, result.output


def test_identical(save):
    changed = P.copy()
    changed[:, :, 40:] ^= 1  # slots after the end do not count
    assert run(save("p", P), save("d", changed)) == (0, "identical: tokens 0 to 39\n")


def test_different(save):
    code, text = run(save("p", P), save("d", EXCHANGED))
    assert code == 1
    assert text.splitlines() == [
        "different: layers 4 and 9 of 2, heads 0 and 1 of 2, tokens 16 to 39 (block positions 1 and 2), "
        f"{np.count_nonzero(P[:, :, :40] != EXCHANGED[:, :, :40]):,} of 5,120 bytes",
        "  1. Block positions 1 and 2 are exchanged.",
    ]


def test_nothing_fits(save):
    code, text = run(save("p", P), save("d", B[:, :, :48]))
    assert code == 1
    assert text.splitlines()[1:] == ["  1. None of the known kinds of damage fits."]


def test_json(save):
    code, text = run(save("p", P), save("d", P), "--json")
    assert (code, json.loads(text)) == (
        0,
        {
            "identical": True,
            "compared": {"first_token": 0, "num_tokens": 40},
            "damage": None,
            "hypotheses": [],
            "notes": [],
        },
    )
    code, text = run(save("p", P), save("d", EXCHANGED), "--json")
    found = json.loads(text)
    assert (code, found["identical"]) == (1, False)
    assert found["damage"].startswith("layers 4 and 9 of 2, ")
    assert found["hypotheses"] == [
        {"kind": "blocks_exchanged", "text": "Block positions 1 and 2 are exchanged.", "explained": 1.0}
    ]


def test_others(save):
    d = P.copy()
    d[:, :, 16:32] = B[:, :, 32:48]
    files = save("p", P), save("d", d)
    others = "--other", f"A={save('a', P[:, :, ::-1])}", "--other", f"B={save('b', B, num_tokens=60)}"
    assert run(*files)[1].splitlines()[1] == "  1. None of the known kinds of damage fits."
    assert run(*files, *others)[1].splitlines()[1:] == ["  1. Tokens 16 to 31 hold request B's tokens 32 to 47."]


def test_a_tail_in_other_blocks(save):
    tail = EXCHANGED[:, :, 24:40]
    code, text = run(save("p", P), save("d", tail, first_token=24, block_size=8))
    assert code == 1
    assert "tokens 24 to 39 (block positions 3 and 4)" in text
    assert run(save("p", P), save("d", P[:, :, 24:40], first_token=24, block_size=8)) == (
        0,
        "identical: tokens 24 to 39\n",
    )


def test_notes(save):
    code, text = run(save("p", P[:, :, 16:], first_token=16), save("d", P, num_tokens=39))
    assert (code, text.splitlines()) == (
        0,
        [
            "identical: tokens 16 to 38",
            "note: P's dump begins at token 16: D's tokens 0 to 15 not compared",
            "note: P counts 40 tokens and D 39: compared up to token 38",
        ],
    )
    notes = json.loads(run(save("p", P), save("d", P, num_tokens=39), "--json")[1])["notes"]
    assert notes == ["P counts 40 tokens and D 39: compared up to token 38"]


def refused(says, *arguments):
    with pytest.raises(DumpError, match=says) as caught:
        run(*arguments)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in str(caught.value)


def test_what_cannot_be_compared(save):
    p = save("p", P)
    refused(
        r"p.npz and .*d.npz cannot be compared: layers \[4, 9\] and \[4, 8\]; first head 0 and 2: dump the same",
        p,
        save("d", P, layer_numbers=[4, 8], first_head=2),
    )
    refused(
        "number of heads 2 and 1; bytes a token 32 and 16: dump the same of both", p, save("d", P[:, :1, :, :16].copy())
    )
    refused("p.npz and .*b.npz cannot be compared: layers", p, p, "--other", f"B={save('b', B, layer_numbers=[0, 1])}")
    refused(
        r"d.npz: its tokens 48 to 87 are not in .*p.npz, which holds 0 to 39: dump the same request on both sides",
        p,
        save("d", P, first_token=48, num_tokens=88),
    )
    refused("d.npz: none of its tokens count: num_tokens is 0", p, save("d", P, num_tokens=0))
    refused("b.npz: none of its tokens count: num_tokens is 0", p, p, "--other", f"B={save('b', B, num_tokens=0)}")
    refused("none.npz: no such file", p, "none.npz")


@pytest.mark.parametrize(
    ("others", "says"),
    [(["B"], "'B': it is not NAME=FILE"), (["=x"], "not NAME=FILE"), (["B=x", "B=y"], "'B=y': B is given twice")],
)
def test_others_that_are_none(save, others, says):
    p = save("p", P)
    options = [word for other in others for word in ("--other", other)]
    code, text = run(p, p, *options)
    assert code != 0
    assert says in text


def test_help_says_how_to_make_a_dump(save):
    code, text = run("--help")
    assert code == 0
    for word in ("kv ", "layer_numbers", "first_head", "block_size", "first_token", "num_tokens", "--other", "64"):
        assert word in text
    recipe = next(line.strip() for line in text.splitlines() if line.strip().startswith("cache[block_ids]"))
    cache = torch.arange(5 * 2 * 4 * 3 * 2, dtype=torch.int16).view(5, 2, 4, 3, 2)
    names = {"cache": cache, "block_ids": torch.tensor([3, 1]), "torch": torch, "heads": 3, "tokens": 8}
    kv = eval(recipe, names)  # noqa: S307
    assert kv[2, 5].view(torch.int16).tolist() == [*cache[1, 0, 1, 2].tolist(), *cache[1, 1, 1, 2].tolist()]
