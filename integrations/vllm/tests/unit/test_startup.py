"""What an engine refuses to start with, and what it starts without (POL-1, CAR-3, CAR-5)."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from kvchaos_vllm.errors import StartupError
from kvchaos_vllm.settings import DISABLED
from kvchaos_vllm.startup import usable_policy, warn_of_version


def config(mode="enforce", *, speculative=None, dcp=1, pcp=1, executor="mp"):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"kv_checksum_mode": mode}),
        speculative_config=speculative,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=pcp,
            distributed_executor_backend=executor,
        ),
    )


@pytest.mark.parametrize(("mode", "expected"), [("enforce", (True, True)), ("log", (True, False))])
def test_a_plain_engine_keeps_what_it_was_asked_for(mode, expected):
    policy = usable_policy(config(mode))
    assert (policy.enabled, policy.fail_closed) == expected


@pytest.mark.parametrize("mode", ["enforce", "log"])
def test_speculative_decoding_is_refused_by_name(mode):
    with pytest.raises(StartupError, match=r"KV checksums with speculative decoding \(eagle\)"):
        usable_policy(config(mode, speculative=SimpleNamespace(method="eagle")))


@pytest.mark.parametrize(("dcp", "pcp"), [(2, 1), (1, 2)])
def test_context_parallelism_is_refused_when_fail_closed_and_else_disables_checksums(dcp, pcp, caplog):
    with pytest.raises(StartupError, match=rf"context parallelism \(dcp {dcp}, pcp {pcp}\)"):
        usable_policy(config("enforce", dcp=dcp, pcp=pcp))
    with caplog.at_level(logging.WARNING):
        assert usable_policy(config("log", dcp=dcp, pcp=pcp)) == DISABLED
    assert "KV checksums are disabled: it has context parallelism" in caplog.text


def test_ranks_that_do_not_report_to_one_scheduler_are_not_supported(caplog):
    with pytest.raises(StartupError, match="do not report to one scheduler"):
        usable_policy(config("enforce", executor="external_launcher"))
    assert usable_policy(config("log", executor="external_launcher")) == DISABLED


def test_an_engine_without_checksums_may_have_all_of_that():
    assert not usable_policy(config("off", speculative=SimpleNamespace(method="eagle"), dcp=2)).enabled


def test_a_version_that_nobody_has_tried_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_version("0.32.1")
        assert caplog.text == ""
        warn_of_version("0.33.0")
    assert "tested with vLLM 0.32.x, and this is 0.33.0" in caplog.text
