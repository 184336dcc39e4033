"""`experiments/rule_costs.py`: every rule on all drafts that it takes, and its time beside the forward pass."""

import json

import pytest
import tiny

from spec_jax import rule_names

rule_costs = tiny.experiment("rule_costs")


def test_every_rule_is_measured_on_every_draft_that_it_takes():
    found = {(draft, rule) for draft, rule, _ in rule_costs.configurations()}
    trees = set(rule_names.RULES) - set(rule_names.CHAIN_RULES)
    assert found == {("chain", rule) for rule in rule_names.RULES} | {("tree", rule) for rule in trees}
    for _, _, config in rule_costs.configurations():
        asked = rule_costs.parse_speculative_config(config)
        assert asked.num_speculative_tokens == rule_costs.ROWS - 1


@pytest.mark.slow
def test_a_rule_s_time_is_a_share_of_the_forward_pass(monkeypatch, capsys):
    monkeypatch.setattr(rule_costs.spec_jax, "load_model", lambda name: tiny.with_text(tiny.tiny(context=512)))
    monkeypatch.setattr(rule_costs, "DRAFTER", {"method": "layer_skip", "exit_layer": 1})
    monkeypatch.setattr(rule_costs, "SAMPLINGS", {"temperature 1": {"temperature": 1.0}})
    monkeypatch.setattr(rule_costs, "model_input", lambda *_: "abc abd")
    options = ["--batch", "2", "--steps", "1", "--repeats", "1", "--rules", "standard", "--json"]
    rule_costs.main(options)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["draft"], row["rule"]) == ("chain", "standard") and row["verify_ms"] > 0 < row["forward_ms"]
    assert row["share"] == pytest.approx(row["verify_ms"] / row["forward_ms"]) and row["added"] < row["share"]


def test_bad_input_is_one_clear_line(capsys):
    with pytest.raises(SystemExit) as status:
        rule_costs.main(["--repeats", "0"])
    assert status.value.code == 2
    assert "repeats=0 must be" in capsys.readouterr().err
