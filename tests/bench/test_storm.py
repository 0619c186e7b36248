from __future__ import annotations

from moonpool.bench.storm import step_figures

INF = float("inf")


def test_the_longest_step_is_the_nodes_own_figure_where_the_storm_made_it() -> None:
    before = {0.001: 90, 0.002: 95, 0.005: 100, INF: 100}
    after = {0.001: 190, 0.002: 196, 0.005: 202, INF: 203}
    assert step_figures(0.004, 0.0071, before, after) == {
        "loop_steps": 103,
        "loop_steps_over_2ms": 2,
        "loop_step_max_us": 7100.0,
    }


def test_an_older_longest_step_gives_way_to_the_bound_of_the_storms_own() -> None:
    before = {0.001: 90, 0.002: 95, 0.005: 99, INF: 100}
    after = {0.001: 190, 0.002: 196, 0.005: 200, INF: 201}
    assert step_figures(0.03, 0.03, before, after) == {
        "loop_steps": 101,
        "loop_steps_over_2ms": 0,
        "loop_step_max_us": 2000.0,
    }


def test_without_metrics_only_the_longest_ever_is_known() -> None:
    assert step_figures(0.03, 0.03, {}, {}) == {"loop_step_max_us": 30000.0}
