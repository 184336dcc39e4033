"""`experiments/verification_rules.py`: what it reports follows from what the rules did."""

import json

import numpy as np
import pytest
import tiny

verification_rules = tiny.experiment("verification_rules")


def test_summary_is_over_prompts_and_paired():
    base = np.array([[[0, 1], [2, 1]]])  # one step, two repeats, two prompts: means 1 and 1
    more = base + np.array([1, 3])
    found = {rule: (accepted, accepted) for rule, accepted in (("standard", base), ("lossy_typical", more))}
    first, second = verification_rules.summary(found, ("standard", "lossy_typical"))
    assert first["tokens_per_step"] == 2 and first["ratio"] == 1 and first["ratio_error"] == 0 and first["lossless"]
    assert second["tokens_per_step"] == 4 and second["ratio"] == 2 and not second["lossless"]
    assert second["error"] == pytest.approx(1) and second["ratio_error"] == pytest.approx(0.5)


def test_acceptances_are_by_place_among_the_siblings():
    accepted = np.array([[[1, 1, 0, 1]]])
    row = np.array([[[1, 2, 0, 2]]])
    assert verification_rules.acceptances((accepted, row)) == [0.25, 0.5] + [0] * (verification_rules.SIBLINGS - 2)


@pytest.mark.slow
def test_rules_judge_the_same_drafts(monkeypatch, capsys):
    """A small model drafts for itself with all its layers: every lossless rule that may keeps every draft."""
    model = tiny.with_text(tiny.tiny())
    monkeypatch.setattr(verification_rules.spec_jax, "load_model", lambda name: model)
    monkeypatch.setattr(
        verification_rules, "SHAPES", {"chain": (verification_rules.CHAIN, ("standard", "block", "coupled", "kseq"))}
    )
    monkeypatch.setattr(verification_rules, "read", lambda *_: ["abc abd", "bcd", "a b a b", "cab"])
    drafter = json.dumps({"method": "layer_skip", "exit_layer": 2})
    options = ["--batch", "2", "--steps", "2", "--repeats", "2", "--temperatures", "1", "--json"]
    verification_rules.main(["--drafter", drafter, *options])
    rows = json.loads(capsys.readouterr().out)["rows"]
    kept = {row["rule"]: row["tokens_per_step"] for row in rows if row["shape"] == "chain"}
    assert kept["standard"] == kept["block"] == kept["kseq"] == 7 > kept["coupled"]
    assert {row["shape"] for row in rows} == {"chain", "tree, Sequoia"}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--steps", "0"], "steps=0 must be"),
        (["--temperatures", "0"], "must be above 0"),
        (["--batch", "50"], "--batch 50"),
    ],
)
def test_bad_input_is_one_clear_line(options, message, capsys, monkeypatch):
    monkeypatch.setattr(verification_rules.spec_jax, "load_model", lambda name: tiny.with_text(tiny.tiny()))
    with pytest.raises(SystemExit) as status:
        verification_rules.main(options)
    assert status.value.code == 2
    assert message in capsys.readouterr().err
