"""experiments/peers.py: how the speeds of several engines are measured, kept and compared; no engine here is real."""

import dataclasses
import json
import sys

import pytest
from tiny import experiment

import spec_jax

peers = experiment("peers")
HEADER = {"arguments": {"max_tokens": 4}, "machine": {"jax": "1"}}
ITEMS = [peers.Item("chat", 0, (1, 2)), peers.Item("chat", 4, (3, 4)), peers.Item("code", 0, (5, 6))]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Fake:
    """An engine whose next call takes the next of `seconds` (the last of them again and again) on a clock."""

    def __init__(self, name, clock, seconds, output=(7, 8, 9, 10), calls=None, **last):
        self.name, self.clock, self.output, self.last = name, clock, output, last
        self.seconds = list(seconds) if isinstance(seconds, (list, tuple)) else [seconds]
        self.calls = [] if calls is None else calls
        self.error_at = None

    def generate(self, prompt_ids, max_tokens):
        self.calls.append((self.name, prompt_ids[0]))
        if self.error_at is not None and sum(name == self.name for name, _ in self.calls) > self.error_at:
            raise RuntimeError("no more\nmemory")
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return list(self.output(prompt_ids) if callable(self.output) else self.output)


@pytest.fixture
def clock():
    return Clock()


def measure(log, engines, clock, items=ITEMS, max_tokens=4, repeats=1, **options):
    return peers.measure(log, engines, items, max_tokens, repeats, clock=clock, **options)


def rows(log, engines, items=ITEMS, repeats=1):
    found = peers.rows_of(log, [engine.name for engine in engines], items, repeats)
    return {(row["file"], row["engine"], row["loops_left_out"] > 0): row for row in found}


def test_all_engines_take_a_prompt_before_the_next_and_their_order_rotates(clock):
    calls = []
    engines = [Fake(name, clock, 1.0, calls=calls) for name in "abc"]
    assert measure(peers.Log(None, HEADER), engines, clock, repeats=2)
    warm, calls = calls[:3], calls[3:]
    assert [name for name, _ in warm] == ["a", "b", "c"]
    assert [prompt for _, prompt in calls] == [p for p in (1, 3, 5, 1, 3, 5) for _ in "abc"]
    orders = ["".join(name for name, _ in calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert orders == ["abc", "bca", "cab", "bca", "cab", "abc"]


def test_every_cache_size_is_warmed_up_with_its_longest_prompt(clock):
    engine = Fake("a", clock, 1.0)
    items = [peers.Item("chat", place, (place,) * length) for place, length in enumerate((5, 9, 800, 700))]
    measure(peers.Log(None, HEADER), [engine], clock, items)
    assert [prompt for _, prompt in engine.calls[:-4]] == [1, 2]


def test_ratios_are_formed_within_a_repeat_and_summed_over_prompts(clock):
    """In the second repeat everything takes ten times as long: no ratio may notice."""
    items = ITEMS[:2]
    plain = Fake("plain", clock, [9.0, 1.0, 3.0, 10.0, 30.0, 1.0, 3.0])
    fast = Fake("fast", clock, [9.0, 1.0, 1.0, 5.0, 5.0, 2.0, 2.0], output=(7, 8, 9, 11))
    log = peers.Log(None, HEADER)
    measure(log, [plain, fast], clock, items, repeats=3)
    found = rows(log, [plain, fast], items, 3)
    assert found["chat", "fast", False]["ratio_to"]["plain"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert found["chat", "plain", False]["ratio_to"]["fast"] == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert found["chat", "plain", False]["tokens_per_second"] == {"median": 2.0, "min": 0.2, "max": 2.0}
    assert found["all", "fast", False] == found["chat", "fast", False] | {"file": "all"}
    assert found["chat", "fast", False]["decode_tokens_per_second"] is None
    assert (found["chat", "plain", False]["same_ids"], found["chat", "fast", False]["same_ids"]) == (2, 0)


def test_tokens_are_counted_per_engine(clock):
    plain, short = Fake("plain", clock, 2.0), Fake("short", clock, 2.0, output=[7, 8])
    log = peers.Log(None, HEADER)
    measure(log, [plain, short], clock)
    assert rows(log, [plain, short])["all", "short", False]["ratio_to"]["plain"]["median"] == 0.5


def test_compilation_is_subtracted_and_decoding_is_reported_where_an_engine_tells(clock):
    engine = Fake("a", clock, 5.0, compile_seconds=3.0, decode_seconds=0.5, decode_tokens=3)
    log = peers.Log(None, HEADER)
    measure(log, [engine], clock)
    row = rows(log, [engine])["chat", "a", False]
    assert row["tokens_per_second"]["median"] == 2.0 and row["decode_tokens_per_second"]["median"] == 6.0


def test_what_comes_behind_the_end_of_the_text_or_the_budget_does_not_count(clock):
    engines = [Fake("eos", clock, 1.0, output=[7, 0, 8]), Fake("long", clock, 1.0, output=[7] * 9)]
    log = peers.Log(None, HEADER)
    measure(log, engines, clock, eos=(0, 99))
    assert log.find(ITEMS[0], 0, "eos")["ids"] == [7, 0] and log.find(ITEMS[0], 0, "long")["tokens"] == 4


def test_prompts_at_which_an_output_loops_are_also_left_out_for_all(clock):
    def text(prompt):
        return [1, 2] * 16 if prompt[0] == 3 else list(range(32))

    plain = Fake("plain", clock, [9.0, 1.0, 4.0, 1.0], output=lambda prompt: list(range(32)))
    copying = Fake("copying", clock, [9.0, 1.0, 1.0, 0.5], output=text)
    log = peers.Log(None, HEADER)
    measure(log, [plain, copying], clock, max_tokens=32)
    found = rows(log, [plain, copying])
    assert found["chat", "copying", False]["ratio_to"]["plain"]["median"] == 2.5
    assert found["chat", "copying", True]["ratio_to"]["plain"]["median"] == 1.0
    assert found["chat", "plain", True]["prompts"] == found["chat", "plain", True]["loops_left_out"] == 1
    assert 0.4 < found["chat", "copying", False]["repeated_8gram_share"] < 0.5
    assert found["chat", "copying", True]["repeated_8gram_share"] == 0.0
    assert ("code", "plain", True) not in found and found["all", "plain", True]["prompts"] == 2


@pytest.mark.parametrize(("fresh", "looping"), [(20, False), (19, True)])  # 5 and 6 of 25 8-grams are repeats
def test_more_than_a_fifth_of_the_8_grams_must_be_repeats(clock, fresh, looping):
    texts = {3: [*range(fresh), *range(32 - fresh)]}
    engine = Fake("a", clock, 1.0, output=lambda prompt: texts.get(prompt[0], [7]))
    log = peers.Log(None, HEADER)
    measure(log, [engine], clock, max_tokens=32)
    assert (("chat", "a", True) in rows(log, [engine])) == looping


def test_token_ids_must_be_the_same_in_every_repeat(clock):
    plain, moody = Fake("plain", clock, 1.0), Fake("moody", clock, 1.0)
    moody.output = lambda prompt: [7, 8, 9, 10 + (len(moody.calls) > 4)]
    log = peers.Log(None, HEADER)
    measure(log, [plain, moody], clock, repeats=2)
    found = rows(log, [plain, moody], repeats=2)
    assert (found["all", "moody", False]["same_ids"], found["all", "plain", False]["same_ids"]) == (0, 3)


def test_an_engine_that_raises_is_left_out_and_the_others_go_on(clock, capsys):
    good, late, never = (Fake(name, clock, 1.0) for name in ("good", "late", "never"))
    late.error_at, never.error_at = 3, 0
    log = peers.Log(None, HEADER)
    assert measure(log, [good, late, never], clock, repeats=2)
    assert log.failed == dict.fromkeys(("never", "late"), "RuntimeError: no more memory")
    assert len(never.calls) == 1 and len(good.calls) == 7
    assert {engine for _, engine, _ in rows(log, [good, late, never], repeats=2)} == {"good"}
    errors = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error")]
    assert errors == [f"error: engine {name!r} is left out: RuntimeError: no more memory" for name in ("never", "late")]


def test_without_a_running_engine_there_are_no_rows(clock):
    engine = Fake("a", clock, 1.0)
    engine.error_at = 0
    log = peers.Log(None, HEADER)
    assert not measure(log, [engine], clock)
    assert rows(log, [engine]) == {}


def test_a_run_stops_at_its_deadline_behind_a_prompt_and_goes_on_from_the_file(clock, tmp_path):
    path = str(tmp_path / "found.jsonl")
    engines = [Fake(name, clock, 1.0) for name in ("plain", "other")]
    log = peers.Log(path, HEADER)
    assert not measure(log, engines, clock, repeats=2, deadline=6.5)  # 2 s of warm-up, then 2 s a prompt
    assert len(log.measured) == 6
    assert not measure(peers.Log(path, HEADER), engines, clock, repeats=2, deadline=0.0)  # one prompt at least
    again = peers.Log(path, HEADER)
    assert len(again.measured) == 8
    assert measure(again, engines, clock, repeats=2) and len(again.measured) == 12
    for engine in engines:
        engine.calls.clear()
    done = peers.Log(path, HEADER)
    assert measure(done, engines, clock, repeats=2) and done.measured.keys() == again.measured.keys()
    assert not any(engine.calls for engine in engines)  # not even to warm up
    assert rows(done, engines, repeats=2) == rows(again, engines, repeats=2)
    assert (tmp_path / "found.jsonl").read_text().count("arguments") == 1


def test_only_whole_repeats_count_unless_there_is_none(clock):
    engine = Fake("a", clock, 1.0)
    log = peers.Log(None, HEADER)
    measure(log, [engine], clock, repeats=3, deadline=2.5)
    found = rows(log, [engine], repeats=3)
    assert found["chat", "a", False]["prompts"] == found["all", "a", False]["prompts"] == 2
    assert ("code", "a", False) not in found
    measure(log, [engine], clock, repeats=3, deadline=clock.now + 2.5)
    found = rows(log, [engine], repeats=3)
    assert (found["all", "a", False]["prompts"], found["all", "a", False]["repeats"]) == (3, 1)


def test_a_prompt_at_which_a_run_was_killed_is_measured_again_by_all(clock, tmp_path):
    path = tmp_path / "found.jsonl"
    engines = [Fake(name, clock, 1.0) for name in ("plain", "other")]
    measure(peers.Log(str(path), HEADER), engines, clock)
    lines = path.read_text().split("\n")[:-1]
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    for engine in engines:
        engine.calls.clear()
    log = peers.Log(str(path), HEADER)
    assert len(log.measured) == 5
    assert measure(log, engines, clock) and len(log.measured) == 6
    assert [len(engine.calls) for engine in engines] == [2, 2]  # warm-up and the prompt
    assert peers.Log(str(path), HEADER).measured.keys() == log.measured.keys()


def test_errors_of_engines_and_other_machines_are_kept_in_the_file(clock, tmp_path):
    path = str(tmp_path / "found.jsonl")
    engine = Fake("a", clock, 1.0)
    engine.error_at = 0
    measure(peers.Log(path, HEADER), [engine, Fake("b", clock, 1.0)], clock)
    for number in ("2", "3"):
        log = peers.Log(path, HEADER | {"machine": {"jax": number}})
        assert log.failed == {"a": "RuntimeError: no more memory"}
        assert [header["machine"]["jax"] for header in log.headers] == ["1"]  # nothing was measured on the others
    measure(log, [Fake("a", clock, 1.0), Fake("b", clock, 1.0)], clock, repeats=2)
    assert [header["machine"]["jax"] for header in log.headers] == ["1", "3"]
    assert peers.Log(path, HEADER).headers == log.headers


def test_a_file_of_other_arguments_or_of_something_else_is_refused_and_kept(clock, tmp_path):
    path = tmp_path / "found.jsonl"
    measure(peers.Log(str(path), HEADER), [Fake("a", clock, 1.0)], clock)
    with pytest.raises(ValueError, match="was measured with other max_tokens; give another --output"):
        peers.Log(str(path), {"arguments": {"max_tokens": 5}, "machine": {}})
    for text in ("no newline", "not json\n", '{"file": "x"}\n', "[1]\n", path.read_text() + "7\n", '{"a": 1}\n{}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="was not written by this script"):
            peers.Log(str(path), HEADER)
        assert path.read_text() == text


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(core, monkeypatch, tmp_path):
    """Runs the script on two prompts with a fake library; returns status, stdout and stderr."""

    def generate(*arguments, **options):
        result = core.generate(*arguments, **options)
        return dataclasses.replace(result, stats=dataclasses.replace(result.stats, compile_seconds=0.0))

    monkeypatch.setitem(vars(spec_jax), "generate", generate)
    monkeypatch.setattr(peers.hub, "find_model", lambda name: name)
    prompts = tmp_path / "chat.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [text]}) for text in "abcd"))

    def run(capsys, *arguments, engines=("plain", "ngram"), files=(prompts,)):
        fixed = ["--count", "2", "--repeats", "2", "--max-tokens", "8", "--prompts", *map(str, files)]
        status = peers.main([*fixed, "--engines", *engines, *arguments])
        return status, *capsys.readouterr()

    return run


def test_json_is_one_object_and_resumes(command, core, capsys, tmp_path):
    path = str(tmp_path / "found.jsonl")
    engines = ("plain", "ngram", 'k8={"method": "ngram", "num_speculative_tokens": 8}')
    status, out, err = command(capsys, "--json", "--output", path, engines=engines)
    report = json.loads(out)
    assert (status, report["finished"], report["failed"]) == (0, True, {})
    assert [(row["file"], row["engine"]) for row in report["rows"]] == [
        (file, engine) for file in ("chat", "all") for engine in ("plain", "ngram", "k8")
    ]
    assert report["rows"][0]["decode_tokens_per_second"]["median"] == pytest.approx(10.0)
    assert "repeat 2, chat 3: k8 0.00 s, plain" in err  # the prompts are spread over the file
    calls = len(core.calls)
    assert {bytes(call.prompts[0]) for call in core.calls} == {b"a", b"c"}
    assert {call.exact for call in core.calls} == {False, None}
    _, again, _ = command(capsys, "--json", "--output", path, engines=engines)
    assert json.loads(again)["rows"] == report["rows"] and len(core.calls) == calls
    status, out, err = command(capsys, "--output", path)
    assert (status, out) == (2, "") and "was measured with other engines; give another --output" in err


def test_table_shows_ratios_to_the_baselines(command, capsys):
    status, out, _ = command(capsys)
    assert status == 0 and "/ plain" in out and "/ transformers" not in out
    assert "1.00 (1.00..1.00)" in " ".join(out.split()) and "2/2 x 2" in " ".join(out.split())


def test_engines_that_refuse_are_reported(command, core, capsys):
    right = core.output

    def refuse(call):
        if call.config != {"method": "none", "verify_width": 1}:
            raise ValueError("verify_width='auto'\nis not supported")
        return right(call)

    core.output = refuse
    status, out, err = command(capsys, "--json", engines=("plain", "ngram-auto"))
    assert status == 1
    assert json.loads(out)["failed"] == {"ngram-auto": "ValueError: verify_width='auto' is not supported"}
    assert "error: engine 'ngram-auto' is left out: ValueError: verify_width='auto' is not supported\n" in err
    status, out, err = command(capsys, engines=("ngram",))
    assert status == 1 and "ngram" not in out


def test_an_engine_of_ones_own_joins(command, capsys, monkeypatch, tmp_path):
    (tmp_path / "their_engines.py").write_text(
        "class Mine:\n"
        "    name = 'mine'\n"
        "    def __init__(self, model_folder, dtype, threads):\n"
        "        assert (model_folder, dtype) == ('smollm2-135m-instruct', 'bfloat16') and threads >= 1\n"
        "    def generate(self, prompt_ids, max_tokens):\n"
        "        return [1] * max_tokens\n"
        "class Broken:\n"
        "    def __init__(self, model_folder, dtype, threads):\n"
        "        raise OSError('no weights')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = ("--engine", "their_engines:Mine")
    status, out, _ = command(capsys, "--json", "--dtype", "bfloat16", *mine)
    assert status == 0 and [row["engine"] for row in json.loads(out)["rows"][:3]] == ["plain", "ngram", "mine"]
    status, out, _ = command(capsys, "--json", "--engine", "their_engines:Broken")
    assert status == 1 and json.loads(out)["failed"] == {"their_engines:Broken": "OSError: no weights"}
    status, _, err = command(capsys, "--dtype", "bfloat16", *mine, *mine)
    assert status == 2 and "two engines have the same name: plain, ngram, mine, mine" in err
    for name, problem in (("their_engines:None", "no attribute 'None'"), ("nowhere:X", "No module named 'nowhere'")):
        status, _, err = command(capsys, "--engine", name)
        assert status == 2 and problem in err and err.count("\n") == 1
    sys.modules.pop("their_engines")


def test_mistakes_are_errors_of_one_line(command, capsys, monkeypatch, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": []}')
    twin = tmp_path / "other" / "chat.jsonl"
    twin.parent.mkdir()
    twin.write_text('{"turns": ["x"]}')
    for options, problem in (
        ({"files": [bad]}, "bad.jsonl, line 1: 'turns' must be"),
        ({"files": [tmp_path / "none.jsonl"]}, "none.jsonl"),
        ({"files": [twin, twin]}, "'chat' is taken; rename the file"),
        ({"engines": ["vllm"]}, "engine 'vllm' is neither NAME=JSON nor one of plain, plain-e2, ngram, ngram-auto, "),
    ):
        status, out, err = command(capsys, **options)
        assert (status, out) == (2, "") and problem in err and err.startswith("error: ") and err.count("\n") == 1
    for option in ("--count", "--repeats", "--max-tokens"):
        assert command(capsys, option, "0")[0] == 2
    status, _, err = command(capsys, "--max-tokens", "5000")
    assert status == 2 and "chat.jsonl, prompt 1: 1 tokens leave no room for 5000 more" in err
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    status, _, err = command(capsys, engines=("transformers",))
    assert status == 2 and err.startswith("error: transformers needs torch: pip install") and err.count("\n") == 1
