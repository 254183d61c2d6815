"""Settings that no engine of kvchaos has: types, unknown names, the switch."""

from __future__ import annotations

import pytest
from kvchaos_vllm.errors import StartupError
from kvchaos_vllm.settings import ChecksumSettings, resolve


def test_a_connector_s_other_settings_are_not_looked_at():
    extra = {"kv_lease_duration": 3, "connectors": [], "backends": ["UCX"], "kv_recompute_threshold": 1}
    assert not resolve(ChecksumSettings.from_extra_config(extra)).enabled


@pytest.mark.parametrize("name", ["enable_kv_checksum", "kv_checksum_fail_closed", "allow_checksum_switch"])
@pytest.mark.parametrize("value", ["true", 1, 0, "no", []])
def test_a_flag_that_is_no_boolean_is_refused_by_name(name, value):
    with pytest.raises(StartupError, match=f"{name} is .*: use true or false"):
        ChecksumSettings.from_extra_config({name: value})


@pytest.mark.parametrize("name", ["kv_checksums_fail_closed", "kv_checksum_policy", "enable_kv_checksums"])
def test_a_misspelt_setting_is_refused(name):
    """Else a deployment that means to be protected is not."""
    with pytest.raises(StartupError, match=f"'{name}': the settings are enable_kv_checksum"):
        ChecksumSettings.from_extra_config({name: True})


def test_the_switch_is_off_unless_asked_for():
    assert not resolve(ChecksumSettings.from_extra_config({"kv_checksum_mode": "enforce"})).switchable
    extra = {"kv_checksum_mode": "enforce", "allow_checksum_switch": True}
    assert resolve(ChecksumSettings.from_extra_config(extra)).switchable
