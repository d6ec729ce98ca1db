"""The oracle's preference losses by finite differences, and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from oracle import OracleSample
from oracle.preference import (
    PAIRWISE,
    a2po,
    bradley_terry,
    kto,
    preference_loss,
    real,
    reference_point,
)

OPTIONS = {
    "dpo": [{}, {"label_smoothing": 0.2, "length_normalised": True, "nll_coef": 0.3}],
    "ipo": [{"beta": 0.4}, {"length_normalised": False, "nll_coef": 0.3, "nll": "token_sum"}],
    "simpo": [{"label_smoothing": 0.1}],
    "orpo": [{"beta": 0.7}],
}


def make_step():
    rng = np.random.default_rng(0)
    samples = []
    for i in range(4):
        mask = [[1, 0, 1, 1], [1, 1], [0, 1, 1], [1]][i]
        x, ref = -0.1 - rng.exponential(size=(2, len(mask)))
        samples.append(
            OracleSample(mask, x, ref_log_probs=ref, group_id=i // 2, reward=float(i in (1, 2)))
        )
    return samples


def check(loss, samples, gradients):
    for i, s in enumerate(samples):
        for t in range(len(s.mask)):
            ends = []
            for sign in (1, -1):
                x = np.array(s.log_probs)
                x[t] += sign * 1e-6
                ends.append(
                    loss([replace(o, log_probs=x) if j == i else o for j, o in enumerate(samples)])
                )
            np.testing.assert_allclose(
                gradients[i][t], (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8
            )


@pytest.mark.parametrize(
    ("name", "options"), [(name, o) for name in PAIRWISE for o in OPTIONS[name]]
)
def test_gradients(name, options):
    samples = make_step()
    check(
        lambda s: preference_loss(s, name, **options)[0],
        samples,
        preference_loss(samples, name, **options)[1],
    )


def test_gradients_of_kto():
    samples = make_step()
    options = {"reference_point": 0.3, "beta": 0.5, "undesirable_weight": 1.3}
    check(lambda s: kto(s, **options)[0], samples, kto(samples, **options)[1])


def test_gradients_of_a2po_and_real():
    samples = [replace(s, old_log_probs=s.ref_log_probs) for s in make_step()]
    check(lambda s: a2po(s, beta=0.3)[0], samples, a2po(samples, beta=0.3)[1])
    check(lambda s: real(s, tau=0.4)[0], samples, real(samples, tau=0.4)[1])


def test_gradients_of_bradley_terry():
    samples = make_step()
    scores = np.array([0.3, -1.0, 2.0, 0.5])
    options = {"margin": 0.5, "centring": 0.1}
    _, gradient, _ = bradley_terry(samples, scores, **options)
    for i in range(4):
        ends = [
            bradley_terry(samples, scores + sign * 1e-6 * np.eye(4)[i], **options)[0]
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / 2e-6, rtol=1e-6)


def test_by_hand():
    """A chosen response at log-probs -1, -2 against references -1.5, -3; a rejected one at -3
    against -2.
    """
    one = OracleSample([1, 1], [-1.0, -2.0], ref_log_probs=[-1.5, -3.0], group_id=0, reward=1.0)
    two = OracleSample([1], [-3.0], ref_log_probs=[-2.0], group_id=0, reward=0.0)

    def near(name, value, **o):
        return np.testing.assert_allclose(preference_loss([one, two], name, **o)[0], value)

    near("dpo", -math.log(1 / (1 + math.exp(-0.25))))  # D = 1.5 + 1
    near("dpo", -math.log(1 / (1 + math.exp(-0.175))), length_normalised=True)
    near("ipo", (1.75 - 5) ** 2)
    near("ipo", (2.5 - 5) ** 2, length_normalised=False)
    near("simpo", -math.log(1 / (1 + math.exp(-2.5))))  # 2 * (-1.5 + 3) - 0.5

    def odds(m):
        return math.exp(m) / (1 - math.exp(m))

    near("orpo", 1.5 + 0.1 * math.log(1 + odds(-3) / odds(-1.5)))

    def sigma(x):
        return 1 / (1 + math.exp(-x))

    value = kto([one, two], reference_point=0.5, undesirable_weight=2.0)[0]
    np.testing.assert_allclose(
        value, (1 - sigma(0.1 * (1.5 - 0.5)) + 2 * (1 - sigma(0.1 * (0.5 + 1)))) / 2
    )
    np.testing.assert_allclose(reference_point([one, two]), 0.25)
    value = bradley_terry([one, two], [2.0, 1.0], margin=0.25, centring=0.1)[0]
    np.testing.assert_allclose(value, -math.log(sigma(0.75)) + 0.9)


def test_a2po_by_hand():
    """Log-ratios 0.5 and 1.5, of which 0.1 times the sum is 0.2, against A = 0.5; and -1 against
    -0.2.
    """
    one = OracleSample([1, 1], [-0.5, -1.5], ref_log_probs=[-1.0, -3.0], reward=0.5)
    two = OracleSample([0, 1], [np.nan, -3.0], ref_log_probs=[np.nan, -2.0], reward=-0.2)
    loss, gradients, metrics = a2po([one, two], beta=0.1)
    np.testing.assert_allclose(loss, (0.3**2 + 0.1**2) / 2)
    np.testing.assert_allclose(np.concatenate(gradients), [-0.03, -0.03, 0, 0.01])
    np.testing.assert_allclose([metrics["chosen_reward"], metrics["rejected_reward"]], [0.2, -0.1])


def test_real_by_hand():
    """s = 0.25 of a good sample, -0.25 and 0 of two bad ones, tau 0.5; another group has a bad
    sample alone.
    """
    one = OracleSample([1, 1], [-1.0, -1.5], old_log_probs=[-1.5, -1.5], group_id=0, reward=1.0)
    two = OracleSample([1], [-2.0], old_log_probs=[-1.75], group_id=0, reward=0.0)
    three = OracleSample(
        [1, 0], [-2.0, np.nan], old_log_probs=[-2.0, np.nan], group_id=0, reward=0.0
    )
    alone = OracleSample([1], [-2.0], old_log_probs=[-1.0], group_id=1, reward=0.0)
    loss, gradients, metrics = real([one, two, three, alone])
    x = math.exp(-0.5)
    np.testing.assert_allclose(loss, (math.log(1 + x) + math.log(2 + x)) / 2)
    np.testing.assert_allclose(loss, 0.716049, rtol=1e-6)
    # 2 for tau, half for a token, half for a group
    np.testing.assert_allclose(gradients[0], -x / (1 + x) / 2)
    np.testing.assert_allclose([gradients[1][0], *gradients[2]], [x / (2 + x), 1 / (2 + x), 0])
    assert gradients[3].tolist() == [0]
    assert metrics["one_sided"] == 0.5
    np.testing.assert_allclose(metrics["chosen_log_ratio"], 0.25)
    # weights 1/4, 1/4 and 1
    np.testing.assert_allclose(metrics["rejected_log_ratio"], (-0.25 / 4 + 0 - 1) / 1.5)
