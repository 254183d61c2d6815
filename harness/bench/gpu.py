"""What only a GPU can say of the Triton kernel: exact in every shape, how fast, what a step pays, and no host sync.

`exactness` runs anywhere (in Triton's interpreter too, on small shapes); the rest needs CUDA.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from engine.checksum.host_copy import CudaHostCopy
from kernels import torch_path, triton_path
from kernels.torch_path import LayerCache

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
TOKEN_LAYER_BYTES = 2 * HEADS * HEAD_DIM * 2
PROMPTS = (1024, 8192, 32_768)
ROUNDS = 20
STEP_SIZE = 8192
STEP_PROMPT = 8192

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A cache to be exact on: K and V widths in elements of bf16 (one width: a latent cache)."""

    layout: str
    layers: int
    heads: int
    widths: tuple[int, ...]
    kernel_tokens: int
    split: int
    blocks: int
    start: int
    missing: int

    @property
    def block_size(self) -> int:
        """Tokens a logical block."""
        return self.kernel_tokens * self.split


@dataclass(frozen=True, slots=True)
class Exact:
    """One shape, and at how many block positions the kernel differed from the torch path on the CPU."""

    shape: Shape
    differing: int


@dataclass(frozen=True, slots=True)
class Speed:
    """One prompt's KV: bytes summed or copied, and milliseconds between two events around it (medians, interleaved).

    The device is idle before, so what the host needs to launch it counts: it is most of a short prompt's time.
    """

    tokens: int
    size: int
    triton_ms: float
    torch_ms: float
    copy_ms: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step of matrix products, and the same with the checksums of one prompt: milliseconds (medians)."""

    prompt_tokens: int
    without_ms: float
    with_ms: float


def shapes() -> Iterator[Shape]:
    """Grouped heads and one, K and V and latent, split blocks, tails, late positions; aligned to 16 bytes and not."""
    widths = ((128, 128), (64, 64), (576,), (128, 64), (12, 20), (4,))
    for (layout, width), heads in product(product(("HND", "NHD"), widths), (1, 2, 8)):
        yield Shape(layout, 3, heads, width, 16, 1, 40, 0, 0)
        yield Shape(layout, 1, heads, width, 16, 4, 6, 2**40, 37)
    for kernel_tokens in (1, 3, 8, 32, 64, 100, 256):
        yield Shape("HND", 2, 4, (128, 128), kernel_tokens, 1, 5, 7, kernel_tokens // 2)


def exactness(wanted: Sequence[Shape], device: str) -> tuple[Exact, ...]:
    """Sum random bytes of each shape with the kernel on device, and with torch on the CPU."""
    return tuple(Exact(shape, _differing(shape, device, seed)) for seed, shape in enumerate(wanted))


def _differing(shape: Shape, device: str, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    on_host = []
    for number in range(shape.layers):
        parts = []
        for width in shape.widths:
            middle = (shape.heads, shape.kernel_tokens) if shape.layout == "HND" else (shape.kernel_tokens, shape.heads)
            size = ((shape.blocks + 1) * shape.split, *middle, width)
            bits = torch.randint(-(2**15), 2**15, size, generator=generator, dtype=torch.int16)
            parts.append(bits.transpose(1, 2) if shape.layout == "HND" else bits)
        on_host.append(LayerCache(3 * number + 1, 2, tuple(parts)))
    on_device = [LayerCache(c.layer_number, c.first_head, tuple(p.to(device) for p in c.parts)) for c in on_host]
    ids = np.random.default_rng(seed).permutation(shape.blocks).tolist()
    num_tokens = (shape.start + shape.blocks) * shape.block_size - shape.missing
    how = {"block_size": shape.block_size, "start": shape.start, "num_tokens": num_tokens}
    got = torch_path.as_uint64(triton_path.block_checksums(on_device, ids, **how))
    expected = torch_path.as_uint64(torch_path.block_checksums(on_host, ids, **how))
    return int((got != expected).sum())


def speeds(rounds: int = ROUNDS) -> tuple[Speed, ...]:
    """The kernel, the torch path and a device-to-device copy on the KV of one prompt, 32 layers of 8 heads of 128.

    Prompts whose KV and its copy do not fit into half of the free memory are left out.
    """
    found = []
    for tokens in PROMPTS:
        if 4 * tokens * LAYERS * TOKEN_LAYER_BYTES <= torch.cuda.mem_get_info()[0]:
            found.append(_speed(tokens, rounds))
            torch.cuda.empty_cache()
    return tuple(found)


def _speed(tokens: int, rounds: int) -> Speed:
    layers, ids, flat = _prompt(tokens)
    table = triton_path.describe(layers, BLOCK_TOKENS)
    rows = triton_path.rows_of(ids, BLOCK_TOKENS, 0, tokens)
    on_device = torch.tensor(ids, device="cuda")
    target = torch.empty_like(flat)

    def by_torch() -> torch.Tensor:
        return torch_path.block_checksums(layers, on_device, block_size=BLOCK_TOKENS, start=0, num_tokens=tokens)

    jobs: dict[str, Launch] = {
        "triton": lambda: triton_path.sum_rows(table, rows),
        "torch": by_torch,
        "copy": lambda: target.copy_(flat),
    }
    ms = _device_medians(jobs, rounds)
    return Speed(tokens, flat.numel() * flat.element_size(), ms["triton"], ms["torch"], ms["copy"])


def step(rounds: int = ROUNDS) -> Step:
    """Time matrix products that stand for a forward, without and with the checksums of an 8K prompt behind them."""
    layers, ids, _ = _prompt(STEP_PROMPT)
    table = triton_path.describe(layers, BLOCK_TOKENS)
    rows = triton_path.rows_of(ids, BLOCK_TOKENS, 0, STEP_PROMPT)
    a = torch.randn(STEP_SIZE, STEP_SIZE, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(STEP_SIZE, STEP_SIZE, dtype=torch.bfloat16, device="cuda")
    host_copy = CudaHostCopy()

    def forward() -> None:
        for _ in range(16):
            torch.mm(a, b)

    def with_checksums() -> None:
        forward()
        host_copy.start({0: triton_path.sum_rows(table, rows)})

    ms = _device_medians({"without": forward, "with": with_checksums}, rounds)
    return Step(STEP_PROMPT, ms["without"], ms["with"])


def host_syncs() -> str | None:
    """What torch's sync detector says of a launch and the copy of its sums; None if nothing waited."""
    layers, ids, _ = _prompt(1024)
    table = triton_path.describe(layers, BLOCK_TOKENS)
    rows = triton_path.rows_of(ids, BLOCK_TOKENS, 0, 1024)
    host_copy = CudaHostCopy()
    host_copy.start({0: triton_path.sum_rows(table, rows)})[1].synchronize()  # compiled before anybody looks
    torch.cuda.set_sync_debug_mode("error")
    try:
        host_copy.start({0: triton_path.sum_rows(table, rows)})
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _prompt(tokens: int) -> tuple[list[LayerCache], list[int], torch.Tensor]:
    """The KV of one prompt in blocks of random order: layers, block ids, and all of its memory as one tensor."""
    blocks = tokens // BLOCK_TOKENS
    shape = (LAYERS, blocks, 2, HEADS, BLOCK_TOKENS, HEAD_DIM)
    kv = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
    layers = [LayerCache(n, 0, (kv[n, :, 0].transpose(1, 2), kv[n, :, 1].transpose(1, 2))) for n in range(LAYERS)]
    return layers, np.random.default_rng(0).permutation(blocks).tolist(), kv.reshape(-1)


def _device_medians(jobs: Mapping[str, Launch], rounds: int) -> dict[str, float]:
    """Milliseconds between two events around each job, all jobs in turn; the first round is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            began.record()
            job()
            ended.record()
            torch.cuda.synchronize()
            if number:
                samples[name].append(began.elapsed_time(ended))
    return {name: statistics.median(found) for name, found in samples.items()}
