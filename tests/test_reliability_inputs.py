"""A sample of the bad and edge inputs I1-I11 of the reliability campaign; all 5,380 of them: python -m tests.reliability.run I1 I2 ... I11."""
import pytest
from reliability.table import load_tables

FAMILIES = {k: f for k, f in load_tables("I").items() if k[0] == "I"}


def test_the_families_are_those_of_the_table():
    assert list(FAMILIES) == [f"I{i}" for i in range(1, 12)]
    assert sum(f.goal for f in FAMILIES.values()) == 5380 and sum(f.sample for f in FAMILIES.values()) >= 600


@pytest.mark.parametrize("name", FAMILIES)
def test_every_input_is_answered(name):
    r = FAMILIES[name](FAMILIES[name].sample, seed=1)
    assert r.ok and r.tried == FAMILIES[name].sample, "\n".join(r.bad[:3])
