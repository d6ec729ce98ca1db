"""The pass rates of groups, by hand and beside the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle.advantages as truth
import pytest

from jaxppo import advantages, finalize_metrics
from sharding import make_parallel_mesh


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("stacked", [False, True])
def test_pass_rates(mesh, stacked):
    """Groups of 3, 1, 2 and 2 samples, far apart; the sample without a group counts nowhere."""
    groups = np.array([[7, 8, -1], [9, 7, 3], [3, 9, 7], [-1, -1, -1]])
    rewards = np.array(
        [[1.0, 1.0, 1.0], [0.5, 2.0, 0.0], [0.9, 0.5, 0.0], [np.nan] * 3], np.float32
    )
    given = [x.reshape(2, 2, 3) if stacked else x for x in (rewards, groups)]
    parallel = mesh and make_parallel_mesh(mesh)
    run = jax.jit(
        lambda r, g, least: advantages.pass_rates(r, g, at_least=least, parallel=parallel)
    )
    found = {name: float(x) for name, x in finalize_metrics(run(*given, 1.0)).items()}
    expected = {
        "pass_rate": (2 / 3 + 1) / 4,
        "pass_all": 1 / 4,
        "pass_none": 2 / 4,
        "pass_some": 1 / 4,
    }
    assert found == pytest.approx(expected | {"no_reward": 0, "equal_rewards": 2 / 4})
    assert float(run(*given, 0.5)["pass_rate"].value) == pytest.approx((2 / 3 + 1 + 1 + 1 / 2) / 4)
    given[0] = np.where(given[1] == 9, np.nan, given[0])
    found = {name: float(x) for name, x in finalize_metrics(run(*given, 1.0)).items()}
    expected = {
        "pass_rate": (2 / 3 + 1) / 3,
        "pass_all": 1 / 3,
        "pass_none": 1 / 3,
        "pass_some": 1 / 3,
    }
    assert found == pytest.approx(expected | {"no_reward": 2 / 8, "equal_rewards": 1 / 3})


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_pass_rates_of_rollouts(mesh):
    """Twelve samples of eight rollouts, some of which are left out or have no reward."""
    rng = np.random.default_rng(1)
    parallel = mesh and make_parallel_mesh(mesh)
    of_rollouts = {
        "rewards": np.float32([1, 0, np.nan, 1, 0.5, 1, 1, 2]),
        "groups": np.array([0, 0, 0, 1, 1, 2, 2, 2]),
    }
    of_rollouts["among"] = np.arange(8) != 6
    rollouts = rng.permutation([*range(8), *range(4)])
    given = {name: x[rollouts] for name, x in of_rollouts.items()} | {"rollouts": rollouts}
    rows = {name: jnp.asarray(x.reshape(4, 3)) for name, x in given.items()}
    more = {"among": rows["among"], "rollout_ids": rows["rollouts"], "parallel": parallel}
    found = finalize_metrics(advantages.pass_rates(rows["rewards"], rows["groups"], **more))
    assert {name: float(x) for name, x in found.items()} == pytest.approx(truth.pass_rates(**given))
    assert float(found["pass_rate"]) == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    broken = jax.jit(advantages.pass_rates)(
        rows["rewards"], rows["groups"], rollout_ids=0 * rows["rollouts"]
    )
    assert all(np.isnan(x.value) for x in broken.values())


def test_bad_rewards():
    ids = jnp.zeros((1, 2), int)
    with pytest.raises(ValueError, match="group_ids: got shape"):
        advantages.pass_rates(jnp.ones((1, 3)), ids)
    with pytest.raises(TypeError, match="group_ids: got dtype float32"):
        advantages.pass_rates(jnp.ones((1, 2)), jnp.ones((1, 2)))
    with pytest.raises(
        ValueError, match=r"rewards: got float32\[2\] in pass_rates, expected floating \[R, S\]"
    ):
        advantages.pass_rates(jnp.ones(2), ids[0])
    with pytest.raises(ValueError, match="at_least: got nan"):
        advantages.pass_rates(jnp.ones((1, 2)), ids, at_least=float("nan"))
