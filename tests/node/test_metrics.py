"""The metrics as Prometheus reads them: whole, although they are rendered in parts."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from moonpool.observe.metrics import SERIES_PER_PART, exposition
from tests.node.desk import Desk


def test_a_family_of_many_series_is_rendered_in_parts_that_make_one() -> None:
    desk = Desk()
    for operation in range(5 * SERIES_PER_PART):
        desk.node.catalogue.counters.stage(f"operation {operation}", "query", 0, 0.001)
    parts = list(exposition(desk.node))
    assert max(part.count(b"_bucket{") for part in parts) <= SERIES_PER_PART * 16
    found = list(text_string_to_metric_families(b"".join(parts).decode()))
    assert len({family.name for family in found}) == len(found), "each family stands there once"
    (stages,) = (family for family in found if family.name == "moonpool_stage_s")
    counts = [sample for sample in stages.samples if sample.name.endswith("_count")]
    assert len(counts) == 5 * SERIES_PER_PART
    assert all(sample.value == 1 for sample in counts)
