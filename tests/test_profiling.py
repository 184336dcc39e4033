"""`profile` and `spec-jax bench --profile`: that every figure is there, and that parts of a step are what they say."""

import dataclasses
import io
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from test_memory import cache_copies
from tiny import decoder_of, greedy_state, start, tiny, truncated, with_text
from tiny import packed as tiny_packed

import spec_jax
from spec_jax import cli, profile_view, profiling
from spec_jax.config import parse_speculative_config
from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.registry import build_drafter
from spec_jax.kernels import cpu
from spec_jax.models.layers import RowBlocks
from spec_jax.prompts import Prompt
from spec_jax.step_parts import MEASURED, PARTS, StepParts, repeated

SPREAD = {"median", "min", "max"}
PROMPTS = [Prompt("chat", ({"role": "user", "content": text},)) for text in ("abc abc abc ab", "de fg de")]
needs_kernels = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"no CPU kernels: {cpu.unavailable()}")


def small():
    return with_text(tiny(layers=1))


def packed():
    return tiny_packed(small())


@dataclasses.dataclass(frozen=True)
class Loops(BaseDrafter):
    """Works for nothing, params[1] times: on its parameters alone, or on the text as well."""

    on_text: bool = False
    num_nodes: int = 1

    def propose(self, params, state, view):
        matrix, loops = params
        first = matrix + view.last[0] if self.on_text else matrix
        x = jax.lax.fori_loop(0, loops, lambda _, x: jnp.tanh(x @ matrix), first)
        tokens = jnp.broadcast_to(jnp.abs(x[0, :1] * 0.1).astype(jnp.int32), (view.length.shape[0], 1))
        return Draft(tokens, jnp.ones(view.length.shape, jnp.int32)), state


def work(loops):
    return jnp.eye(48) * 0.5, jnp.int32(loops)


@pytest.fixture(scope="module")
def report():
    """Of a model that computes all rows, and a drafter with too much to do."""
    drafter = Loops(on_text=True), work(2000)
    return profiling.profile(small(), drafter=drafter, prompts=PROMPTS, batch_size=2, max_tokens=8, repeats=3)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the command prints for a packed model, and its folder."""
    folder, out = tmp_path_factory.mktemp("profile"), io.StringIO()
    (folder / "prompts.jsonl").write_text('{"turns": ["abc abc abc ab"]}')
    options = ["--prompts", str(folder / "prompts.jsonl"), "--logdir", str(folder / "logs"), "--max-tokens", "8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(spec_jax), "load_model", lambda name, dtype: packed())
        patch.setattr("sys.stdout", out)
        status = cli.main(
            [
                "bench",
                "--profile",
                "--json",
                "--methods",
                "draft_model:2",
                "--draft-model",
                "small",
                "--repeats",
                "2",
                *options,
            ]
        )
    assert status == 0
    return json.loads(out.getvalue()), folder / "logs"


def check(found, packed, widths):
    """What holds for every report. `widths`: (method, computed rows) of every entry."""
    assert set(found) == {
        *("model", "device", "versions", "dtype", "packed", "batch_size", "repeats", "prompt_tokens", "bandwidth"),
        *("bound", "rows", "methods", "trace"),
    }
    assert found["packed"] is packed and len(found["prompt_tokens"]) == found["batch_size"]
    assert set(found["bandwidth"]) == {"bytes_per_second", "bytes", "read_with"}
    assert set(found["bound"]) == {"bytes", "milliseconds"}
    assert [(row["method"], row["rows"]) for row in found["rows"]] == widths
    for row in found["rows"]:
        assert set(row) == {
            *("method", "num_speculative_tokens", "verify_width", "rows", "milliseconds", "unexplained", "shares"),
            *("step_ratio", "forward_ratio", "step_bound_ratio", "forward_bound_ratio"),
        }
        ms, shares = row["milliseconds"], row["shares"]
        assert set(ms) == set(MEASURED) and set(shares) == {*PARTS, "unexplained"}
        assert all(set(x) == SPREAD and 0 < x["min"] <= x["median"] <= x["max"] for x in ms.values())
        assert sum(shares.values()) == pytest.approx(1)
        assert row["unexplained"] == pytest.approx(shares["unexplained"] * ms["step"]["median"])
        for part in PARTS:  # a median of ratios lies between the extreme ones, however the machine was disturbed
            least, most = ms[part]["min"] / ms["step"]["max"], ms[part]["max"] / ms["step"]["min"]
            assert 0.999 * least < shares[part] < 1.001 * most
    (one,) = [row for row in found["rows"] if row["method"] == "plain W=1"]
    assert one["step_ratio"] == one["forward_ratio"] == 1
    assert [entry["method"] for entry in found["methods"]] == list(dict(widths))
    for entry in found["methods"]:
        assert set(entry) == {
            *("method", "num_speculative_tokens", "verify_width", "exactness", "loop", "host", "host_share", "memory"),
        }
        assert 0 < entry["host_share"] < 1 and entry["loop"]["min"] > 0 and entry["host"]["min"] > 0
        memory = entry["memory"]
        assert set(memory) == {"arguments", "temporaries", "outputs", "alias", "peak", "drafter"}
        assert memory["peak"] >= memory["arguments"] > memory["alias"] > 0
        assert set(memory["drafter"]) == {"parameters", "state", "temporaries"}


@pytest.mark.slow
def test_a_model_that_computes_all_rows(report):
    check(report, False, [("plain W=8", 8), ("plain W=1", 1), ("Loops", 8)])
    assert report["trace"] is None and report["batch_size"] == 2
    json.dumps(report, allow_nan=False)


@pytest.mark.slow
def test_extra_work_of_a_drafter_shows_as_drafting(report):
    """In figures of milliseconds, the fastest ones: what disturbs a measurement only makes it slower."""
    plain, _, extra = ({name: x["min"] for name, x in row["milliseconds"].items()} for row in report["rows"])
    assert extra["draft"] > 3 * extra["forward"] and extra["draft"] > 20 * plain["draft"]
    assert 0.5 < extra["draft"] / extra["step"] < 4
    assert 0.25 < sum(extra[part] for part in PARTS) / extra["step"] < 4


@pytest.mark.slow
@needs_kernels
def test_the_command_on_a_packed_model(printed):
    found, _ = printed
    check(found, True, [("plain W=8", 1), ("plain W=1", 1), *(("draft_model", rows) for rows in (1, 2, 3))])
    assert found["bandwidth"]["read_with"] == "spec_jax.kernels.cpu.read"


@pytest.mark.slow
@needs_kernels
def test_the_trace_is_there(printed):
    found, folder = printed
    (file,) = (folder / "plugins" / "profile").glob("*/*.xplane.pb")
    assert found["trace"] == {"path": str(file), "bytes": file.stat().st_size}
    text = file.read_bytes()
    assert all(name in text for name in (b"draft_model", b"/attention/", b"/mlp/"))


@pytest.mark.slow
@needs_kernels
def test_the_drafter_s_share_of_the_memory(printed):
    plain, _, model = (entry["memory"] for entry in printed[0]["methods"])
    assert set(plain["drafter"].values()) == {0}
    assert model["drafter"]["parameters"] == sum(x.nbytes for x in jax.tree.leaves(packed().params))
    assert model["drafter"]["state"] > 0
    assert model["drafter"]["temporaries"] == model["temporaries"] - plain["temporaries"] > 0
    assert model["peak"] - plain["peak"] >= sum(model["drafter"].values())


@pytest.mark.slow
def test_the_bound_counts_every_parameter_that_a_step_reads(report):
    model = small()
    assert report["prompt_tokens"] == [len(model.tokenizer.encode(p.text)) for p in PROMPTS]
    c = model.config
    cache = sum(n - 1 for n in report["prompt_tokens"]) * 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    read = {name: x for name, x in model.params.items() if name != "embedding"}  # it is not the head here
    assert report["bound"]["bytes"] == cache + sum(x.nbytes for x in jax.tree.leaves(read))


@pytest.mark.slow
@needs_kernels
def test_tables(printed, report):
    for found in (printed[0], report):
        console = Console(width=160, file=io.StringIO())
        for table in profile_view.tables(found):
            console.print(table)
        text = console.file.getvalue()
        assert found["rows"][-1]["method"] in text and "GB/s" in text
        assert ("tensorboard --logdir" in text) == (found["trace"] is not None)


# --- the parts of a step ----------------------------------------------------------------------------------------------


def quick(decoder):
    """Without canonical rows, whose programs take longer to compile."""
    return dataclasses.replace(decoder, rows=RowBlocks())


def parts_of(model, drafter, params, batch=1):
    decoder = quick(decoder_of(model, drafter, batch))
    state = start(decoder, model, params, [[1, 2, 3, 1, 2]] * batch, 200)
    return StepParts(decoder, model.params, params, state)


def test_work_that_is_the_same_in_every_iteration_is_done_in_every_iteration():
    parts = parts_of(small(), Loops(), work(20_000))
    seconds = {many: [] for many in (8, 1)}
    for many in (8, 1) * 4:
        seconds[many].append(seconds_of_drafting(parts, many))
    # Without the first runs, which compile. Work that was done once for all iterations would make them equal.
    assert min(seconds[8][1:]) > 3 * min(seconds[1][1:])


def seconds_of_drafting(parts, count):
    """Only the drafts: the other parts take longer to compile."""
    arguments = parts.arguments(8)
    copies = jax.tree.map(jnp.copy, (parts.state, parts.nothing(arguments), jnp.int32(count)))
    jax.block_until_ready((arguments, copies))
    start = time.perf_counter()
    jax.block_until_ready(parts.programs["draft"](*arguments, *copies))
    return time.perf_counter() - start


@pytest.fixture(scope="module")
def skipping():
    """A packed model whose drafter runs all its layers, so that all drafts are accepted."""
    model = packed()
    config = parse_speculative_config({"method": "layer_skip"})
    return parts_of(model, *build_drafter(config, model, RowBlocks()), batch=2)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_as_many_rows_are_computed_as_are_ordered(skipping, rows):
    made = skipping.at(rows).made
    assert made.draft.count.tolist() == [rows - 1] * 2
    assert np.asarray(made.logits).any(-1)[:, :rows].all()  # the others are not written, and hold anything


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_the_parts_make_what_a_step_makes(skipping, rows):
    made, arguments, before = skipping.at(rows).made, skipping.arguments(rows), skipping.state

    def run(part, count):
        copies = jax.tree.map(jnp.copy, (before, made))
        return skipping.programs[part](*arguments, *copies, jnp.int32(count))[0]

    stepped, committed = run("step", 1), run("commit", 3)
    assert (stepped.length - before.length).tolist() == (made.verdict.num_accepted + 1).tolist() == [rows] * 2
    assert committed.tokens.tolist() == stepped.tokens.tolist()
    assert committed.length.tolist() == before.length.tolist()
    at = int(before.length[0])
    assert stepped.tokens[:, at : at + rows].tolist() == made.verdict.tokens[:, :rows].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "names"), [("layer_skip", PARTS), ("draft_model", ("draft", "commit"))])
def test_no_part_copies_the_cache(method, names):
    capacity, batch = 4096, 2
    model = tiny(context=capacity, layers=1)
    config = {"method": method} | ({"model": truncated(model, (0,))} if method == "draft_model" else {})
    drafter, params = build_drafter(parse_speculative_config(config), model, RowBlocks())
    decoder = quick(decoder_of(model, drafter, batch))
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
    state = jax.eval_shape(decoder.init, model.params, params, tokens, row, row, row, greedy_state(batch))
    parts = StepParts(decoder, model.params, params, state)
    arguments = parts.arguments(8)
    one = state.cache.k[0]
    cache_bytes = 2 * one.size * one.dtype.itemsize
    for name in names:
        compiled = parts.programs[name].lower(*arguments, state, parts.nothing(arguments), jnp.int32(1)).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < cache_bytes / 2, name
        assert memory.alias_size_in_bytes >= cache_bytes and cache_copies(compiled, one) == [], name


def test_power_a_part_that_copies_is_found():
    """A copy of the cache in a part would show in the memory that the test above reads."""
    model = tiny(context=4096, layers=1)
    parts = parts_of(model, Loops(), work(1))
    arguments = parts.arguments(8)

    def part(decoder, params, drafter_params, state, made, pace):
        k = state.cache.k[0]
        return (
            state.replace(cache=state.cache.replace(k=(jnp.where(made.logits[0, 0, 0] > 0, k[..., ::-1], k),))),
            made,
            k,
        )

    program = jax.jit(repeated(parts.decoder, part), donate_argnums=(3, 4))
    memory = program.lower(*arguments, parts.state, parts.nothing(arguments), jnp.int32(1)).compile().memory_analysis()
    assert memory.temp_size_in_bytes >= parts.state.cache.k[0].nbytes


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be a positive integer"),
        ({"repeats": True}, "repeats=True must be a positive integer"),
        ({"batch_size": 1.5}, "batch_size=1.5 must be a positive integer"),
        ({"batch_size": 3}, "batch_size=3 is more than the 2 prompts"),
        ({"batch_size": 2, "max_prompts": 1}, "batch_size=2 is more than the 1 prompts; .* max_prompts"),
        ({"methods": ["ngran"]}, "method 'ngran' is not known"),
        ({"methods": ["draft_model"]}, "add --draft-model"),
        ({"verify_width": 3, "methods": ["ngram:5"]}, "verify_width=3 cannot hold 5"),
        ({"drafter": Loops()}, "drafter must be a pair"),
        ({"exact": 1}, "exact=1 must be"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        profiling.profile(small(), prompts=PROMPTS, **options)


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(ValueError, match="'tiny-0' has no tokenizer"):
        profiling.profile(tiny(), prompts=PROMPTS)


def test_a_logdir_that_cannot_be_written_is_found_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        profiling.profile(small(), prompts=PROMPTS, logdir=tmp_path / "file" / "logs")
