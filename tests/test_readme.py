"""The README's Python runs as printed, and its drafter gives plain decoding's text."""

import json
import pathlib
import re

import pytest
from tiny import plain, prompts_of, tiny

from spec_jax.generation import generate
from spec_jax.sampling_params import SamplingParams

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.slow
def test_the_examples_run_as_printed(capsys):
    names, printed, results = {"__name__": "readme"}, [], []
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        if "class Repeat" not in block:
            exec(block, names)
            printed.append(capsys.readouterr().out)
            results.append(names["result"])
    assert len(printed) > 4 and printed[1].strip()
    assert names["stream"].result.sequences[0].text in printed[2]
    assert int(printed[3].split()[-1]) > 20  # cached tokens of the second turn
    assert [s.prompt_index for s in results[4].sequences] == list(range(20))
    lines = printed[5].splitlines()
    assert re.fullmatch(r"(yes|no), because [a-z ]{1,40}\.", lines[0])
    assert isinstance(json.loads(lines[1])["name"], str)


def test_the_example_drafter_runs_as_printed():
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "class Repeat" in b)
    names = {"__name__": "readme"}
    exec(block, names)
    model, params = tiny(), SamplingParams(max_tokens=12)
    prompts = prompts_of(model, [5, 1, 17])
    result = generate(model, prompts, None, params, drafter=(names["Repeat"](), ()))
    assert [s.token_ids for s in result.sequences] == plain(model, prompts, params)
    assert result.stats.num_draft_tokens > 0
