"""NeMo-RL's DPO: its loss, gradient and metrics, recorded by running it."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from policy_steps import quick_jit

from jaxppo import RolloutBatch, TokenStats, finalize_metrics, loss_from_stats
from jaxppo.losses import preference
from sharding import make_parallel_mesh

RECORDS = json.loads((Path(__file__).parents[1] / "golden/peers/preference.json").read_text())
BETAS = [record["options"]["reference_policy_kl_penalty"] for record in RECORDS]


def test_a_beta_of_0_is_refused():
    """Its loss does not depend on the pairs: `Part(SFT())` is what such a record leaves of it."""
    assert 0 in BETAS
    with pytest.raises(ValueError, match=r"beta: got 0\.0, expected a finite number above 0"):
        preference.DPO(0.0)


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize(
    "record", [record for record, beta in zip(RECORDS, BETAS, strict=True) if beta > 0]
)
def test_nemo(record, mesh):
    """Their rewards are not multiplied by beta."""
    options = record["options"]
    given = {k: np.asarray(v, np.float32) for k, v in record["in"].items()}
    beta = options["reference_policy_kl_penalty"]
    loss = preference.DPO(
        beta,
        length_normalised=options["preference_average_log_probs"],
        nll_coef=options["sft_loss_weight"],
        nll="sequence_mean_token_sum",
    )
    rows, length = given["log_probs"].shape

    def pad(x):
        return np.pad(x, ((0, 8 - rows), (0, 8 - length)))

    ids = pad(np.ones((rows, length), np.int32))

    def of_rows(x, fill):
        return np.pad(np.asarray(x), (0, 8 - rows), constant_values=fill)[:, None]

    numbers = np.arange(rows, dtype=np.int32)
    batch = RolloutBatch(
        *(ids,) * 3,
        np.where(ids > 0, np.arange(8, dtype=np.int32), 0),
        pad(given["loss_mask"]),
        of_rows(numbers, -1),
        group_ids=of_rows(numbers // 2, -1),
        rewards=of_rows(np.float32(numbers % 2 == 0), 0),
        ref_log_probs=pad(given["ref_log_probs"]),
        real_last_targets=True,
    )
    parallel = mesh and make_parallel_mesh(mesh)

    def fn(x):
        return loss_from_stats(TokenStats(x), batch, loss, parallel=parallel)

    (value, found), gradient = quick_jit(jax.value_and_grad(fn, has_aux=True))(
        pad(given["log_probs"])
    )
    result = record["result"]
    found = finalize_metrics(found)
    np.testing.assert_allclose(value, result["loss"], rtol=1e-6)
    np.testing.assert_allclose(gradient[:rows, :length], record["grad"], rtol=1e-5, atol=1e-7)
    for name in ("chosen", "rejected"):
        np.testing.assert_allclose(
            found[f"{name}_reward"], beta * result[f"rewards_{name}_mean"], rtol=1e-6
        )
    np.testing.assert_allclose(found["accuracy"], result["accuracy"])
