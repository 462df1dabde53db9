"""Problem files for tests, and an enumeration of their own that shares no code with the package."""

import itertools
import json
import math

import numpy as np


def prefixes(vocab, stop, horizon):
    going = [v for v in range(vocab) if v != stop]
    return [ids for t in range(horizon) for ids in itertools.product(going, repeat=t)]


def responses(vocab, stop, horizon):
    known = set(prefixes(vocab, stop, horizon))
    found = [(*h, v) for h in known for v in range(vocab) if (*h, v) not in known]
    return sorted(found, key=lambda ids: (len(ids), ids))


def key(ids):
    return " ".join(map(str, ids))


def document(vocab, stop, horizon, prompts):
    """A problem file from functions: (policy(n, v), behavior(n, v) or None, reward(k)) a prompt."""
    where = list(enumerate(prefixes(vocab, stop, horizon)))
    ends = list(enumerate(responses(vocab, stop, horizon)))
    tables = []
    for policy, behavior, reward in prompts:
        table = {"policy": {key(h): [policy(n, v) for v in range(vocab)] for n, h in where}}
        if behavior is not None:
            table["behavior"] = {key(h): [behavior(n, v) for v in range(vocab)] for n, h in where}
        tables.append({**table, "rewards": {key(y): reward(k) for k, y in ends}})
    return {"vocab": vocab, "stop": stop, "horizon": horizon, "prompts": tables}


def current(n, v):
    return 0.8 * math.sin(1 + 2 * v + 3 * n)


def behind(n, v):
    return current(n, v) + 0.6 * math.cos(2 + 3 * v + 5 * n)


def real(k):
    return ((7 * k + 3) % 15) / 14


def binary(k):
    return float(real(k) >= 0.6)


def tree(*, stale=False, reward=real):
    """The specification's TREE, on policy or from its stale sampler."""
    return document(3, 2, 3, [(current, behind if stale else None, reward)])


def pair():
    """Two prompts, a stop token in the middle of the ids, rewards of either sign with ties."""
    second = (
        lambda n, v: 0.7 * math.cos(1 + n + 2 * v),
        lambda n, v: 0.9 * math.sin(n - 3 * v),
        lambda k: float(k % 2) - 0.25 * (k % 3),
    )
    return document(3, 1, 2, [(current, behind, lambda k: [1.0, -1.0, 0.5][k % 3]), second])


def scattered(rng):
    """A random small file: any stop token or none, one or two prompts, rewards of several kinds."""
    vocab, horizon = rng.choice(((2, 1), (3, 1), (2, 2), (3, 2)))
    stop = rng.choice((None, *range(vocab)))
    count = 1 if (vocab, horizon) == (3, 2) else rng.choice((1, 2))
    reward = rng.choice(
        (
            lambda k: 2.0 * (k % 2) - 1,
            lambda k: float(k % 2),
            lambda k: rng.gauss(0, 1),
            lambda k: (k % 3) / 2,
        )
    )

    def prompt():
        policy = {(n, v): rng.gauss(0, 1) for n in range(vocab**horizon) for v in range(vocab)}
        apart = {place: z + rng.gauss(0, 0.7) for place, z in policy.items()}
        chosen = rng.choice((None, apart))
        behavior = None if chosen is None else lambda n, v: chosen[n, v]
        return lambda n, v: policy[n, v], behavior, reward

    return document(vocab, stop, horizon, [prompt() for _ in range(count)])


def write(folder, data, name="problem.json"):
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


class Enumeration:
    """Every batch of a problem file, listed; estimators are written out below in numpy."""

    def __init__(self, data, group_size):
        self.vocab, self.horizon, self.group_size = data["vocab"], data["horizon"], group_size
        shape = (data["vocab"], data["stop"], data["horizon"])
        places = {h: n for n, h in enumerate(prefixes(*shape))}
        self.ends = responses(*shape)
        self.lengths = np.array([len(y) for y in self.ends])
        self.prompts = [self._prompt(p, places) for p in data["prompts"]]
        self.count = len(self.prompts)

    def _prompt(self, table, places):
        def probabilities(name):
            logits = np.array([table.get(name, table["policy"])[key(h)] for h in places])
            odds = np.exp(logits - logits.max(1, keepdims=True))
            return odds / odds.sum(1, keepdims=True)

        pi, mu = probabilities("policy"), probabilities("behavior")
        scores = np.eye(self.vocab)[None] - pi[:, None, :]
        steps = [[(places[y[:t]], y[t]) for t in range(len(y))] for y in self.ends]
        return {
            "steps": steps,
            "scores": scores,
            "mu": mu,
            "ratio": np.divide(pi, mu, out=np.ones_like(pi), where=mu > 0),
            "pi_y": np.array([math.prod(pi[n, v] for n, v in path) for path in steps]),
            "mu_y": np.array([math.prod(mu[n, v] for n, v in path) for path in steps]),
            "rewards": np.array([table["rewards"][key(y)] for y in self.ends]),
        }

    def objective(self):
        """J and its gradient."""
        values, blocks = [], []
        for prompt in self.prompts:
            weight = prompt["pi_y"] * prompt["rewards"]
            values.append(weight.sum())
            blocks.append(sum(w * self._response(prompt, k) for k, w in enumerate(weight)))
        return np.mean(values), np.concatenate([b.ravel() for b in blocks]) / self.count

    def _response(self, prompt, k, weights=None, centering=None):
        """Sum over tokens of weight times score, minus the sampler's mean weighted score."""
        out = np.zeros_like(prompt["mu"])
        for t, (n, v) in enumerate(prompt["steps"][k]):
            out[n] += (1.0 if weights is None else weights[t]) * prompt["scores"][n, v]
            if centering is not None:
                per_token = np.array([centering(r) for r in prompt["ratio"][n]])
                out[n] -= (prompt["mu"][n] * per_token) @ prompt["scores"][n]
        return out

    def moments(self, estimator, *, drift=False):
        """Mean and variance of an estimator (advantage, weight, aggregation, centering, refill)."""
        advantage, weigh, aggregate, centering, refill = estimator
        groups = list(itertools.product(range(len(self.ends)), repeat=self.group_size))
        listed = []
        for prompt in self.prompts:
            mine = []
            for group in groups:
                chance = math.prod(prompt["mu_y"][k] for k in group)
                rewards = prompt["rewards"][list(group)]
                if chance == 0 or (refill and not drift and len(set(rewards)) == 1):
                    continue
                found = np.ones(len(group)) if drift else advantage(rewards)
                block = 0
                for k, a in zip(group, found, strict=True):
                    ratios = np.array([prompt["ratio"][step] for step in prompt["steps"][k]])
                    term = self._response(prompt, k, weigh(ratios, a), centering)
                    block = block + a * aggregate(len(ratios), self.horizon) * term
                mine.append((chance, block.ravel(), self.lengths[list(group)].sum()))
            total = sum(chance for chance, _, _ in mine)
            listed.append([(chance / total, block, tokens) for chance, block, tokens in mine])
        mean, square, responses_ = 0, 0, self.count * self.group_size
        for batch in itertools.product(*listed):
            chance = math.prod(part[0] for part in batch)
            estimate = np.concatenate([part[1] for part in batch])
            tokens = sum(part[2] for part in batch)
            estimate = estimate / (tokens if aggregate is token_mean else responses_)
            mean = mean + chance * estimate
            square += chance * estimate @ estimate
        return mean, square - mean @ mean


def plain(rewards):
    return rewards


def others(rewards):
    return np.array([r - np.mean(np.delete(rewards, i)) for i, r in enumerate(rewards)])


def own(rewards):
    return rewards - rewards.mean()


def std(rewards):
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def once(ratios, a):
    return np.ones_like(ratios)


def clip(low, high, reach=lambda r: r):
    def weigh(ratios, a):
        w = reach(ratios)
        return np.where(((a > 0) & (w > 1 + high)) | ((a < 0) & (w < 1 - low)), 0.0, w)

    return weigh


def whole(ratios):
    return np.full_like(ratios, ratios.prod())


def geometric(ratios):
    return np.full_like(ratios, math.exp(np.log(ratios).mean()))


def taper(a_pos, b_pos, a_neg, b_neg):
    def weigh(ratios, a):
        low, high = (a_pos, b_pos) if a >= 0 else (a_neg, b_neg)
        return np.clip(whole(ratios), low, high)

    return weigh


def inside(ratio):
    return ratio if 0.5 <= ratio <= 5 else 0.0


def token_sum(length, horizon):
    return 1.0


def sequence_mean(length, horizon):
    return 1 / length


def constant_length(length, horizon):
    return 1 / horizon


def token_mean(length, horizon):
    return 1.0


def _entry(advantage, weigh, aggregate=token_sum, centering=None, refill=False):
    return advantage, weigh, aggregate, centering, refill


ESTIMATORS = {
    "reinforce": _entry(plain, once),
    "rloo": _entry(others, once),
    "group_mean": _entry(own, once),
    "grpo": _entry(std, clip(0.2, 0.2), sequence_mean),
    "dr_grpo": _entry(own, clip(0.2, 0.2), constant_length),
    "dapo": _entry(std, clip(0.2, 0.28), token_mean, refill=True),
    "trajectory_is": _entry(others, lambda r, a: whole(r)),
    "token_is": _entry(others, lambda r, a: r),
    "prefix_is": _entry(others, lambda r, a: r.cumprod()),
    "suffix_is": _entry(others, lambda r, a: r[::-1].cumprod()[::-1]),
    "token_tis": _entry(others, lambda r, a: np.minimum(r, 2)),
    "sequence_tis": _entry(others, lambda r, a: np.minimum(whole(r), 2)),
    "cispo": _entry(std, lambda r, a: np.minimum(r, 5), token_mean),
    "icepop": _entry(own, lambda r, a: np.array([inside(x) for x in r]), token_mean),
    "gspo": _entry(std, clip(3e-4, 4e-4, geometric), sequence_mean),
    "topr": _entry(plain, taper(1, 1, 0, 1)),
    "positives_only": _entry(plain, taper(1, 1, 0, 0)),
    "naive": _entry(plain, taper(1, 1, 1, 1)),
    "tis_both_signs": _entry(plain, taper(0, 1, 0, 1)),
    "centered": _entry(own, once, centering=lambda r: 1.0),
    "centered_tis": _entry(own, lambda r, a: np.minimum(r, 2), centering=lambda r: min(r, 2)),
    "centered_mask": _entry(own, lambda r, a: np.array([inside(x) for x in r]), centering=inside),
    "starting_point": _entry(
        own, lambda r, a: np.minimum(r, 5), constant_length, centering=lambda r: min(r, 5)
    ),
}
