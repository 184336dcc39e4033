"""Prompts to train drafters with: chat, word problems, articles to summarise and Python functions to complete.

Command:  python experiments/training_prompts.py --out prompts.jsonl [--kinds chat maths summary code] [--count 500]
          [--prompts FILE ...] [--exclude FOLDER] [--target smollm2-135m-instruct] [--seed 0]
Hardware: any; chat, maths and summary are written by the target, about 250 tokens a second on one CPU core.
Expected: `count` prompts of every kind and those of the files, mixed; what was refused, and why, on stderr.

The target writes users' turns itself (Magpie, https://arxiv.org/abs/2406.08464): it goes on behind its chat template's
opening of a user's turn, with nothing (chat) or the first words of a word problem (maths). Articles are answers to
requests for one. Functions are heads and docstrings of the standard library of the Python that runs. Prompts that share
13 words in a row with a file of the folder to exclude, or are the same as one there, are refused.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import spec_jax
from spec_jax.checks import check_counts
from spec_jax.prompts import read_prompts

KINDS = ("chat", "maths", "summary", "code")
SPAN = 13
CALMER = 0.7
"""Temperature of word problems and articles, which lose their thread at 1."""
CODE_REQUEST, SUMMARY_REQUEST = "Complete the code I provided.\n", "Summarize: "
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo")
NAMES = "Ava Ben Carla Dmitri Elena Farid Grace Hiro Imani Jonas Keiko Liam Maya Nadia Omar Priya Quinn Rosa Sam Tara"
VERBS = "has|buys|sells|bakes|collects|reads|plants|paints|saves|runs|earns|picks|carries|makes|shares|needs|counts"
THINGS = (
    "apples|books|dollars|miles|stickers|cupcakes|pages|marbles|boxes of pencils|flowers|eggs|hours|bottles of water|"
    "bags of rice|seashells|tickets|cookies|bricks|chairs|toy cars|stamps|pounds of flour|bracelets|fish|laps|candles"
)
TOPICS = (
    "a house fire|a football match|a court case|a storm that cut off the power|an election|a lost child who was found|"
    "a new medicine|a bank robbery|a film star's divorce|a factory that closes|a study about sleep|a plane that turned "
    "back|a school's new rule|a strike of bus drivers|a stolen painting|a rare animal|a charity run|a road accident|"
    "a flooded village|a space mission|a rise in house prices|a mayor who resigned|a tennis final|a dog that saved its "
    "owner|a data leak|a bridge that is to be repaired|a missing hiker|a record for the longest swim|a police search|"
    "a dispute between two countries|a royal visit|a virus outbreak|a new phone|a chef's restaurant|a border crossing"
)
PLACES = "Ohio|Manchester|Nairobi|Texas|Sydney|Lagos|Florida|Glasgow|Mumbai|Madrid|Chicago|Cairo|Oslo|Lima|Kent|Seoul"
ARTICLE_REQUESTS = (
    "Write a news article about {topic} in {place}. Name the people and say when and how it happened.",
    "Write a long newspaper report from {place} about {topic}, with quotes from witnesses and officials.",
    "You are a reporter. Tell in about 250 words the story of {topic} in {place}. Write plain paragraphs, no headline.",
)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def spans_of(text: str) -> set[tuple[str, ...]]:
    """Every run of 13 words, or all words of a shorter text."""
    words = words_of(text)
    return {tuple(words[i : i + SPAN]) for i in range(max(len(words) - SPAN + 1, 1))} if words else set()


def excluded_spans(folder: str | Path) -> set[tuple[str, ...]]:
    """The spans of every string in the JSON-lines files of a folder."""
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise ValueError(f"--exclude {folder} holds no .jsonl files")
    found: set[tuple[str, ...]] = set()
    for path in files:
        for line in path.read_text(encoding="utf-8").split("\n"):
            for text in _strings(json.loads(line)) if line.strip() else ():
                found |= spans_of(text)
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def repeats_itself(text: str) -> bool:
    """Whether a fifth of its runs of four words came before, as in texts that have fallen into a loop."""
    words = words_of(text)
    spans = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(spans)) < 0.8 * len(spans)


# --- what the target writes -------------------------------------------------------------------------------------------


def user_opening(target: Any) -> str:
    """The text of the chat template up to where the user's words begin."""
    mark = "MARK OF THE USER"
    return target.tokenizer.render_chat([{"role": "user", "content": mark}]).split(mark)[0]


def go_on(
    target: Any, starts: Sequence[str], seed: int, max_tokens: int, batch: int, temperature: float
) -> list[tuple[str, bool]]:
    """(new text, whether it ended by itself) for text that begins so, sampled."""
    ids = [target.tokenizer.encode(start, add_special_tokens=False) for start in starts]
    sampling = [
        {"temperature": temperature, "top_p": 0.95, "max_tokens": max_tokens, "seed": seed * 1_000_000 + i}
        for i in range(len(ids))
    ]
    found = spec_jax.generate(target, ids, None, sampling, exact=False, max_batch_size=batch).sequences
    return [(sequence.text, sequence.finish_reason == "stop") for sequence in found]


def chat(target: Any, count: int, seed: int, batch: int) -> Iterator[str]:
    """Users' turns, "" for those that do not read like one."""
    for text, ended in go_on(target, [user_opening(target)] * count, seed, 120, batch, 1.0):
        fits = ended and len(words_of(text)) >= 4 and not repeats_itself(text)
        yield text.strip() if fits else ""


def maths(target: Any, count: int, seed: int, batch: int) -> Iterator[str]:
    """Word problems: the user's turn begins with a person and a number, and ends with the last question."""
    rng, opening = random.Random(f"maths {seed}"), user_opening(target)
    names, verbs, things = NAMES.split(), VERBS.split("|"), THINGS.split("|")
    starts = [
        f"{rng.choice(names)} {rng.choice(verbs)} {rng.randint(2, 120)} {rng.choice(things)}" for _ in range(count)
    ]
    found = go_on(target, [opening + start for start in starts], seed, 120, batch, CALMER)
    for start, (text, _) in zip(starts, found, strict=True):
        problem = (start + text)[: (start + text).rfind("?") + 1].strip()
        fits = len(re.findall(r"\d+", problem)) >= 2 and not repeats_itself(problem)
        yield problem if fits else ""


def summary(target: Any, count: int, seed: int, batch: int) -> Iterator[str]:
    """Articles of the target with the request to summarise them; cut behind the last whole sentence."""
    rng = random.Random(f"summary {seed}")
    starts = []
    for _ in range(count):
        request = rng.choice(ARTICLE_REQUESTS).format(
            topic=rng.choice(TOPICS.split("|")), place=rng.choice(PLACES.split("|"))
        )
        starts.append(target.tokenizer.render_chat([{"role": "user", "content": request}]))
    for text, _ in go_on(target, starts, seed, 320, batch, CALMER):
        text = " ".join(text.replace("*", "").replace("#", "").split())
        article = text[: max(text.rfind(end) for end in (". ", '." ', ".")) + 1]
        yield SUMMARY_REQUEST + article if len(words_of(article)) >= 60 and not repeats_itself(article) else ""


# --- Python's standard library ----------------------------------------------------------------------------------------


def code(count: int, seed: int) -> Iterator[str]:
    """Heads and docstrings of functions, in random order, as long as there are any."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if not set(p.relative_to(root).parts) & set(LEFT_OUT)]
    heads = [head for path in paths for head in _heads(path)]
    random.Random(f"code {seed}").shuffle(heads)
    for head in heads[:count]:
        yield CODE_REQUEST + head


def _heads(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):  # files that test the parser
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and 40 <= len(ast.get_docstring(node) or "") <= 1200:
            end = node.body[0].end_lineno
            if len(node.body) > 1 and node.body[0].lineno > node.lineno:  # there is code behind, and not on one line
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : end])) + "\n"


# --- files of prompts -------------------------------------------------------------------------------------------------


def of_files(paths: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Records of files with `turns` or `messages`; a number like "(v12)" at the end of a turn tells copies apart."""
    for path in paths:
        for prompt in read_prompts(path):
            messages = [{**m, "content": re.sub(r" \(v\d+\)$", "", m["content"])} for m in prompt.messages]
            yield {"category": Path(path).stem, "messages": messages}


# --- all together -----------------------------------------------------------------------------------------------------


def choose(
    records: Iterable[dict[str, Any]], target: Any, excluded: set, max_prompt_tokens: int
) -> tuple[list[dict[str, Any]], collections.Counter]:
    """The records to keep, and counts of (category, what became of it)."""
    kept, seen, counts = [], set(), collections.Counter()
    for record in records:
        contents = [message["content"] for message in record["messages"]]
        key = tuple(words_of(" ".join(contents)))
        if not contents[-1].strip() or not key:
            fate = "refused: not of its kind"
        elif key in seen:
            fate = "refused: a copy"
        elif any(spans_of(text) & excluded for text in contents):
            fate = "refused: in the files to exclude"
        elif len(target.tokenizer.apply_chat_template(record["messages"])) > max_prompt_tokens:
            fate = "refused: too long"
        else:
            fate = "kept"
            kept.append(record)
        seen.add(key)
        counts[record["category"], fate] += 1
    return kept, counts


def records_of(target: Any, kinds: Sequence[str], count: int, seed: int, batch: int) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        if kind == "code":
            texts = code(count, seed)
        else:
            texts = {"chat": chat, "maths": maths, "summary": summary}[kind](target, count, seed, batch)
        for text in texts:
            yield {"category": kind, "messages": [{"role": "user", "content": text}]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON-lines file to write")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", type=int, default=500, help="prompts to make of every kind, some of them refused")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="FILE", help="further prompts to take in")
    parser.add_argument("--exclude", metavar="FOLDER", help="refuse what shares 13 words in a row with files in it")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--max-prompt-tokens", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="rows decoded side by side")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        check_counts(count=given.count, max_prompt_tokens=given.max_prompt_tokens, batch=given.batch)
        if given.seed < 0:
            raise ValueError(f"--seed {given.seed} must not be negative")
        excluded = excluded_spans(given.exclude) if given.exclude else set()
        files = list(of_files(given.prompts))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    target = spec_jax.load_model(given.target)
    made = records_of(target, given.kinds, given.count, given.seed, given.batch)
    kept, counts = choose([*files, *made], target, excluded, given.max_prompt_tokens)
    random.Random(given.seed).shuffle(kept)
    with open(given.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
    for (category, fate), number in sorted(counts.items()):
        print(f"{category}: {number} {fate}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
