"""`experiments/leviathan_tables.py`: the formulas meet the printed tables, and the compiled rules meet the formulas."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from spec_jax import planner

SPEC = importlib.util.spec_from_file_location(
    "leviathan_tables", Path(__file__).parent.parent / "experiments" / "leviathan_tables.py"
)
leviathan_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(leviathan_tables)
ROWS = leviathan_tables.read_rows()


def test_table_1_is_the_formulas_to_the_last_digit():
    rows = [row for row in ROWS if row["table"] == 1]
    assert len(rows) == 6
    for row in rows:
        alpha, gamma = row["alpha"], int(row["gamma"])
        assert planner.walltime_improvement(alpha, gamma) == pytest.approx(row["printed_speed"], abs=0.0051)
        assert planner.operations_factor(alpha, gamma) == pytest.approx(row["printed_operations"], abs=0.0051)


def test_table_4_is_the_formula_within_what_its_rounding_leaves():
    rows = [row for row in ROWS if row["table"] == 4]
    assert len(rows) == 12
    for row in rows:
        speed = planner.walltime_improvement(row["alpha"], int(row["gamma"]), row["c"])
        assert speed == pytest.approx(row["printed_speed"], abs=0.07)


@pytest.mark.parametrize("alpha", [0.05, 0.53, 0.9])
def test_the_laws_overlap_by_alpha(alpha):
    p, q = leviathan_tables.laws(alpha)
    assert p.sum() == pytest.approx(1) and q.sum() == pytest.approx(1)
    assert np.minimum(p, q).sum() == pytest.approx(alpha)


def test_the_rules_emit_what_they_should():
    """The token rule as many as the formula says, four standard errors at most; block verification more."""
    alpha, gamma, samples = 0.7, 3, 4000
    want = planner.AcceptanceRates((alpha,)).expected_tokens(gamma)
    token = leviathan_tables.simulate("standard", alpha, gamma, samples)
    assert token == pytest.approx(want, abs=4 * 1.2 / samples**0.5)
    assert leviathan_tables.simulate("block", alpha, gamma, samples) > token + 0.1


def test_bad_input_is_one_clear_line(capsys):
    with pytest.raises(SystemExit) as status:
        leviathan_tables.main(["--samples", "0"])
    assert status.value.code == 2
    assert "samples=0 must be" in capsys.readouterr().err


def test_every_row_is_printed_with_its_interval(capsys, monkeypatch):
    monkeypatch.setattr(leviathan_tables, "simulate", lambda rule, alpha, gamma, samples: 2.0)
    leviathan_tables.main(["--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["table"] for row in rows] == [1] * 6 + [4] * 12
    for row in rows:
        assert row["lowest"] < row["formula_speed"] < row["highest"]
        if row["table"] == 4:
            assert row["lowest"] - 0.05 <= row["printed_speed"] <= row["highest"] + 0.05
