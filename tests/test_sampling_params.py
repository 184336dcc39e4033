"""Every field of `SamplingParams`: bad values get one error that names them, good ones change what comes out."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.generation import generate
from spec_jax.requests import make_requests, sampling_state
from spec_jax.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")


def show(value):
    """A test's name, the same in every process: without the addresses of functions."""
    return re.sub(r" at 0x\w+", "", str(value))


def no_mask(state, token):
    return state, jnp.ones(97, bool)


BAD = {
    "n": [0, -1, 1.5, True, "2", None],
    "temperature": [-1, NAN, INF, "hot", None, True, 1e-40],
    "top_k": [-2, 1.5, "3", None, True],
    "top_p": [0.0, 1.1, -1, NAN, "x", None],
    "min_p": [-0.1, 1.1, NAN, "x", None],
    "seed": [-1, 2**64, 1.0, "x", True],
    "max_tokens": [-1, 1.5, "x", None, True],
    "min_tokens": [-1, 1.5, "x", None, True, 129],
    "stop": ["", ["a", ""], [1], 3, {"a": 1}, [b"a"], "half \ufffd", "\ud800"],
    "stop_token_ids": [[-1], [1.5], "2", 2, [True], {1: 2}],
    "ignore_eos": [1, 0, None, "yes"],
    "logprobs": [-1, 21, 1.5, True, "x"],
    "repetition_penalty": [0, -1, NAN, INF, "x", None, True],
    "presence_penalty": [2.1, -2.1, NAN, "x", None],
    "frequency_penalty": [2.1, -2.1, INF, "x", None],
    "logit_bias": [{1: 101}, {1: NAN}, {1: INF}, {-1: 1.0}, {1.5: 1.0}, {"a": 1.0}, {1: "x"}, [1, 2], "x", 3],
    "bad_words": ["ab", [""], ["\ud800"], [1], 3, {"a": 1}],
    "allowed_token_ids": [[], [-1], [1.5], "12", 3, [True]],
    "mask_fn": [3, "x", [no_mask]],
}
GOOD = {
    "n": 2, "temperature": 2.0, "top_k": 3, "top_p": 0.3, "min_p": 0.5, "seed": 9, "max_tokens": 3, "min_tokens": 6,
    "stop": "c", "stop_token_ids": [70], "ignore_eos": True, "logprobs": 2, "repetition_penalty": 1.5,
    "presence_penalty": 1.5, "frequency_penalty": 1.5, "logit_bias": {40: 100.0}, "bad_words": ["ca", "cg"],
    "allowed_token_ids": [3, 4, 5], "mask_fn": lambda state, token: (state, jnp.arange(97) < 30),
    "mask_state": jnp.int32(0),
}  # fmt: skip


def test_the_tables_name_every_field():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(GOOD) == fields
    assert set(BAD) == fields - {"mask_state"}  # any pytree of arrays; wrong ones show when the grammar is called


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values], ids=show)
def test_a_bad_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    shown = (value,) if isinstance(value, str) and name == "stop" else value
    shown = tuple(shown) if isinstance(shown, list) and name != "mask_fn" and name != "logit_bias" else shown
    assert str(error.value).startswith(f"{name}={shown!r} is not allowed; it must be ")
    assert len(str(error.value).splitlines()) == 1


def model():
    return dataclasses.replace(tiny.with_text(tiny.tiny()), eos_token_ids=(69,))


def outcome(**options):
    prompt = tiny.prompts_of(tiny.tiny(), (3, 9, 20), seed=11)[1]
    base = {"max_tokens": 12, "seed": 1, "temperature": 1.0}
    # A row that uses everything gives all calls one layout, and so one program.
    filler = {**GOOD, "n": 1, "min_tokens": 1}
    if "mask_fn" in options:
        filler |= {"mask_fn": options["mask_fn"], "mask_state": options.get("mask_state")}
    result = generate(model(), [prompt, [1]], None, [{**base, **options}, filler])
    return [(s.token_ids, s.text, s.finish_reason, s.logprobs and len(s.logprobs[0])) for s in result.sequences[:-1]]


@pytest.mark.parametrize("name", [n for n in GOOD if n != "mask_state"])
def test_no_field_is_ignored(name):
    """An option that is set is seen in what comes out."""
    others = {"stop_token_ids": [63, 57, 70]} if name == "min_tokens" else {}
    without = outcome(**others, ignore_eos=name not in ("ignore_eos", "min_tokens"))
    options = {"ignore_eos": name != "min_tokens", **others, name: GOOD[name]}
    assert outcome(**options) != without


def test_the_first_state_of_a_grammar_is_used():
    def only(state, token):
        return state, jnp.arange(97) == state

    texts = [outcome(mask_fn=only, mask_state=jnp.int32(t), ignore_eos=True)[0][0] for t in (5, 7)]
    assert texts == [[5] * 12, [7] * 12]


class Special(tiny.ToyTokenizer):
    """The last id is written <end>, and no text shows it."""

    special_ids = frozenset({96})

    def encode(self, text, add_special_tokens=True):
        parts = text.split("<end>")
        ids = [[*super(Special, self).encode(part), 96] for part in parts]
        return [i for part in ids for i in part][:-1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stop_token_ids": [97]}, r"stop_token_ids holds 97; ids must lie in 0..96"),
        ({"logit_bias": {97: 1.0}}, r"logit_bias holds 97; ids must lie in 0..96"),
        ({"allowed_token_ids": [3, 400]}, r"allowed_token_ids holds 400; ids must lie in 0..96"),
        ({"allowed_token_ids": [3], "logit_bias": {3: -INF}}, "leave no token to choose"),
        ({"allowed_token_ids": [3, 69], "stop_token_ids": [3], "min_tokens": 2}, r"leave only these: \[3, 69\]"),
        ({"mask_fn": lambda state, token: state}, "mask_fn must return"),
        ({"mask_fn": lambda state, token: (state, jnp.ones(5, bool))}, r"bool\[97\]"),
        ({"mask_fn": lambda state, token: (state, jnp.ones(97))}, r"bool\[97\]"),
        ({"mask_fn": lambda state, token: (state + 0.5, jnp.ones(97, bool))}, "a state like the one it is given"),
        ({"mask_fn": lambda state, token: ((state, token), jnp.ones(97, bool))}, "a state like the one it is given"),
        ({"mask_fn": lambda state: state}, "mask_fn cannot be traced"),
        ({"mask_fn": lambda state, token: (state, [True] * 97 if token > 3 else [])}, "mask_fn cannot be traced"),
        ({"mask_fn": {}.get}, "must be a function or a registered pytree"),
        ({"mask_fn": functools.partial(no_mask)}, "must be a function or a registered pytree"),
        ({"mask_fn": no_mask, "mask_state": "abc"}, "mask_state='abc' must be a pytree of arrays"),
        ({"mask_fn": no_mask, "mask_state": 2**40}, "mask_state=1099511627776 must be a pytree of arrays"),
        ({"stop": ["a<end>b"]}, r"holds special tokens, which no text shows; use stop_token_ids=\[96\]"),
        ({"mask_state": 3}, "mask_state=3 was given without a mask_fn"),
    ],
    ids=show,
)
def test_what_the_model_cannot_honour_is_named(options, message):
    target = dataclasses.replace(model(), tokenizer=Special())
    with pytest.raises(ValueError, match=message):
        generate(target, [[1]], None, options)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_text_options_need_a_tokenizer(name):
    with pytest.raises(ValueError, match=f"{name}=.* is text, but tiny-0 has no tokenizer"):
        generate(tiny.tiny(), [[1]], None, {name: ["ab"]})


def test_make_decoder_refuses_what_it_cannot_honour():
    for options in ({"logprobs": 1}, {"stop": "a"}, {"mask_fn": no_mask}):
        requests = make_requests(model(), [[1]], [SamplingParams(**options)])
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*needs `generate`"):
            sampling_state(requests, 1)


def test_two_functions_in_one_call_are_two_grammars():
    def low(state, token):
        return state, jnp.arange(97) < 10

    def high(state, token):
        return state, jnp.arange(97) >= 90

    result = generate(tiny.tiny(), [[1], [2], [3]], None, [{"mask_fn": low}, {"mask_fn": high}, {"max_tokens": 5}])
    a, b, c = (s.token_ids for s in result.sequences)
    assert max(a) < 10 and min(b) >= 90 and c == tiny.plain(tiny.tiny(), [[3]], {"max_tokens": 5})[0]


def test_unknown_options_name_the_nearest():
    with pytest.raises(ValueError, match="unknown sampling option 'temprature' .did you mean 'temperature'"):
        SamplingParams(temprature=1.0)


def test_numpy_values_and_every_kind_of_list_are_taken():
    params = SamplingParams(
        top_k=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.arange(3).tolist(), stop=("a",),
        allowed_token_ids=range(4), logit_bias={np.int32(2): np.float64(1.0)}, bad_words={"x"},
    )  # fmt: skip
    same = SamplingParams(
        top_k=3, temperature=0.5, stop_token_ids=(0, 1, 2), stop="a", allowed_token_ids=[0, 1, 2, 3],
        logit_bias={2: 1.0}, bad_words=["x"],
    )  # fmt: skip
    assert params == same and hash(params) == hash(same)
    assert isinstance(params.top_k, int) and isinstance(params.temperature, float)


def test_a_grammar_with_arrays_is_used_in_two_calls():
    """Its arrays are the caller's: a call must not give their memory away."""
    import flax.struct

    @flax.struct.dataclass
    class Allowed:
        mask: jnp.ndarray

        def __call__(self, state, token):
            return state, self.mask

    from spec_jax.compilation import program_count

    low, high = Allowed(jnp.arange(97) < 30), Allowed(jnp.arange(97) >= 60)
    first = outcome(mask_fn=low, ignore_eos=True)
    kept = program_count()
    assert outcome(mask_fn=low, ignore_eos=True) == first
    assert all(t >= 60 for t in outcome(mask_fn=high, ignore_eos=True)[0][0])
    assert all(t < 30 for t in first[0][0])
    assert program_count() == kept, "another grammar of the same shapes is an argument, not a program"
