"""Rows that a step does not need are not written by the CPU kernels: nothing may read what happens to lie there.

Run as a script it prints what a packed model writes under many drafters, rules and options. The test compares that of
normal kernels with that of kernels which fill such rows with NaN.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import conftest  # noqa: F401  (as a script too: both runs share their compiled programs)
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_cpu import kernels  # noqa: F401

from spec_jax.generation import generate
from spec_jax.kernels import cpu
from spec_jax.sampling_params import SamplingParams

TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 4, "logprobs": 2},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {5: -4.0}, "logprobs": 0},
}


def drafters(model):
    near = tiny.packed(tiny.perturbed(tiny.tiny(), 0.1))
    other = {"num_speculative_tokens": 3, "method": "draft_model", "model": near}
    tree = {"method": "draft_model", "model": near, "speculative_token_tree": TREE}
    yield "plain", None
    yield "layer_skip", {"method": "layer_skip", "num_speculative_tokens": 3, "exit_layer": 1}
    yield "auto", {"method": "ngram", "num_speculative_tokens": 4, "verify_width": "auto"}
    for rule in ("coupled", "block"):
        yield f"draft_model {rule}", {**other, "rejection_sample_method": rule}
    for rule in ("coupled", "traversal"):
        yield f"tree {rule}", {**tree, "rejection_sample_method": rule}


def written():
    """Ids and log-probs by drafter and options."""
    model = tiny.packed(tiny.tiny())
    prompts = tiny.prompts_of(model, (3, 9, 20), seed=11)
    found = {}
    for name, config in drafters(model):
        for label, options in OPTIONS.items():
            sampling = [SamplingParams(max_tokens=n, **options) for n in (14, 3, 9)]
            result = generate(model, prompts, config, sampling, max_batch_size=2)
            found[f"{name} {label}"] = [
                [s.token_ids, [{str(i): p.logprob for i, p in at.items()} for at in s.logprobs or ()]]
                for s in result.sequences
            ]
    return found


def poisoned():
    """Whether unwritten rows hold NaN here."""
    out = cpu.rms_norm(jnp.ones((2, 16)), jnp.ones(16), 1e-5, jnp.array([True, False]))
    return bool(np.isnan(np.asarray(out)[1]).all())


@pytest.mark.slow
def test_nothing_reads_the_rows_that_are_not_written():
    compiler = os.environ.get("CXX") or next(filter(cpu.shutil.which, cpu.COMPILERS))
    found = []
    for flags in ("", " -DSPEC_JAX_POISON"):
        path = os.pathsep.join(str(Path(__file__).parents[i]) for i in (0, 1, 2))
        environment = os.environ | {"CXX": compiler + flags, "PYTHONPATH": path}
        command = [sys.executable, __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout))
    (normal, clean), (poison, foul) = found
    assert (normal, poison) == (False, True)
    assert len(clean) == len(foul) == 21
    assert [name for name in clean if json.dumps(clean[name]) != json.dumps(foul[name])] == []


if __name__ == "__main__":
    print(json.dumps([poisoned(), written()]))
