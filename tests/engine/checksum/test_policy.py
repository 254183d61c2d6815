"""Every combination of the flags, against the table of POL-1."""

import itertools

import pytest

from engine.checksum.policy import ChecksumPolicy, ChecksumSettings, resolve
from engine.errors import StartupError

MODES = {"off": (False, False), "log": (True, False), "enforce": (True, True)}
BOOLEANS = (None, False, True)


@pytest.mark.req("POL-1")
@pytest.mark.parametrize(("enabled", "fail_closed"), list(itertools.product(BOOLEANS, BOOLEANS)))
def test_the_booleans_alone(enabled, fail_closed):
    settings = ChecksumSettings(enable_kv_checksum=enabled, kv_checksum_fail_closed=fail_closed)
    if fail_closed and not enabled:
        with pytest.raises(StartupError, match="without enable_kv_checksum=True"):
            resolve(settings)
    else:
        assert resolve(settings) == ChecksumPolicy(enabled is True, fail_closed is True, "fail")


@pytest.mark.req("POL-1")
@pytest.mark.parametrize(
    ("mode", "enabled", "fail_closed"), list(itertools.product(MODES, BOOLEANS, BOOLEANS)), ids=str
)
def test_a_mode_may_agree_with_the_booleans_only(mode, enabled, fail_closed):
    settings = ChecksumSettings(enabled, fail_closed, mode)
    means_enabled, means_closed = MODES[mode]
    if enabled in (None, means_enabled) and fail_closed in (None, means_closed):
        assert resolve(settings) == ChecksumPolicy(means_enabled, means_closed, "fail")
    else:
        with pytest.raises(StartupError, match=f"kv_checksum_mode={mode} contradicts"):
            resolve(settings)


@pytest.mark.req("POL-1")
@pytest.mark.parametrize("load_failure", ["fail", "recompute"])
@pytest.mark.parametrize("mode", MODES)
def test_the_load_failure_policy_is_its_own(mode, load_failure):
    settings = ChecksumSettings(kv_checksum_mode=mode, kv_load_failure_policy=load_failure)
    assert resolve(settings) == ChecksumPolicy(*MODES[mode], load_failure)


@pytest.mark.req("POL-1")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (ChecksumSettings(kv_checksum_mode="loud"), "'loud': use off, log or enforce"),
        (ChecksumSettings(kv_load_failure_policy="retry"), "'retry': use fail or recompute"),
    ],
)
def test_unknown_values_are_refused(settings, says):
    with pytest.raises(StartupError, match=says):
        resolve(settings)
