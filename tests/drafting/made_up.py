"""A target whose logits are made up: for drafters that learn from logits, step by step beside a reference.

Most rows say that a fixed successor of their own token is next, so that proposals are accepted now and then; rows that
nothing may read hold NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafting.base import Seen, View

CAPACITY = 256


@functools.partial(jax.jit, static_argnums=0)
def _commit(drafter, state, seen):
    return drafter.commit((), state, seen)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, state, view):
    return drafter.propose((), state, view)


class Loop:
    """One batch of greedy texts; `references` are told what every row sees, and say what it must propose.

    A reference has prefill(tokens, next_tokens), propose(text) -> (tokens, parents, auxiliary tokens, their parents),
    and learn(text, flight, parents, real, logits, path): the committed text before the step, the tokens in flight, the
    rows' parents, which rows were computed, the logits of all rows, and the rows of the accepted run.
    """

    def __init__(self, drafter, references, vocab, seed, faithful=0.8, chunk=8):
        self.rng = np.random.default_rng(seed)
        self.drafter, self.references, self.vocab, self.faithful = drafter, references, vocab, faithful
        self.successor = self.rng.integers(0, vocab, vocab)
        self.texts = [self.rng.integers(0, vocab, self.rng.integers(2, 20)).tolist() for _ in references]
        self.state = drafter.init((), None, len(references), CAPACITY)
        self.drafted = self.accepted = 0
        longest = max(map(len, self.texts))
        for start in range(0, longest, chunk):  # prompts but for their last tokens, as `prefill` feeds them
            tokens, after = np.zeros((2, len(self.texts), chunk), np.int32)
            count = np.array([np.clip(len(t) - 1 - start, 0, chunk) for t in self.texts], np.int32)
            for row, text in enumerate(self.texts):
                tokens[row, : count[row]] = text[start : start + count[row]]
                after[row, : count[row]] = text[start + 1 : start + 1 + count[row]]
                if count[row]:
                    references[row].prefill(tokens[row, : count[row]].tolist(), after[row, : count[row]].tolist())
            path = np.broadcast_to(np.arange(chunk, dtype=np.int32), tokens.shape)
            first = np.full(len(count), start, np.int32)
            self.state = _commit(drafter, self.state, Seen(tokens, after, first, count, {}, None, path, True))

    def step(self):
        """Proposes, compares, verifies greedily and commits."""
        batch = len(self.texts)
        tokens, length = np.zeros((batch, CAPACITY), np.int32), np.array([len(t) for t in self.texts], np.int32)
        for row, text in enumerate(self.texts):
            tokens[row, : len(text)] = text
        last = np.array([t[-1] for t in self.texts], np.int32)
        view = View(tokens, length, last, jnp.full(batch, 99), jnp.ones(batch, bool), None, None, None, rule="coupled")
        draft, self.state = _propose(self.drafter, self.state, view)
        nodes = draft.tokens.shape[1]
        aux = np.zeros(nodes, bool) if draft.auxiliary is None else np.asarray(draft.auxiliary)
        count, found = np.asarray(draft.count), np.asarray(draft.tokens)
        parents = np.arange(-1, nodes - 1) if draft.parents is None else np.asarray(draft.parents)
        parents = np.broadcast_to(parents, found.shape)
        logits = self.rng.normal(size=(batch, 1 + nodes, self.vocab)).astype(np.float32)
        paths = []
        for row, text in enumerate(self.texts):
            ours = (found[row, : count[row]].tolist(), parents[row, : count[row]].tolist())
            ours += (found[row][aux].tolist(), parents[row][aux].tolist())
            assert ours == self.references[row].propose(text), (row, text)
            flight = np.append(last[row], found[row])
            for at, token in enumerate(flight):
                if 0 <= token < self.vocab and self.rng.random() < self.faithful:
                    logits[row, at, self.successor[token]] += 9.0
            real = np.append(True, (np.arange(nodes) < count[row]) | aux)
            logits[row, ~real] = np.nan
            path = [0]
            while True:  # greedy, along the tree
                best = int(np.argmax(logits[row, path[-1]]))
                children = [n for n in range(count[row]) if parents[row, n] == path[-1] - 1 and found[row, n] == best]
                if not children:
                    break
                path.append(1 + children[0])
            paths.append(path)
            self.references[row].learn(text, flight.tolist(), np.append(-1, parents[row] + 1), real, logits[row], path)
            self.drafted, self.accepted = self.drafted + int(count[row]), self.accepted + len(path) - 1
        width = 1 + nodes
        whole = np.zeros((batch, width), np.int32)
        fed, after = np.zeros((2, batch, width), np.int32)
        for row, path in enumerate(paths):
            whole[row, : len(path)] = path
            run = [int(np.argmax(logits[row, at])) for at in path]
            fed[row, : len(path)] = [last[row], *run[:-1]]
            after[row, : len(path)] = run
            self.texts[row] = self.texts[row] + run
        run_length = np.array([len(p) for p in paths], np.int32)
        seen = Seen(fed, after, length - 1, run_length, {}, jnp.asarray(logits), whole, False, jnp.asarray(count))
        self.state = _commit(self.drafter, self.state, seen)
