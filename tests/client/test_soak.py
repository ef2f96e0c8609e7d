"""Plays a short soak: a node releases what it holds for requests, however they end."""

import pytest
from soak import CANCELLED, Soak, report


@pytest.mark.parametrize(
    "device, transport, seconds, num_kills",
    [
        ("mock", "shm", 0, 3),
        pytest.param("mock", "shm", 20, 8, marks=pytest.mark.night),
        pytest.param("cpu", "tcp", 20, 8, marks=pytest.mark.night),
    ],
)
def test_a_short_soak_leaves_nothing_behind(device, transport, seconds, num_kills):
    soak = Soak(seconds, kill_interval_s=1, device=device, transport=transport, num_kills=num_kills)
    measured = soak.run()
    print(report(soak, measured))
    assert soak.totals.wrong == []
    assert soak.totals.num_left > CANCELLED / 2 * soak.totals.num_requests
