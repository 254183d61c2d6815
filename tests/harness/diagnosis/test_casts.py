"""Values converted to another dtype of the same width, against torch's conversions."""

import numpy as np
import pytest
import torch

from harness.diagnosis.casts import bf16_to_fp16, fp16_to_bf16

EVERY = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize(
    ("convert", "source", "target"),
    [(bf16_to_fp16, torch.bfloat16, torch.float16), (fp16_to_bf16, torch.float16, torch.bfloat16)],
)
def test_every_value_as_torch_converts_it(convert, source, target):
    wanted = torch.from_numpy(EVERY.copy()).view(source).to(target)
    got = torch.from_numpy(convert(EVERY)).view(target)
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(got), nan)
    assert torch.equal(got.view(torch.int16)[~nan], wanted.view(torch.int16)[~nan])


def values(dtype, seed=0):
    return torch.randn(2, 2, 200, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_bytes(tensor):
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("source", "target", "kind", "text"),
    [
        (torch.bfloat16, torch.float16, "bf16_as_fp16", "The values were bf16 and were converted to fp16"),
        (torch.float16, torch.bfloat16, "fp16_as_bf16", "The values were fp16 and were converted to bf16"),
    ],
)
def test_everything_or_a_part(best, source, target, kind, text):
    p = values(source)
    p[0, 0, 20] = 0  # the same in both
    p[0, 0, 21, 3] = float("nan")
    converted = p.to(target)
    assert best(as_bytes(p), as_bytes(converted)) == (kind, f"{text}.")
    d = as_bytes(p).copy()
    d[1, :, 16:32] = as_bytes(converted)[1, :, 16:32]
    assert best(as_bytes(p), d) == (kind, f"{text} in layer 1, tokens 16 to 31.")


def test_bits_alone_are_no_conversion(run):
    bits = as_bytes(values(torch.bfloat16))
    assert run(bits, bits.copy()).damage is None


@pytest.mark.parametrize("width", [2, 4, 8])
def test_byte_order(random_kv, best, width):
    p = random_kv()
    d = p.reshape(*p.shape[:3], -1, width)[..., ::-1].reshape(p.shape)
    assert best(p, d) == ("byte_order", f"The bytes of every {8 * width}-bit word are in reverse order.")
