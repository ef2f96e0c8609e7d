"""Plays a short soak: what a node holds for requests it gives back, whatever happens to them."""

from soak import CANCELLED, Soak, report


def test_a_short_soak_leaves_nothing_behind():
    soak = Soak(seconds=20, kill_interval_s=2, device="mock")
    measured = soak.run()
    print(report(soak, measured))
    assert soak.totals.wrong == []
    assert soak.totals.num_kills >= 3
    assert soak.totals.num_left > CANCELLED / 2 * soak.totals.num_requests
