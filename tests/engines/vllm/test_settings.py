from __future__ import annotations

from typing import Any

import pytest

from moonpool.engines.vllm.settings import Settings, parse_settings
from moonpool.errors import ConfigError

EXTREMES: dict[str, tuple[Any, Any]] = {
    "url": ("unix:/dev/shm/pool", ""),
    "tokens_per_object": (64, 0),
    "save": ("all", "everything"),
    "seen_times": (3, 0),
    "admission": ("always", "never"),
    "load_min_tokens": (0, -1),
    "verify": (True, "perhaps"),
    "shadow_rate": (0.5, 1.5),
    "shadow_tolerance": (0, -0.1),
    "lookup_timeout_s": (0.001, 1),
    "load_timeout_s": (30, 0),
    "store_inflight_bytes": ("48GiB", "48G"),
    "staging_bytes": ("64MiB", "1kB"),
    "failures_max": (1, 0),
    "retry_s": (0.5, 0),
    "tenant": ("a", 7),
    "events": (True, 1),
}
"""For each setting a value that is taken and one that is refused."""


def test_nothing_given_is_every_default() -> None:
    assert parse_settings({}) == Settings()


def test_every_setting_is_tried_here() -> None:
    assert set(EXTREMES) == set(Settings.__struct_fields__)


@pytest.mark.parametrize("key", EXTREMES)
def test_a_setting_is_taken(key: str) -> None:
    given = EXTREMES[key][0]
    settings = parse_settings({key: given})
    assert getattr(settings, key) == (given if not key.endswith("_bytes") else getattr(settings, key))
    assert getattr(settings, key) != getattr(Settings(), key)


@pytest.mark.parametrize("key", EXTREMES)
def test_what_cannot_be_is_refused_with_the_key(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_settings({key: EXTREMES[key][1]})


def test_sizes_are_read_as_people_write_them() -> None:
    settings = parse_settings({"store_inflight_bytes": "48GiB", "staging_bytes": 1 << 22})
    assert (settings.store_inflight_bytes, settings.staging_bytes) == (48 << 30, 1 << 22)


def test_a_value_out_of_bounds_names_the_bounds() -> None:
    with pytest.raises(ConfigError, match=r"from 0 to 0\.05 s"):
        parse_settings({"lookup_timeout_s": 2})


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'shadow_rate'"):
        parse_settings({"shadow-rates": 0.1})


@pytest.mark.parametrize("value", [True, float("nan"), None, "much"])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_settings({"shadow_rate": value})


def test_a_truth_may_be_written_as_text() -> None:
    assert parse_settings({"verify": "true"}).verify
    assert not parse_settings({"verify": "False"}).verify
