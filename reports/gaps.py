"""The known gaps, one line each: what these checksums cannot see. docs/spec.md says more, under the same ids."""

from __future__ import annotations

GAPS = {
    "GAP-1": "The producer's bytes were already wrong when it summed them.",
    "GAP-2": "A write after the verification, or a request that was never loaded from another engine.",
    "GAP-3": "A KV cache group that both sides skip while another group verifies.",
    "GAP-4": "Block positions that are not compared.",
    "GAP-5": "Parameters and checksums of another request, exchanged together.",
    "GAP-6": "Right bytes with a wrong meaning: model revision, scales, rotary settings, the first token.",
    "GAP-7": "KV that does not come from the producer: offload tiers, the local prefix cache.",
    "GAP-8": "Bit flips that cancel out in the sum; two of bit 63 always do.",
    "GAP-9": "A changed character in the checksums themselves.",
    "GAP-10": "Two pieces of equal factor, exchanged.",
    "GAP-11": "Other changes that cancel out, such as +d, -2d, +d.",
    "GAP-12": "Rows that the consumer reads and the producer never sent or summed.",
    "GAP-13": "Loads that fail-closed serves unchecked, by design.",
}
