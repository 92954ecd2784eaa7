"""What a rank measures while it starts, from readings of a device that is not here."""

from __future__ import annotations

from engine.memory_gauge import MemoryGauge, Reading


def test_each_stage_of_a_start_gets_what_it_took() -> None:
    """Of 1000: 50 context, 300 pools, 400 weights, 20 of state, 30 of graphs' tensors, 12 of graphs, 8 of others."""
    readings = iter(
        [
            Reading(free=650, device=1000, allocated=300, reserved=300),
            Reading(free=225, device=1000, allocated=720, reserved=725),
            Reading(free=183, device=1000, allocated=750, reserved=755),
            Reading(free=175, device=1000, allocated=750, reserved=755),
        ]
    )
    gauge = MemoryGauge(lambda: next(readings))
    gauge.loaded(state_bytes=20)
    gauge.captured()
    found = gauge.measured({1: 600})
    assert (found.device_bytes, found.free_bytes, found.graph_nodes) == (1000, 175, {1: 600})
    assert found.weight_bytes == 400
    assert found.workspace_bytes == 755 - 300 - 400
    assert found.graph_bytes == 12
    known = 300 + found.weight_bytes + found.workspace_bytes + found.graph_bytes
    assert found.device_bytes - found.free_bytes - known == 50 + 8
