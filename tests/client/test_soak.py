"""Plays a short soak: what a node holds for requests it gives back, whatever happens to them."""

import pytest
from soak import CANCELLED, Soak, report


@pytest.mark.parametrize("device, transport", [("mock", "shm"), ("cpu", "tcp")])
def test_a_short_soak_leaves_nothing_behind(device, transport):
    soak = Soak(seconds=20, kill_interval_s=2, device=device, transport=transport)
    measured = soak.run()
    print(report(soak, measured))
    assert soak.totals.wrong == []
    assert soak.totals.num_kills >= 3
    assert soak.totals.num_left > CANCELLED / 2 * soak.totals.num_requests
