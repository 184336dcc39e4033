"""Texts for training on disk: killed runs go on, folders made in another way are refused, and rows are packed right."""

import json
import os

import numpy as np
import pytest
import tiny

import spec_jax.drafting.training.data as data
from spec_jax.drafting.training.data import Responses, generate_responses
from spec_jax.drafting.training.packed_rows import BatchStream

COUNT = 10
OPTIONS = dict(max_tokens=6, temperature=[0.0, 1.0] * (COUNT // 2), batch_size=4, shard_size=4, seed=3)


@pytest.fixture(scope="module")
def target():
    return tiny.tiny()


@pytest.fixture(scope="module")
def prompts(target):
    return tiny.prompts_of(target, [3, 9, 5, 4, 12, 7, 3, 6, 8, 5])


@pytest.fixture(scope="module")
def folder(target, prompts, tmp_path_factory):
    """A finished folder, not to be changed."""
    path = tmp_path_factory.mktemp("responses")
    generate_responses(target, prompts, path, **OPTIONS)
    return path


class Killed(Exception):
    pass


def same_files(one, other):
    names = sorted(path.name for path in one.glob("shard-*.npz"))
    assert names == sorted(path.name for path in other.glob("shard-*.npz"))
    for name in names:
        ours, theirs = np.load(one / name), np.load(other / name)
        assert ours.files == theirs.files
        for key in ours.files:
            np.testing.assert_array_equal(ours[key], theirs[key])


# --- generation -------------------------------------------------------------------------------------------------------


def test_texts_are_the_prompts_and_the_targets_own_answers(target, prompts, folder):
    found = Responses(folder)
    assert len(found) == COUNT and found.num_shards == 3 and found.target == target.name
    for index, (tokens, prompt_length) in enumerate(found.texts):
        assert tokens.dtype == np.int32 and tokens[:prompt_length].tolist() == prompts[index]
        assert 1 <= len(tokens) - prompt_length <= OPTIONS["max_tokens"]
        assert found.temperatures[index] == index % 2
    tokens, prompt_length = found[0]
    assert tokens[prompt_length:].tolist() == tiny.numpy_greedy(target, prompts[0], 6)


def test_sampled_answers_differ_between_seeds(target, folder, prompts, tmp_path):
    generate_responses(target, prompts, tmp_path, **{**OPTIONS, "seed": 4})
    pairs = list(zip(Responses(folder).texts, Responses(tmp_path).texts, strict=True))
    same = [np.array_equal(ours[0], theirs[0]) for ours, theirs in pairs]
    assert all(same[::2]) and not all(same[1::2])


@pytest.mark.parametrize("finished", [1, 2])
def test_a_run_killed_between_shards_goes_on(finished, target, prompts, folder, tmp_path):
    def kill(stats):
        if stats.shards_found == 0 and len(list(tmp_path.glob("shard-*.npz"))) == finished:
            raise Killed

    with pytest.raises(Killed):
        generate_responses(target, prompts, tmp_path, progress=kill, **OPTIONS)
    assert len(Responses(tmp_path)) == 4 * finished  # what is there can be read before the rest
    stats = generate_responses(target, prompts, tmp_path, **OPTIONS)
    assert stats.shards_found == finished and stats.shards == 3 and stats.texts == COUNT
    assert 0 < stats.new_tokens < stats.response_tokens
    same_files(tmp_path, folder)


@pytest.mark.parametrize("moment", ["while decoding", "while writing"])
def test_a_run_killed_inside_a_shard_goes_on(moment, target, prompts, folder, tmp_path, monkeypatch):
    calls = []

    def decoding(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return generate(*arguments, **options)

    def writing(file, **arrays):
        calls.append(1)
        if len(calls) == 2:
            file.write(b"half")
            raise Killed
        savez(file, **arrays)

    generate, savez = data.generate, np.savez
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if moment == "while decoding":
            patch.setattr(data, "generate", decoding)
        else:
            patch.setattr(np, "savez", writing)
        generate_responses(target, prompts, tmp_path, **OPTIONS)
    assert len(Responses(tmp_path)) == 4
    assert generate_responses(target, prompts, tmp_path, **OPTIONS).shards_found == 1
    same_files(tmp_path, folder)


def test_a_finished_folder_is_only_read(target, prompts, folder, monkeypatch):
    monkeypatch.setattr(data, "generate", None)
    seen = []
    stats = generate_responses(target, prompts, folder, progress=seen.append, **OPTIONS)
    assert stats.shards_found == stats.shards == 3 and stats.new_tokens == 0 and seen[-1] == stats
    assert stats.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("change, name", [
    ({"max_tokens": 5}, "max_tokens is 6 there and 5 here"),
    ({"temperature": 0.0}, "temperatures is"),
    ({"seed": 9}, "seed is 3 there and 9 here"),
    ({"shard_size": 5}, "shard_size is 4 there and 5 here"),
    ({"prompts": 1}, "prompts is"),
    ({"target": 1}, "target is 'tiny-0' there and 'tiny-1' here"),
])  # fmt: skip
def test_a_folder_made_in_another_way_is_refused(change, name, target, prompts, folder):
    change = dict(change)
    if change.pop("target", None):
        target = tiny.tiny(seed=1)
    if change.pop("prompts", None):
        prompts = [*prompts[1:], prompts[0]]
    with pytest.raises(ValueError, match=name):
        generate_responses(target, prompts, folder, **{**OPTIONS, **change})


def test_long_prompts_are_counted(target, prompts, tmp_path):
    stats = generate_responses(target, prompts, tmp_path, **OPTIONS, max_prompt_tokens=8)
    assert (stats.texts, stats.prompts_too_long) == (8, 2)
    assert max(Responses(tmp_path).prompt_lengths) == 8


@pytest.mark.parametrize("change, words", [
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"batch_size": 1.5}, "batch_size=1.5"),
    ({"temperature": [1.0]}, "1 temperatures were given for 10 prompts"),
    ({"temperature": -1}, "temperature=-1"),
    ({"seed": -1}, "seed=-1"),
    ({"max_tokens": 256}, "max_tokens=256 leaves no room"),
    ({"max_prompt_tokens": 251}, "use at most max_prompt_tokens=250"),
    ({"max_prompt_tokens": 2}, "all 10 prompts have more than max_prompt_tokens=2"),
])  # fmt: skip
def test_bad_arguments(change, words, target, prompts, tmp_path):
    with pytest.raises(ValueError, match=words):
        generate_responses(target, prompts, tmp_path, **{**OPTIONS, **change})
    assert not list(tmp_path.iterdir())


# --- reading ----------------------------------------------------------------------------------------------------------


def put(folder, texts, target="toy", shards=1, number=0):
    """A folder as `generate_responses` leaves it, with these (tokens, prompt length)."""
    folder.mkdir(exist_ok=True)
    manifest = {"format": 1, "target": target, "vocab_size": 1000, "shards": shards}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lengths = [len(tokens) for tokens, _ in texts]
    np.savez(
        folder / f"shard-{number:05d}.npz",
        tokens=np.concatenate([tokens for tokens, _ in texts]).astype(np.int32),
        offsets=np.cumsum([0, *lengths]),
        prompt_lengths=np.array([prompt for _, prompt in texts], np.int32),
        prompts=np.arange(len(texts)),
        temperatures=np.zeros(len(texts), np.float32),
    )


def made_texts(count, seed=0, most=40):
    """Texts without a token twice, of 2 to `most` tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, most + 1, count)
    tokens = np.split(1 + np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
    return [(t, int(rng.integers(1, len(t)))) for t in tokens]


def test_the_split_is_the_prompts_own(tmp_path):
    texts = made_texts(400)
    put(tmp_path / "a", texts[:200])
    put(tmp_path / "b", texts[200:])
    few, all_ = Responses(tmp_path / "a", held_out=0.2), Responses(tmp_path, held_out=0.2)
    assert len(few) == 200 and len(all_) == 400
    held_out, train = all_.indices("held_out"), all_.indices("train")
    assert sorted([*held_out, *train]) == all_.indices("all").tolist() == list(range(400))
    assert 40 < len(held_out) < 120
    np.testing.assert_array_equal(few.indices("held_out"), held_out[held_out < 200])  # more texts move none
    put(tmp_path / "c", [(np.append(tokens, 7), prompt) for tokens, prompt in texts[:200]])  # other answers
    others = Responses(tmp_path / "c", held_out=0.2)
    np.testing.assert_array_equal(others.indices("held_out"), few.indices("held_out"))
    assert not len(Responses(tmp_path, held_out=0).indices("held_out"))


def test_max_shards_gives_what_stood_there_before(tmp_path):
    put(tmp_path, made_texts(5), shards=3)
    assert Responses(tmp_path).num_shards == 1
    put(tmp_path, made_texts(6, seed=1), shards=3, number=1)
    assert len(Responses(tmp_path)) == 11 and len(Responses(tmp_path, max_shards=1)) == 5


@pytest.mark.parametrize("make, words", [
    (lambda path: None, "holds no manifest.json"),
    (lambda path: (path / "manifest.json").write_text("{"), "is damaged"),
    (lambda path: (path / "manifest.json").write_text('{"format": 0}'), "not of format 1"),
    (lambda path: (put(path, made_texts(3)), os.remove(path / "shard-00000.npz")), "no finished shard yet"),
    (lambda path: (put(path, made_texts(3)), (path / "shard-00000.npz").write_bytes(b"half")), "delete it"),
    (lambda path: (put(path / "a", made_texts(3)), put(path / "b", made_texts(3), "other")), "from one target"),
])  # fmt: skip
def test_folders_that_cannot_be_read(make, words, tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=words):
        Responses(tmp_path)


def test_bad_questions_about_texts(tmp_path):
    put(tmp_path, made_texts(3))
    found = Responses(tmp_path, held_out=0)
    for ask, words in [
        (lambda: Responses(tmp_path, held_out=1), "held_out=1"),
        (lambda: Responses(tmp_path, max_shards=2), "holds only 1 finished"),
        (lambda: found.indices("test"), "split='test'"),
        (lambda: found.batches(1, 8, split="held_out"), "no text of 3"),
        (lambda: found.batches(0, 8), "batch=0"),
        (lambda: found.batches(1, 8, seed=-1), "seed=-1"),
        (lambda: found.batches(1, 8, start_step=-1), "start_step=-1"),
        (lambda: BatchStream([(np.arange(9), 8)], 1, 8), "length=8"),
    ]:
        with pytest.raises(ValueError, match=words):
            ask()


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn_prompts", [False, True])
def test_masks_segments_and_positions(learn_prompts):
    texts = made_texts(50)
    stream = BatchStream(texts, batch=3, length=48, learn_prompts=learn_prompts)
    by_first = {int(tokens[0]): (tokens, prompt) for tokens, prompt in texts}
    for batch in (next(stream) for _ in range(10)):
        assert [a.dtype for a in batch] == [np.int32, bool, np.int32, np.int32]
        assert all(a.shape == (3, 48) for a in batch)
        for tokens, loss, segments, positions in zip(*batch, strict=True):
            count = segments.max()
            assert (np.diff(segments[segments > 0]) >= 0).all() and set(segments) - {0} == set(range(1, count + 1))
            for segment in range(1, count + 1):
                place = np.flatnonzero(segments == segment)
                text, prompt = by_first[int(tokens[place[0]])]
                np.testing.assert_array_equal(tokens[place], text)
                np.testing.assert_array_equal(positions[place], np.arange(len(text)))
                begin = 1 if learn_prompts else prompt
                np.testing.assert_array_equal(loss[place], np.arange(len(text)) >= begin)
            padding = segments == 0
            assert not tokens[padding].any() and not loss[padding].any() and not positions[padding].any()
            assert (segments[:-1][loss[1:]] == segments[1:][loss[1:]]).all()  # the position before is of the same text


@pytest.mark.parametrize("batch", [1, 4])
def test_every_epoch_holds_every_token_once(batch):
    texts = made_texts(120)
    stream = BatchStream(texts, batch, length=64, seed=5)
    rows = stream.stats.rows
    expected = np.sort(np.concatenate([tokens for tokens, _ in texts]))
    found = [row for _, found in zip(range(2 * rows // batch + 2), stream, strict=False) for row in found.tokens]
    orders = [np.concatenate(found[epoch * rows : (epoch + 1) * rows]) for epoch in (0, 1)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order[order > 0]), expected)
    assert not np.array_equal(*orders)
    assert stream.steps_per_epoch == rows / batch
    assert stream.stats.tokens == len(expected) and stream.stats.texts == 120
    assert stream.stats.loss_tokens == sum(len(tokens) - prompt for tokens, prompt in texts)
    assert stream.stats.padding == pytest.approx(1 - len(expected) / (rows * 64))
    assert stream.stats.padding < 0.05


def test_a_stream_depends_on_seed_and_step_alone(tmp_path):
    put(tmp_path, made_texts(60))
    whole = [next(stream) for stream in [Responses(tmp_path).batches(2, 50, seed=1)] for _ in range(30)]
    for start in (0, 7, 29):
        for step, batch in zip(range(start, 30), Responses(tmp_path).batches(2, 50, 1, start), strict=False):
            for ours, theirs in zip(batch, whole[step], strict=True):
                np.testing.assert_array_equal(ours, theirs)
    stream = Responses(tmp_path).batches(2, 50, seed=1)
    np.testing.assert_array_equal(stream.at(20).tokens, whole[20].tokens)
    assert stream.step == 0
    other = Responses(tmp_path).batches(2, 50, seed=2)
    assert any(not np.array_equal(next(other).tokens, batch.tokens) for batch in whole[:3])


def test_what_does_not_fit_a_row_is_counted():
    texts = [(np.arange(1, 21), 3), (np.arange(31, 41), 10 - 1), (np.arange(51, 71), 16), (np.arange(81, 91), 2)]
    stats = BatchStream(texts, 1, 10).stats
    assert (stats.texts, stats.prompts_too_long, stats.texts_cut, stats.tokens_cut) == (3, 1, 1, 10)
    assert stats.tokens == 30 and stats.loss_tokens == 7 + 1 + 8


# --- the scripts that make prompts and answers ------------------------------------------------------------------------


def test_prompts_of_the_evaluation_are_refused(tmp_path):
    script = tiny.experiment("training_prompts")
    item = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": [item, "a short one"]}) + "\n")
    excluded = script.excluded_spans(tmp_path)

    class Target:
        class tokenizer:
            apply_chat_template = staticmethod(lambda messages: messages[-1]["content"].split())

    texts = [f"Well, {item.upper()}!", "A short one?", "a short one more", "a short one, more", "", " ".join("ab" * 50)]
    records = [{"category": "x", "messages": [{"role": "user", "content": text}]} for text in texts]
    kept, counts = script.choose(records, Target, excluded, 20)
    assert [record["messages"][0]["content"] for record in kept] == ["a short one more"]
    assert sorted((fate, number) for (_, fate), number in counts.items()) == [
        ("kept", 1), ("refused: a copy", 1), ("refused: in the files to exclude", 2), ("refused: not of its kind", 1),
        ("refused: too long", 1)]  # fmt: skip


def test_functions_of_the_standard_library_lack_their_code():
    texts = list(tiny.experiment("training_prompts").code(20, seed=1))
    assert len(set(texts)) == 20
    for text in texts:
        request, head = text.split("\n", 1)
        assert request == "Complete the code I provided." and head.startswith("def ")
        compile(head + "    pass\n", "head", "exec")


def test_answers_by_command(target, tmp_path, monkeypatch, capsys):
    import spec_jax

    monkeypatch.setattr(spec_jax, "load_model", lambda *_: tiny.with_text(target), raising=False)
    lines = [json.dumps({"turns": [f"{letter} b c"]}) for letter in "abcdef"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out"), "--max-tokens", "4",
                 "--max-prompt-tokens", "20", "--shard", "4", "--sampled", "0.5"]  # fmt: skip
    assert tiny.experiment("training_responses").main(arguments) == 0
    assert len(Responses(tmp_path / "out")) == 6 and "shards_found=0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tiny.experiment("training_responses").main([*arguments, "--sampled", "2"])
    assert "--sampled 2" in capsys.readouterr().err
