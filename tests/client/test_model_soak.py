"""Plays a short soak of several models: no request is lost, and no memory, however files and models come and go."""

import pytest
from model_soak import ModelSoak


@pytest.mark.parametrize(
    "seconds, num_changes, num_ends",
    [(8, 12, 1), pytest.param(40, 60, 6, marks=pytest.mark.night)],
)
def test_a_short_soak_of_several_models_loses_nothing(tmp_path, seconds, num_changes, num_ends):
    soak = ModelSoak(tmp_path)
    print("\n".join(soak.run(seconds, num_changes)))
    for number in range(num_ends):
        soak.end(number)
    assert soak.wrong == []
    assert all(soak.counts[f"{name} answered"] > 0 for name in ("fox", "owl", "hare"))
