from __future__ import annotations

from moonpool.bench.bars import Row, local_rows, number, storm_rows

LOCAL = {
    "memcpy_gbps": {"2MB": 10.0, "32MB": 10.0},
    "get_into_gbps": {"2MB": 9.1, "32MB": 9.1},
    "put_gbps": {"2MB": 8.6, "32MB": 8.6},
    "get_first_gbps": {"2MB": 7.0, "32MB": 6.0},
    "put_first_gbps": {"2MB": 7.0, "32MB": 7.0},
    "get_second_gbps": {"2MB": 9.0, "32MB": 9.0},
    "put_second_gbps": {"2MB": 9.0, "32MB": 9.0},
    "view_us": {"16x2MB": 90.0},
    "view_us_40x32MB": 120.0,
    "roundtrip_us": {"p50": 30.0, "p99": 60.0, "p999": 200.0, "max": 900.0},
    "roundtrip_loaded_us": {"p50": 60.0, "p99": 2500.0, "p999": 4000.0, "max": 5000.0},
    "exists_us": {"1": 4.0, "40_new": 20.0, "625_new": 120.0, "625_again": 90.0},
    "small_put_per_s": 95_000,
    "table_put_per_s": 70_000,
    "table_get_per_s": 110_000,
    "small_get_per_s": 150_000,
}


def verdicts(result: dict[str, object]) -> dict[str, bool | None]:
    return {row.name: row.met for row in local_rows(result)}


def test_a_ratio_is_held_against_the_bar_of_its_size() -> None:
    found = verdicts(LOCAL)
    assert found["get_into / copyto, 2MB"] is True
    assert found["get_into / copyto, 32MB"] is False  # the same 0.91 misses the bar of large objects
    assert found["put / copyto, 2MB"] is True
    assert found["put / copyto, 32MB"] is False
    assert found["get_into, first pass / second, 2MB"] is True
    assert found["get_into, first pass / second, 32MB"] is False


def test_times_and_rates_are_held_against_theirs_in_the_right_direction() -> None:
    found = verdicts(LOCAL)
    assert found["round trip p50, idle"] is True
    assert found["round trip p99, loaded"] is False
    assert found["exists, 625 new"] is True
    assert found["exists, 625 again"] is False
    assert found["4 KiB puts, batches of 32"] is True
    assert found["4 KiB gets, batches of 32"] is False
    assert found["numpy.copyto, 2MB"] is None  # a baseline has no bar


def test_a_peer_adds_the_lines_that_compare_with_it() -> None:
    peer = {"get_into_gbps": {"2MB": 1.0, "32MB": 2.0}, "put_gbps": {"2MB": 1.0}, "exists_us": {"625_new": 300.0}}
    found = verdicts(LOCAL | {"mooncake": peer})
    assert found["get_into / Mooncake's, 2MB"] is True
    assert found["get_into / Mooncake's, 32MB"] is False
    assert found["put / Mooncake's, 2MB"] is True
    assert "put / Mooncake's, 32MB" not in found
    assert found["exists of 625 new / Mooncake's"] is True
    assert not any("Mooncake" in name for name in verdicts(LOCAL))


def test_the_storm_is_held_against_ten_idle_medians_and_five_milliseconds_whichever_is_less() -> None:
    calm = {"p50": 40.0, "p99": 60.0, "p999": 100.0, "max": 300.0}
    slow = {"p50": 900.0, "p99": 1000.0, "p999": 1100.0, "max": 1200.0}
    result = {
        "clients": 64, "batches_per_s": 100.0, "evicted_per_s": 400.0, "killed": 30, "loop_step_max_us": 2100.0,
        "exists_us": {"idle": calm, "storm": calm | {"p999": 399.0}},
        "match_us": {"idle": calm, "storm": calm | {"p999": 401.0}},
        "acquire_us": {"idle": slow, "storm": slow | {"p999": 5001.0}},
        "left": {"pins": 0, "reservations": 1, "quarantined_bytes": 0},
    }  # fmt: skip
    found = {row.name: row.met for row in storm_rows(result)}
    assert found["exists p99.9, storm"] is True
    assert found["match p99.9, storm"] is False
    assert found["acquire p99.9, storm"] is False
    assert found["longest loop step"] is False
    assert found["pins left"] is True
    assert found["reservations left"] is False


def test_figures_are_printed_with_the_digits_that_matter() -> None:
    assert [number(value) for value in (0.8765, 9.87, 123.4, 98_765.4)] == ["0.876", "9.87", "123", "98,765"]
    assert Row("x", 1.0, "", 0.9, at_least=True).bar == "≥ 0.9"
    assert Row("x", 1.0, "", 2000).bar == "≤ 2,000"
    assert Row("x", 1.0, "").bar == ""
