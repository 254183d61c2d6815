"""A short soak: `kvchaos soak` with its defaults is the long one."""

from __future__ import annotations

from harness.soak import SoakPlan, soak


def test_a_short_soak() -> None:
    result = soak(SoakPlan(requests=40, concurrency=8, fault_rate=10, warm=20))
    assert result.problems == ()
    assert result.outcomes == {"mismatch, recomputed": 4, "verified, served": 36}
    assert (result.requests, result.faulted, result.flipped) == (40, 4, 4)
    assert set(result.rss_kib) == {"producer", "consumer", "proxy"}
    assert all(min(kib) > 1024 for kib in result.rss_kib.values())
