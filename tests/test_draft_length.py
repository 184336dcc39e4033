"""`verify_width="auto"`: the policy against brute force, the step times, and the text, which never changes."""

import concurrent.futures
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import spec_jax
from spec_jax import step_times
from spec_jax.compilation import compiled
from spec_jax.decode import Decoder
from spec_jax.draft_length import Acceptance, CostModel, default_pace
from spec_jax.drafting.ngram import NGramDrafter
from spec_jax.generation import generate, make_decoder
from spec_jax.models.layers import RowBlocks
from spec_jax.sampling_params import SamplingParams

NODES = 4


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    """Every test measures its own steps, in which drafts are ordered: what is accepted does not hang on the clock."""
    monkeypatch.setattr(step_times, "_known", type(step_times._known)())
    monkeypatch.setattr(step_times, "SHARE", 0.0)  # no further rounds, whose time a busy machine would choose
    monkeypatch.setattr(step_times, "PAUSE", 0)  # all that is measured is measured in the first steps


@functools.partial(jax.jit, static_argnums=(0, 5))
def chosen_by(policy, seen, kind, count, live, nodes, times):
    """`policy.choose`, compiled as a whole: operation by operation it takes longer to compile."""
    return policy.choose(seen, kind, count, live, nodes, times)


@functools.partial(jax.jit, static_argnums=0)
def observed_by(policy, *arguments):
    return policy.observe(*arguments)


def choose(policy, rates, counts, live, times):
    """The policy's choice for rows whose acceptance rates are known well."""
    tried = jnp.full((len(rates), 1), 1e6)
    seen = Acceptance(jnp.asarray(rates, jnp.float32)[:, None] * tried, tried)
    kind, count = jnp.zeros(len(rates), jnp.int32), jnp.asarray(counts, jnp.int32)
    chosen = chosen_by(policy, seen, kind, count, jnp.asarray(live), NODES, jnp.asarray(times, jnp.float32))
    return np.asarray(chosen)


def speed(rates, lengths, live, seconds):
    """Tokens per second when row i drafts lengths[i] tokens that are accepted one after another with rates[i]."""
    return (
        sum(sum(r**j for j in range(n + 1)) for r, n, alive in zip(rates, lengths, live, strict=True) if alive)
        / seconds
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_lengths_is_faster(seed):
    rng = np.random.default_rng(seed)
    rates, counts = rng.uniform(0.05, 0.95, 3), rng.integers(0, NODES + 1, 3)
    live = np.array([True, seed % 3 != 0, True])
    times = 1 + np.cumsum(rng.uniform(0, 0.6 if seed % 2 else 0.1, 3 * (NODES + 1) + 1))
    lengths = choose(CostModel((NODES + 1,)), rates, counts, live, times)
    assert (lengths <= counts).all() and (lengths[~live] == 0).all()

    def by_rows(lengths):
        return speed(rates, lengths, live, times[live.sum() + sum(lengths)])

    options = itertools.product(*(range(c + 1) if alive else (0,) for c, alive in zip(counts, live, strict=True)))
    assert by_rows(lengths) == pytest.approx(max(map(by_rows, options)), rel=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_where_every_row_pays_for_the_widest_all_use_it(seed):
    rng = np.random.default_rng(100 + seed)
    rates, counts, live = rng.uniform(0.05, 0.95, 3), rng.integers(0, NODES + 1, 3), np.ones(3, bool)
    times = 1 + np.cumsum(rng.uniform(0, 0.4, 3 * (NODES + 1) + 1))
    widths = (1, 3, NODES + 1)
    lengths = choose(CostModel(widths), rates, counts, live, times)

    def by_width(width):
        return speed(rates, np.minimum(counts, width - 1), live, times[3 * width])

    best = max(widths, key=by_width)
    assert (lengths == np.minimum(counts, best - 1)).all()


def test_acceptance_is_counted_by_row_and_kind_and_fades():
    policy = CostModel((5,), priors=(0.5, 0.5), fade=0.5, rest=0.25)
    seen = policy.init(3)
    both = jnp.asarray([0, 1, 1]), jnp.asarray([True, True, False])
    drafted, accepted = jnp.asarray([4, 3, 3]), jnp.asarray([2, 3, 3])
    for _ in range(2):
        seen = observed_by(policy, seen, both[0], drafted, accepted, both[1])
    np.testing.assert_allclose(seen.accepted, [[3, 0], [0, 4.5], [0, 0]])  # 2 + 2/2, 3 + 3/2; a finished row: nothing
    np.testing.assert_allclose(seen.tried, [[4.5, 0], [0, 4.5], [0, 0]])  # two accepted and one refused; three accepted
    seen = observed_by(policy, seen, both[0], jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32), both[1])
    np.testing.assert_allclose(seen.tried, [[1.125, 0], [0, 1.125], [0, 0]])


def test_a_drafter_that_never_hits_is_given_up_and_tried_again():
    policy, nodes = CostModel((4,)), 3
    seen, chosen = policy.init(1), []
    kind, live, times = jnp.zeros(1, jnp.int32), jnp.ones(1, bool), 1 + 0.3 * jnp.arange(5)
    for _ in range(400):
        count = chosen_by(policy, seen, kind, jnp.full(1, 3), live, nodes, times)
        chosen.append(int(count[0]))
        seen = observed_by(policy, seen, kind, count, jnp.zeros(1, jnp.int32), live)
    assert chosen[0] > 0 and sum(c > 0 for c in chosen) < 60 and any(chosen[200:])


# --- Step times -------------------------------------------------------------------------------------------------------


def measured(seconds_of, nodes=3, batch=1, widths=None):
    times = step_times.StepTimes(nodes, batch, widths or (nodes + 1,))
    while (taken := times.take()) is not None:
        assert int(times.pace(taken).forced) == taken[1] != 0
        times.add(taken, batch, seconds_of(taken[1]))
    assert times.done
    return times.pace()


EXACT = {-1: 1.0, 1: 1.5, 2: 1.8, 4: 1.7}


def test_step_times_never_fall_and_drafting_is_told_apart():
    pace = measured(lambda order: EXACT[order])
    np.testing.assert_allclose(pace.times, [1.0, 1.0, 1.3, 1.3, 1.3], rtol=1e-6)  # without the drafting, 0.5
    assert float(pace.draft) == pytest.approx(0.5) and int(pace.forced) == 0


@pytest.mark.parametrize("slow", range(1, step_times.ROUNDS + 1))
def test_neither_a_slow_round_nor_a_slow_step_changes_the_step_times(slow):
    """The first round warms up and takes ten times as long; then one round is slow, and one step of another."""
    steps = iter(range(1000))

    def seconds_of(order):
        turn, place = divmod(next(steps), len(EXACT))
        factor = 10.0 if turn == 0 else 2.0 if turn == slow else 1.0
        return EXACT[order] * factor * (7.0 if (turn, place) == (slow % step_times.ROUNDS + 1, 2) else 1.0)

    pace, quiet = measured(seconds_of), measured(lambda order: EXACT[order])
    np.testing.assert_allclose(pace.times, quiet.times, rtol=1e-5)


def test_step_times_know_a_slope_that_changes_between_powers_of_two():
    pace = measured(lambda order: 1.0 + 0.02 * abs(order) + 0.1 * max(order - 6, 0), nodes=7)
    np.testing.assert_allclose(pace.times[1:7], 1.0 + 0.02 * np.arange(1, 7), rtol=1e-5)


def test_further_rounds_take_their_share_of_the_time_and_replace_the_first_ones(monkeypatch):
    monkeypatch.setattr(step_times, "SHARE", 0.05)
    times, factor = step_times.StepTimes(3, 1, (4,)), 3.0
    spent, measuring = 0.0, 0.0
    for _ in range(4000):
        if (taken := times.take()) is not None:
            times.add(taken, 1, factor * EXACT[taken[1]])
            measuring += factor * EXACT[taken[1]] * (taken[0] > step_times.ROUNDS)
        else:
            times.rest(2.0)
            spent, factor = spent + 2.0, 1.0  # the machine was busy while it measured first
    assert 0.8 * 0.05 < measuring / spent < 1.2 * 0.05
    assert len(times._seconds) <= (step_times.WINDOW + 1) * len(EXACT)
    np.testing.assert_allclose(times.pace().times, measured(lambda order: EXACT[order]).times, rtol=1e-5)


def test_threads_share_the_measuring_and_may_come_in_late():
    times = step_times.StepTimes(3, 1, (4,))
    taken = []
    while (order := times.take()) is not None:
        taken.append(order)
    assert times.take() is None and len(taken) == len(EXACT) * (step_times.ROUNDS + 1)
    assert int(times.pace().forced) == 0  # nothing has come in yet
    for order in reversed(taken):
        times.add(order, 1, EXACT[order[1]])
        assert int(times.pace().forced) == 0
    np.testing.assert_allclose(times.pace().times, measured(lambda order: EXACT[order]).times, rtol=1e-6)


def test_step_times_of_a_batch_cover_every_number_of_rows():
    pace = measured(lambda order: 2.0 if order < 0 else 2.0 + 0.1 * order, nodes=3, batch=4)
    assert pace.times.shape == (17,) and float(pace.times[16]) == pytest.approx(2.3, abs=1e-5)
    by_width = measured(lambda order: 1.0 + (order > 1), nodes=7, batch=2, widths=(1, 4, 8))
    assert float(by_width.times[2]) == pytest.approx(1.0) and float(by_width.times[16]) == pytest.approx(2.0)


# --- The text ---------------------------------------------------------------------------------------------------------

MODELS = {"XLA": lambda: tiny.tiny(), "packed": lambda: tiny.packed(tiny.tiny())}
LENGTHS = (3, 9, 1, 5)


def test_calls_in_several_threads_measure_together():
    model = MODELS["packed"]()
    options = {"method": "ngram", "verify_width": "auto"}
    want = generate(model, [[5, 6, 5, 6]], None, {"max_tokens": 40}).sequences[0].token_ids
    generate(model, [[5, 6, 5, 6]], options, {"max_tokens": 1})
    step_times.forget()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(generate, model, [[5, 6, 5, 6]], options, {"max_tokens": 40}) for _ in range(8)]
    assert [call.result().sequences[0].token_ids for call in calls] == [want] * 8
    assert step_times.latest().done


def drafters(name, model, texts):
    if name in ("oracle", "anti"):
        return None, tiny.script(texts, 5, {"oracle": (), "anti": "all"}[name])
    return {
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "layer_skip": {"method": "layer_skip", "num_speculative_tokens": 3, "exit_layer": 2},
        "draft_model": {"method": "draft_model", "num_speculative_tokens": 5, "model": tiny.perturbed(model, 0.1)},
    }[name], None


SLOW = pytest.mark.slow  # programs of several widths take long to compile
PAIRS = [
    *((name, "packed", None) for name in ("oracle", "anti")),
    ("ngram", "packed", 2),
    *(pytest.param(name, "XLA", 2, marks=SLOW) for name in ("ngram", "layer_skip", "draft_model")),
    *(pytest.param(name, "XLA", None, marks=SLOW) for name in ("anti", "ngram", "layer_skip", "draft_model")),
    *(pytest.param(name, "packed", None, marks=SLOW) for name in ("ngram", "layer_skip", "draft_model")),
    *(pytest.param(name, "packed", 2, marks=SLOW) for name in ("layer_skip", "draft_model")),
]


@pytest.mark.parametrize(("name", "kind", "slots"), PAIRS)
def test_the_text_is_that_of_plain_decoding(name, kind, slots):
    """In more slots than prompts and fewer, greedy and sampled, with drafts that all hit and that never do."""
    model = MODELS[kind]()
    prompts = [p * 2 for p in tiny.prompts_of(model, LENGTHS, seed=4)]
    accepted = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, logprobs=1)
        plain = generate(model, prompts, None, params)
        config, pair = drafters(name, model, [p + s.token_ids for p, s in zip(prompts, plain.sequences, strict=True)])
        result = generate(model, prompts, config, params, verify_width="auto", drafter=pair, max_batch_size=slots)
        assert result.exactness == "E2"
        for ours, theirs in zip(result.sequences, plain.sequences, strict=True):
            assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
        accepted += result.stats.num_accepted_tokens
    assert (accepted == 0) if name == "anti" else (accepted > 0)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("forced", [-1, 0, 2, 6])
def test_orders_and_prices_change_the_steps_and_not_the_text(kind, forced):
    """An order sets the drafts of every step; where a row costs a thousandfold, none is made."""
    model = MODELS[kind]()
    prompts = tiny.prompts_of(model, (4, 9), seed=2)
    want = generate(model, prompts, None, SamplingParams(max_tokens=24)).sequences
    drafter, params = tiny.script([p + s.token_ids for p, s in zip(prompts, want, strict=True)], 5)
    widths = (6,) if kind == "packed" else (1, 4, 6)
    decoder = dataclasses.replace(tiny.decoder_of(model, drafter, 2, width=6), policy=CostModel(widths))
    state = tiny.start(decoder, model, params, prompts, 24).replace(acceptance=decoder.start_acceptance(2))
    pace = default_pace(2, 5).replace(forced=jnp.int32(forced))
    dear = pace.replace(times=jnp.where(jnp.arange(13) > 2, 1000.0, 1.0))

    def run(pace):
        arguments = model.params, params, jax.tree.map(jnp.copy, state), jnp.int32(100), jnp.int32(1), pace
        return compiled(decoder, "run", *arguments)[0](*arguments)

    cheap, costly = run(pace), run(dear)
    for found in (cheap, costly):
        for row, sequence in enumerate(want):
            start = len(prompts[row])
            assert np.asarray(found.tokens)[row, start : start + 24].tolist() == sequence.token_ids
    assert int(costly.steps) == (24 if forced <= 0 else int(cheap.steps))
    tokens = {-1: (1, 1), 0: (4, 6), 2: (2, 2), 6: (6, 6)}[forced]  # per step, at least and at most
    assert -(-24 // tokens[1]) <= int(cheap.steps) <= -(-24 // tokens[0])


def test_the_first_steps_of_a_call_measure_and_later_calls_know():
    model = tiny.packed(tiny.tiny())
    config = {"method": "ngram", "verify_width": "auto"}
    params = SamplingParams(max_tokens=60)
    first = generate(model, [[5, 6, 5, 6]], config, params)
    (known,) = step_times._known.values()
    assert known.done and first.verify_width == 8
    assert (np.diff(known.pace().times) >= 0).all() and float(known.pace().times[1]) > 0
    again = generate(model, [[5, 6, 5, 6]], config, params)
    assert len(step_times._known) == 1
    assert again.sequences[0].token_ids == first.sequences[0].token_ids
    assert "".join(spec_jax.stream(model, [5, 6, 5, 6], config, params) if model.tokenizer else []) == ""


def test_a_session_goes_on_with_auto():
    model, params = tiny.packed(tiny.tiny()), SamplingParams(max_tokens=8)
    result = generate(model, [[5, 6, 5, 6]], {"method": "ngram", "verify_width": "auto"}, params)
    for _ in range(2):
        policy = result.session._call.decoder.policy
        result = result.session.generate([[]], params)
        assert policy is not None and result.session._call.decoder.policy == policy


def test_auto_needs_a_chain_and_a_drafter_to_switch():
    model = tiny.tiny()
    with pytest.raises(ValueError, match="need a chain drafter"):
        generate(model, [[1, 2]], None, {"max_tokens": 4}, drafter=(tiny.TreeDrafter(), ()), verify_width="auto")
    plain = generate(model, [[1, 2]], None, {"max_tokens": 4}, verify_width="auto")
    assert plain.sequences[0].token_ids == generate(model, [[1, 2]], None, {"max_tokens": 4}).sequences[0].token_ids
    with pytest.raises(ValueError, match="must end with the decoder's 8"):
        Decoder(model.module, NGramDrafter(7), 97, 8, "coupled", RowBlocks(), 32, CostModel((1, 4)))
    init, run = make_decoder(model, NGramDrafter(5), verify_width="auto")
    assert init.__self__.width == 6 and run.__self__.policy.widths == (1, 4, 6)


def test_the_first_token_of_a_draft_is_worth_what_its_kind_was():
    """n-gram proposals behind a longer match are another kind, whose acceptance is kept apart."""
    tokens = jnp.asarray([[1, 2, 3, 4, 1, 2, 3, 0], [9, 2, 8, 7, 5, 2, 0, 0]], jnp.int32)
    drafter = NGramDrafter(3)
    view = type("View", (), {"tokens": tokens, "length": jnp.asarray([7, 6])})
    draft, _ = jax.jit(lambda: drafter.propose((), (), view))()
    assert draft.kind.tolist() == [3, 1]
    assert len(drafter.priors) == 4 and list(drafter.priors) == sorted(drafter.priors)


def test_fitting_and_measuring_may_meet(monkeypatch):
    """A measurement of a new kind that comes in while another thread fits changes nothing of that fit."""
    times = step_times.StepTimes(3, 4, (4,))
    while (taken := times.take()) is not None:
        times.add(taken, 4, EXACT[taken[1]])
    want, polish = times.pace(), step_times._polished

    def meanwhile(found):
        times.add((2, 2), 3, 5.0)  # three rows live: not known so far
        return polish(found)

    monkeypatch.setattr(step_times, "_polished", meanwhile)
    times._fitted = None
    np.testing.assert_array_equal(times.pace().times, want.times)


def test_after_one_round_other_steps_run_between_those_that_measure(monkeypatch):
    monkeypatch.setattr(step_times, "PAUSE", 3)
    times, orders = step_times.StepTimes(3, 1, (4,)), []
    for _ in range(200):
        taken = times.take()
        orders.append(taken and taken[1])
        if taken is None:
            assert times.done or times.steps(1000) == 3
            times.rest(1.0)
        else:
            assert times.steps(1000) == (1000 if times.done else 3)
            times.add(taken, 1, EXACT[taken[1]])
            if len(orders) == len(EXACT):  # the first round already tells
                assert float(times.pace().times[4]) > float(times.pace().times[1])
    first = len(EXACT)
    assert orders[:first] == [-1, 1, 2, 4] and times.done and times.steps(1000) == 1000
    rest = orders[first : first + 2 * step_times.ROUNDS * first]
    assert rest[::2] == [None] * len(rest[::2]) and rest[1::2] == orders[:first] * step_times.ROUNDS
