"""The README's drafter is complete: it runs as printed and gives plain decoding's text."""

import pathlib
import re

from tiny import plain, prompts_of, tiny

from spec_jax.generation import generate
from spec_jax.sampling_params import SamplingParams

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_drafter_runs_as_printed():
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "class Repeat" in b)
    names = {"__name__": "readme"}
    exec(block, names)
    model, params = tiny(), SamplingParams(max_tokens=12)
    prompts = prompts_of(model, [5, 1, 17])
    result = generate(model, prompts, None, params, drafter=(names["Repeat"](), ()))
    assert [s.token_ids for s in result.sequences] == plain(model, prompts, params)
    assert result.stats.num_draft_tokens > 0
