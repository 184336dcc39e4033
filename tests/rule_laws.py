"""What a step of every rule emits, by enumeration of drafts and coins in float64, from the rules' own formulas.

A step is enumerated as pairs (emitted tokens, probability) behind a prefix of tokens; its law, its expected length and
the law of several steps follow from these.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.rules import base, block, kseq, recursive, traversal

LIMIT = 1e-17


def enumerated(function, *static):
    """A function of laws and scalars on tuples and floats, compiled once and remembered."""
    compiled = jax.jit(function, static_argnums=static)

    @functools.cache
    def call(*arguments):
        with jax.enable_x64(True):
            given = [x if i in static else jnp.asarray(x) for i, x in enumerate(arguments)]
            return jax.tree.map(lambda x: float(x) if x.ndim == 0 else tuple(map(float, x)), compiled(*given))

    return call


accept = enumerated(base.acceptance_probability)
residual = enumerated(base.residual)
after_refusal = enumerated(recursive.after_refusal, 3)
prefix_probability = enumerated(block.prefix_probability)
keep_probability = enumerated(block.keep_probability)
after_deletion = enumerated(traversal.after_deletion, 4)
divisor = enumerated(kseq.divisor)
remainder = enumerated(kseq.remainder)


def children_of(parents):
    """Nodes by the row in flight that they are children of."""
    return {row: [n for n, parent in enumerate(parents) if parent + 1 == row] for row in range(len(parents) + 1)}


def sibling_draws(q, count, kind):
    """Every way to draw `count` siblings: (tokens, probability)."""
    if kind == "top":  # deterministic: the most probable ones
        yield tuple(np.argsort(-np.array(q), kind="stable")[:count].tolist()), 1.0
        return
    for tokens in itertools.product(range(len(q)), repeat=count):
        left, mass = list(q), 1.0
        for token in tokens:
            # What is left of a law without mass is no law: the rule skips such siblings, whatever they are.
            mass *= left[token] / sum(left) if sum(left) > 0 else float(token == 0)
            if kind == "without":
                left[token] = 0.0
        if mass > 0:
            yield tokens, mass


def drafts(parents, q_of, kind, prefix):
    """Every draft behind `prefix`: (token of every node, probability)."""
    children = children_of(parents)

    def fill(row, tokens, paths, mass):
        if row > len(parents):
            yield tokens, mass
        elif not children[row]:
            yield from fill(row + 1, tokens, paths, mass)
        else:
            for drawn, probability in sibling_draws(q_of(paths[row]), len(children[row]), kind):
                chosen = dict(zip(children[row], drawn, strict=True))
                more = {node + 1: (*paths[row], token) for node, token in chosen.items()}
                yield from fill(row + 1, tokens | chosen, paths | more, mass * probability)

    yield from fill(0, {}, {0: prefix}, 1.0)


def step(rule, parents, p_of, q_of, kind="with", prefix=()):
    """What one step emits behind `prefix`: {tokens: probability}."""
    found = {}
    judge = {"standard": _recursive, "recursive": _recursive, "block": _block, "traversal": _traversal, "kseq": _kseq}
    for tokens, mass in drafts(parents, q_of, kind, prefix):
        for accepted, law, probability in judge[rule](children_of(parents), tokens, p_of, q_of, kind, prefix):
            total = sum(law)
            for token, weight in enumerate(law):
                if mass * probability * weight > LIMIT:
                    emitted = (*accepted, token)
                    found[emitted] = found.get(emitted, 0.0) + mass * probability * weight / total
    return found


def _law(q, kind, token):
    return tuple(float(i == token) for i in range(len(q))) if kind == "top" else q


def _recursive(children, tokens, p_of, q_of, kind, prefix):
    """(accepted tokens, law of the next one, probability), of one draft."""

    def visit(row, accepted, mass):
        p, q = p_of((*prefix, *accepted)), q_of((*prefix, *accepted))
        for node in children[row]:
            law = _law(q, kind, tokens[node])
            if sum(law) == 0:
                continue
            passed = accept(p[tokens[node]], law[tokens[node]])
            if mass * passed > 0:
                yield from visit(node + 1, (*accepted, tokens[node]), mass * passed)
            mass *= 1 - passed
            p, q = after_refusal(p, law, tokens[node], kind == "without")
        if mass > LIMIT:
            yield accepted, p, mass

    yield from visit(0, (), 1.0)


def _block(children, tokens, p_of, q_of, kind, prefix):
    k = len(tokens)
    path = tuple(tokens[node] for node in range(k))
    laws = [(p_of((*prefix, *path[:i])), q_of((*prefix, *path[:i])) if i < k else None) for i in range(k + 1)]
    laws = [(p, None if q is None else _law(q, kind, path[i])) for i, (p, q) in enumerate(laws)]
    covered, keeps = [1.0], [1.0]
    for i in range(k):
        p, q = laws[i]
        covered.append(prefix_probability(covered[-1], p[path[i]], q[path[i]]))
        keeps.append(covered[-1] if i + 1 == k else keep_probability(covered[-1], *laws[i + 1]))
    for kept in range(k + 1):
        mass = keeps[kept] * np.prod([1 - keep for keep in keeps[kept + 1 :]])
        if mass > LIMIT:
            p, q = laws[kept]
            yield path[:kept], p if q is None else residual(tuple(covered[kept] * x for x in p), q), mass


def _traversal(children, tokens, p_of, q_of, kind, prefix):
    def visit(row, accepted, covered, p, q, left, mass):
        """Also (None, None, probability) that the row itself is deleted."""
        if not left:
            if mass * covered > LIMIT:
                yield accepted, p, mass * covered
            if mass * (1 - covered) > LIMIT:
                yield None, None, mass * (1 - covered)
            return
        node, path = left[0], (*accepted, tokens[left[0]])
        law = _law(q, kind, tokens[node])
        if sum(law) == 0:
            yield from visit(row, accepted, covered, p, q, left[1:], mass)
            return
        child = prefix_probability(covered, p[tokens[node]], law[tokens[node]])
        deleted = 0.0
        for found, next_law, probability in visit(
            node + 1, path, child, p_of((*prefix, *path)), q_of((*prefix, *path)), children[node + 1], mass
        ):
            if found is None:
                deleted += probability
            else:
                yield found, next_law, probability
        if deleted > LIMIT:
            after = after_deletion(covered, p, law, tokens[node], kind == "without")
            yield from visit(row, accepted, *after, left[1:], deleted)

    for found, law, mass in visit(0, (), 1.0, p_of(prefix), q_of(prefix), children[0], 1.0):
        assert found is not None or mass < 1e-12, "the last committed token was deleted"
        if found is not None:
            yield found, law, mass


def _kseq(children, tokens, p_of, q_of, kind, prefix):
    """Sequences side by side: all nodes with the accepted tokens stay active."""

    def visit(rows, accepted, mass):
        p, q = p_of((*prefix, *accepted)), q_of((*prefix, *accepted))
        active = [node for row in rows for node in children[row]]
        if active:
            rho, beta = divisor(p, q, len(active))
            for node in active:
                token = tokens[node]
                passed = accept(p[token], rho * q[token])
                same = [other + 1 for other in active if tokens[other] == token]
                if mass * passed > 0:
                    yield from visit(same, (*accepted, token), mass * passed)
                mass *= 1 - passed
            p = remainder(p, q, rho, beta, len(active))
        if mass > LIMIT:
            yield accepted, p, mass

    yield from visit([0], (), 1.0)


def expected_tokens(outcomes):
    """Tokens per step."""
    return sum(len(tokens) * mass for tokens, mass in outcomes.items())


def completed(outcomes, p_of, length, prefix=()):
    """The law of the next `length` tokens if the target itself continues: {tokens: probability}."""
    law = {}

    def complete(tokens, mass):
        if len(tokens) >= length:
            law[tokens[:length]] = law.get(tokens[:length], 0.0) + mass
            return
        for token, probability in enumerate(p_of((*prefix, *tokens))):
            if probability > 0:
                complete((*tokens, token), mass * probability)

    for tokens, mass in outcomes.items():
        complete(tokens, mass)
    return law


def several(rule, parents, p_of, q_of, kind, rounds):
    """What `rounds` steps in a row emit, noise being independent of what came before: {tokens: probability}."""
    found = {(): 1.0}
    one = functools.lru_cache(maxsize=None)(lambda prefix: step(rule, parents, p_of, q_of, kind, prefix))
    for _ in range(rounds):
        new = {}
        for prefix, mass in found.items():
            for tokens, probability in one(prefix).items():
                new[(*prefix, *tokens)] = new.get((*prefix, *tokens), 0.0) + mass * probability
        found = new
    return found


def table(rng, vocab, depth, zeros=0):
    """A random law behind every prefix of up to `depth` tokens, `zeros` tokens of each left out."""
    rows = {}
    for prefix in itertools.chain.from_iterable(itertools.product(range(vocab), repeat=n) for n in range(depth + 1)):
        row = rng.dirichlet(np.ones(vocab))
        row[rng.permutation(vocab)[:zeros]] = 0
        rows[prefix] = tuple((row / row.sum()).tolist())
    return rows


def greatest_error(law, p_of, length):
    """The largest difference between a law of `length` tokens and the target's."""
    vocab = len(p_of(()))
    truth = {
        tokens: np.prod([p_of(tokens[:i])[tokens[i]] for i in range(length)])
        for tokens in itertools.product(range(vocab), repeat=length)
    }
    assert set(law) <= set(truth)
    return max(abs(law.get(tokens, 0.0) - mass) for tokens, mass in truth.items())


def chain(k):
    return tuple(range(-1, k - 1))


def depth_of(parents):
    depths = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)
