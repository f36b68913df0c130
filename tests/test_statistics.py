"""Means, intervals, pass@k, maj@k and paired comparisons: by hand, by enumeration, and by simulation."""

import math
from itertools import combinations

import numpy as np
import pytest

from posttrain.base.distributions import sign_test, t_outside, t_quantile, z_quantile
from posttrain.evaluation.statistics import (
    maj_at_k,
    majorities,
    mean_by_prompt,
    paired_bootstrap,
    paired_difference,
    pass_at_k,
    passes,
    seed_noise,
    wilson,
)


def test_quantiles_are_those_of_the_tables():
    assert z_quantile(0.95) == pytest.approx(1.959963984540054, abs=1e-14)
    known = {1: 12.706204736, 2: 4.30265272991, 9: 2.26215716280, 30: 2.04227245630, 199: 1.97195654, 1e7: 1.95996422}
    for freedom, value in known.items():
        assert t_quantile(0.95, freedom) == pytest.approx(value, rel=1e-8)
        assert t_outside(t_quantile(0.95, freedom), freedom) == pytest.approx(0.05, rel=1e-12)
    assert t_quantile(0.99, 5) == pytest.approx(4.03214298, rel=1e-8)
    assert t_outside(0, 3) == 1 and t_outside(math.inf, 3) == 0
    for t in (0.1, 1.0, 3.0):  # with one and two degrees of freedom in closed form
        assert t_outside(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-12)
        assert t_outside(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-12)


def inspects_stderr(groups):
    """inspect_ai's `stderr(cluster=...)`, written out: Miller 2024, eq. 4."""
    scores = [score for group in groups for score in group]
    mean = sum(scores) / len(scores)
    total = sum((a - mean) * (b - mean) for group in groups for a in group for b in group)
    return math.sqrt(total * len(groups) / (len(groups) - 1)) / len(scores)


def test_standard_errors_are_inspects():
    random = np.random.default_rng(0)
    for _ in range(20):
        groups = [random.integers(0, 2, size=random.integers(1, 6)).tolist() for _ in range(15)]
        found = mean_by_prompt([*groups, []])
        assert found.standard_error == pytest.approx(inspects_stderr(groups), abs=1e-12)
        scores = [score for group in groups for score in group]
        assert (found.value, found.prompts, found.answers) == (np.mean(scores), 15, len(scores))
        alone = mean_by_prompt([[score] for score in scores])
        assert alone.standard_error == pytest.approx(np.std(scores, ddof=1) / math.sqrt(len(scores)), abs=1e-12)


def test_intervals_where_nothing_varies_have_a_width():
    """p = 0, p = 1, 10 prompts, one prompt: the width follows from the prompts, not from the samples."""
    for groups, low, high in (
        ([[0.0] * 4] * 10, 0, 0.2775),  # Wilson: z² / (n + z²) at n = 10
        ([[1.0] * 4] * 200, 1 - 0.01885, 1),  # and at n = 200
        ([[1.0]], 0.2065, 1),
        ([[1.0, 1.0, 1.0]], 0.2065, 1),
    ):
        found = mean_by_prompt(groups)
        assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
        assert found.standard_error == (0 if len(groups) > 1 else None)
    singles = mean_by_prompt([[1.0]] * 81 + [[0.0]] * 182)
    assert (singles.low, singles.high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))  # Newcombe
    assert wilson(0.5, 10) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    rewards = mean_by_prompt([[-2.0, 1.0], [3.0], [5.0]])  # not shares: t with 2 degrees of freedom
    assert rewards.high == pytest.approx(rewards.value + 4.302653 * rewards.standard_error)
    one = mean_by_prompt([[-2.0, 4.0]])
    assert (one.value, one.standard_error, one.low, one.high) == (1, None, None, None)
    with pytest.raises(ValueError, match="no graded answer"):
        mean_by_prompt([[], []])


def coverage(prompts, samples, p, like, repeats, seed):
    """Share of intervals that contain p, where the prompts' own p are Beta(p·like, (1 - p)·like), or all p if inf."""
    random = np.random.default_rng(seed)
    shape = (repeats, prompts)
    own = np.full(shape, p) if like == math.inf else random.beta(p * like, (1 - p) * like, shape)
    scores = (random.random((*shape, samples)) < own[:, :, None]).astype(float)
    found = [mean_by_prompt(evaluation) for evaluation in scores]
    return sum(one.low <= p <= one.high for one in found) / repeats


@pytest.mark.parametrize(("p", "like"), [(0.2, 2), (0.5, math.inf), (0.8, 0.3)])
def test_intervals_cover(p, like):
    """1,000 repeats: a coverage of 95 % is measured with a standard deviation of 0.7 %."""
    assert 0.93 <= coverage(200, 4, p, like, repeats=1000, seed=1) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("like", [math.inf, 10, 2, 0.5, 0.1])
@pytest.mark.parametrize("p", [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
def test_intervals_cover_in_full(p, like):
    found = {(prompts, n): coverage(prompts, n, p, like, 2000, seed=0) for prompts, n in ((200, 4), (200, 1), (10, 4))}
    print(f"p = {p}, prompts alike {like}: {found}")
    assert 0.93 <= found[200, 4] <= 0.97
    assert 0.92 <= found[200, 1] <= 0.98  # shares of 200 are coarse
    assert found[10, 4] >= 0.93  # of 10, more so; they tell little of how alike answers are, so intervals are wider


@pytest.mark.parametrize("p", [0.02, 0.05, 0.1, 0.9])
@pytest.mark.parametrize("like", [math.inf, 2, 0.5])
def test_intervals_cover_near_0_and_for_few_prompts(p, like):
    """1,000 repeats: 95 % is measured with a standard deviation of 0.7 %; before, down to 88 %."""
    found = {prompts: coverage(prompts, 8, p, like, 1000, seed=2) for prompts in (10, 20, 30)}
    print(f"p = {p}, prompts alike {like}: {found}")
    assert min(found.values()) >= 0.93


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
    """Unbiased: the share of the k-subsets of n completions that have a right one, by enumeration."""
    for n, c, k in ((1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (6, 1, 4), (6, 3, 4), (4, 4, 2)):
        subsets = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    right = [[True, False, False, False], [False, None, None, False], [False] * 4]
    # k = 2: 1 - C(3,2)/C(4,2) = 1/2, 0 and 0; the second has two verdicts, and says nothing of k = 4
    assert passes(right, 4) == pytest.approx({1: 0.25 / 3, 2: 0.5 / 3, 4: 1 / 2})
    assert passes([[None]], 1) == {} and list(passes([[True] * 6], 6)) == [1, 2, 4, 6]
    assert passes([[True, False], [True]], 2)[2] == 1.0


def voted(answers, right):
    """Probability that the plurality of these answers is right, ties broken at random; equals `maj_at_k` with k = n."""
    votes = {}
    for answer, good in zip(answers, right, strict=True):
        if good or answer is not None:
            votes[True if good else answer] = votes.get(True if good else answer, 0) + 1
    best = [answer for answer, count in votes.items() if count == max(votes.values())]
    return (True in best) / len(best) if best else 0.0


def test_maj_at_k_is_the_mean_over_all_choices_of_k():
    random = np.random.default_rng(3)
    for _ in range(40):
        n = int(random.integers(1, 9))
        answers = [[None, "1", "2", "3", "0.5", "1/2"][i] for i in random.integers(0, 6, n)]
        right = [answer in ("0.5", "1/2") for answer in answers]
        for k in range(1, n + 1):
            chosen = list(combinations(zip(answers, right, strict=True), k))
            by_hand = sum(voted(*zip(*some, strict=True)) for some in chosen) / len(chosen)
            assert maj_at_k(answers, right, k) == pytest.approx(by_hand, abs=1e-12), (answers, k)
    # two of three right: C(3,2) pairs are one right pair and two ties
    assert maj_at_k(["4", "4", "5"], [True, True, False], 2) == pytest.approx(2 / 3)
    assert maj_at_k([None, None], [False, False], 2) == 0
    assert majorities([[("4", True)], [("4", True), ("4", True)]], 2) == {1: 1.0, 2: 1.0}
    # 64 completions, 40 of them right: nearly certain, exact and fast
    assert 0.99999 < maj_at_k(["7"] * 40 + [str(i % 5) for i in range(24)], [True] * 40 + [False] * 24, 32) <= 1


def test_mcnemar_is_the_binomial_tail():
    assert sign_test(7, 1) == (pytest.approx(18 / 256), pytest.approx(10 / 256))  # Fagerland et al. 2013: 0.070, 0.039
    assert sign_test(1, 7) == sign_test(7, 1) and sign_test(0, 0) == (1, 1) and sign_test(6, 6) == (1, 1)
    assert sign_test(12, 2)[0] == pytest.approx(2 * (1 + 14 + 91) / 2**14)
    for count in range(9):
        heads = [math.comb(count, k) / 2**count for k in range(count + 1)]
        for k in range(count + 1):
            tails = sum(heads[: k + 1]), sum(heads[k:])
            assert sign_test(k, count - k)[0] == pytest.approx(min(1.0, 2 * min(tails)))
    far = (2700 - 2500 - 1) / math.sqrt(5200)  # normal approximation with continuity correction
    assert sign_test(2500, 2700)[0] == pytest.approx(math.erfc(far / math.sqrt(2)), rel=1e-2)


def test_the_paired_difference_by_hand():
    one, other = [1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 0, 0]
    found = paired_difference(one, other)  # three wins, one loss
    assert (found.wins, found.losses, found.ties, found.value) == (3, 1, 4, 0.25)
    assert found.standard_error == pytest.approx(math.sqrt((4 - 8 * 0.25**2) / 7 / 8))
    p12, p21 = 4 / 10, 2 / 10  # Bonett & Price: (wins + 1) / (n + 2), (losses + 1) / (n + 2)
    error = math.sqrt((p12 + p21 - (p12 - p21) ** 2) / 10)
    assert found.low == pytest.approx(p12 - p21 - 1.959964 * error)
    assert found.high == pytest.approx(p12 - p21 + 1.959964 * error)
    assert found.smallest == pytest.approx((1.959964 + 0.841621) * error)
    rewards = paired_difference([0.5, 2.0, -1.0], [1.0, 4.0, -1.5])
    assert rewards.standard_error == pytest.approx(np.std([0.5, 2, -0.5], ddof=1) / math.sqrt(3))
    assert rewards.high == pytest.approx(2 / 3 + 4.302653 * rewards.standard_error)
    same = paired_difference([1.0] * 50, [1.0] * 50)
    assert (same.value, same.standard_error, same.ties) == (0, 0, 50) and same.low < 0 < same.high
    assert paired_difference([0.1 + 0.2], [0.3]).ties == 1
    assert paired_difference([0.25], [0.75]).low is None
    for bad in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="of equal length"):
            paired_difference(*bad)


def evaluations(random, prompts, samples, gain, like=1.0):
    """Two models' mean scores on the same prompts, the other better by `gain` on average; p 0.3 to 0.7."""
    own = 0.3 + 0.4 * random.beta(like, like, prompts)
    share = lambda p: (random.random((prompts, samples)) < p[:, None]).mean(axis=1)  # noqa: E731
    return share(own), share(own + gain)


def test_paired_intervals_cover_and_equal_models_rarely_differ():
    random, repeats = np.random.default_rng(5), 300
    for samples in (1, 4):
        found = [paired_difference(*evaluations(random, 200, samples, 0.1)) for _ in range(repeats)]
        assert 0.91 <= sum(one.low <= 0.1 <= one.high for one in found) / repeats <= 0.99
    equal = [evaluations(random, 100, 4, 0.0) for _ in range(repeats)]
    assert sum(paired_bootstrap(*pair, resamples=199) <= 0.05 for pair in equal) / repeats <= 0.09
    single = [paired_difference(*evaluations(random, 100, 1, 0.0)) for _ in range(repeats)]
    assert sum(sign_test(one.wins, one.losses)[0] <= 0.05 for one in single) / repeats <= 0.08


def test_the_smallest_difference_is_detected():
    """A true difference of the smallest detectable size is detected in 80 % of evaluations."""
    random = np.random.default_rng(7)
    smallest = np.mean([paired_difference(*evaluations(random, 200, 4, 0.0)).smallest for _ in range(100)])
    found = [paired_difference(*evaluations(random, 200, 4, smallest)) for _ in range(500)]
    assert 0.74 <= sum(one.low > 0 for one in found) / 500 <= 0.86


def test_the_bootstrap_agrees_with_t_and_repeats():
    random = np.random.default_rng(9)
    for other in (random.normal(0.3, 1, 40), random.integers(-1, 3, 40).astype(float)):  # both ways of resampling
        found, by_t = paired_bootstrap(np.zeros(40), other), paired_difference(np.zeros(40), other)
        assert found == pytest.approx(t_outside(by_t.value / by_t.standard_error, 39), abs=0.015)
        assert found == paired_bootstrap(np.zeros(40), other) != paired_bootstrap(np.zeros(40), other, seed=1)
    assert paired_bootstrap([0.5] * 9, [0.5] * 9) == 1 and paired_bootstrap([0.5], [0.75]) == 1
    assert paired_bootstrap([0.5] * 9, [0.75] * 9) == 2 / 2**9  # the sign test


def test_the_noise_over_seeds_is_students():
    noise = seed_noise([[0.50, 0.54, 0.52], [0.60, 0.62], [0.9]])
    assert noise is not None and (noise.freedom, noise.runs) == (3, 5)
    assert noise.deviation == pytest.approx(math.sqrt((2 * 0.02**2 + 2 * 0.01**2) / 3))
    assert noise.floor() == pytest.approx(3.182446 * noise.deviation * math.sqrt(2), rel=1e-6)
    assert noise.floor(3, 2) == pytest.approx(3.182446 * noise.deviation * math.sqrt(1 / 3 + 1 / 2), rel=1e-6)
    assert seed_noise([[0.5], [0.6]]) is None
