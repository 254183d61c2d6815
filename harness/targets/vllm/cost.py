"""What the checksums of integrations/vllm cost in time to first token on a vLLM: interleaved, with an interval.

    python -m harness.targets.vllm.cost --prompt-tokens 1000 --blocks 40

One pair of engines, one request at a time: P prefills, D loads and samples a token. Each block sends one prompt four
times, checksums off and on in the order A B B A or B A A B, with empty prefix caches; nothing watches meanwhile. Blocks
are judged by the statistics of `harness/overhead` (docs/overhead.md), and their number is fixed beforehand.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine.checksum.policy import ChecksumSettings
from engine.errors import KVChaosError
from engine.tokenizer import BOS
from harness.overhead.design import arms
from harness.overhead.rows import ARM_ON, Row, RowsFile
from harness.overhead.stats import estimate
from harness.seeds import derive
from harness.targets.vllm.pair import VLLMPair
from harness.targets.vllm.settings import Settings, check, say
from harness.targets.workload import CONSUMER, PRODUCER
from reports.overhead.results import Estimate

_WARMUP = 2
_OFF, _ON = ChecksumSettings(kv_checksum_mode="off"), ChecksumSettings(kv_checksum_mode="enforce")


class CostStudy:
    """One study on a pair that is up. Rows go to `rows` as they come."""

    def __init__(self, pair: VLLMPair, rows: RowsFile, prompt_tokens: int, seed: int) -> None:
        self._pair = pair
        self._keep = rows
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self._began = time.monotonic()
        self.cell = f"{prompt_tokens}tok-low"
        self.rows: list[Row] = []

    def run(self, blocks: int) -> Estimate:
        """All blocks, after some that are not counted. Raises RoleError or RoleGoneError."""
        for block in range(-_WARMUP, blocks):
            for slot, arm in enumerate(arms(block)):
                row = self._row(block, slot, arm)
                self._keep.append(row)
                self.rows.append(row)
        return estimate(self.rows, self.cell, seed=self._seed)

    def _row(self, block: int, slot: int, arm: str) -> Row:
        name = f"{self.cell}-b{block}"
        rng = random.Random(derive("cost", self._seed, block))
        prompt = [rng.randrange(BOS) for _ in range(self._prompt_tokens)]
        self._pair.settle()
        self._pair.prepare(_ON if arm == ARM_ON else _OFF)
        sent = time.monotonic()
        params = self._ask(PRODUCER, name, prompt, {"do_remote_decode": True})["params"]
        answer = self._ask(CONSUMER, name, prompt, params)
        done = time.monotonic()
        return Row(
            study="overhead",
            block=max(block, -1),
            slot=slot,
            arm=arm,
            cell=self.cell,
            prompt_tokens=self._prompt_tokens,
            load="low",
            prompt_id=name,
            request_id=f"{name}-s{slot}",
            warmup=int(block < 0),
            intended_s=sent - self._began,
            sent_s=sent - self._began,
            first_token_s=done - self._began,
            end_s=done - self._began,
            ttft_s=done - sent,
            itl_s=None,
            output_tokens=len(answer["tokens"]),
            status=200 if answer["tokens"] else 0,
            error=answer["error"] or ("" if answer["tokens"] else "no answer"),
            verdict="",
        )

    def _ask(self, side: str, name: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        request = {"name": name, "prompt": prompt, "max_tokens": 1, "params": params, "follow": False}
        (answer,) = self._pair.generate(side, [request], lambda event: None, lambda waiting, why: None)
        return answer


def told(found: Estimate) -> str:
    """An estimate in a few lines."""
    return (
        f"{found.cell}: {found.blocks} blocks of 4 requests\n"
        f"median TTFT {found.median_a_s * 1e3:.1f} ms without checksums, {found.median_b_s * 1e3:.1f} ms with\n"
        f"difference {found.diff_s * 1e3:+.2f} ms, 90% interval {found.ci_low_s * 1e3:+.2f} to "
        f"{found.ci_high_s * 1e3:+.2f} ms\n"
        f"relative {found.relative * 100:+.2f}%, 90% interval {found.relative_low * 100:+.2f}% to "
        f"{found.relative_high * 100:+.2f}%: {found.verdict}. {found.why}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run a study and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=Path("vllm-cost-rows.csv"), help="a new file for every request")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args(arguments)
    say(options.vllm_python, options.model)
    try:
        found = _study(options)
    except KVChaosError as error:
        print(f"kvchaos: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.stdout.write(told(found) + "\n")


def _study(options: argparse.Namespace) -> Estimate:
    settings = Settings.of_environment()
    check(settings)
    with RowsFile(options.rows) as rows:
        pair = VLLMPair(settings)
        try:
            return CostStudy(pair, rows, options.prompt_tokens, options.seed).run(options.blocks)
        finally:
            pair.stop()


if __name__ == "__main__":
    main()
