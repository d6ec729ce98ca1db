"""Published recipes of verl and slime, and the configurations of the reference vectors, against
configs by hand.
"""

import dataclasses

import pytest
from golden_configs import ICEPOP, slime_config, verl_config
from golden_data import Case, parametrize_cases

from jaxppo import CISPO, GSPO, KL, PPO, OffPolicyConfig, PolicyLossConfig, Rejection, presets
from jaxppo.integrations import slime, verl, verl_keys
from jaxppo.policy_losses import DPPO, GMPO, Reinforce

OFF = KL(0.0, "low_var_kl")
BATCH = {"data.max_prompt_length": 1024, "data.max_response_length": 2048}


def verl_recipe(estimator="grpo", loss="vanilla", correction=None, **actor):
    """The overrides of a run script, as far as they say something of the loss."""
    given = {"algorithm": {"adv_estimator": estimator, "use_kl_in_reward": False}, **BATCH}
    given["actor_rollout_ref.actor"] = {
        "policy_loss": {"loss_mode": loss},
        "use_dynamic_bsz": True,
        **actor,
    }
    given["actor_rollout_ref.rollout"] = {"n": 5, "name": "vllm", "temperature": 1.0}
    return given | {"algorithm.rollout_correction": correction}


# Of the files under examples/ and verl/experimental/ at the commit in keys/verl.json.
VERL = {
    "grpo_trainer/run_qwen3_8b_fsdp": (
        verl_recipe(
            use_kl_loss=True, kl_loss_coef=0.001, kl_loss_type="low_var_kl", entropy_coeff=0
        ),
        PolicyLossConfig(PPO(0.2, 0.2, 3.0), kl=KL(0.001, "low_var_kl")),
    ),
    "gspo_trainer/run_qwen3_8b_fsdp": (
        verl_recipe(
            loss="gspo",
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=3e-4,
            clip_ratio_high=4e-4,
            clip_ratio_c=10.0,
            use_kl_loss=False,
        ),
        PolicyLossConfig(
            GSPO(3e-4, 4e-4, gradient="token"), kl=OFF, aggregation="sequence_mean_token_mean"
        ),
    ),
    "cispo_trainer/run_qwen3_8b_fsdp": (
        verl_recipe(
            loss="cispo",
            clip_ratio_low=10,
            clip_ratio_high=0.2,
            use_kl_loss=True,
            kl_loss_coef=0.001,
        ),
        PolicyLossConfig(CISPO(10.0, 0.2), kl=KL(0.001, "low_var_kl")),
    ),
    "dppo_trainer/run_qwen3_30b_a3b_megatron": (
        verl_recipe(
            loss="dppo_tv",
            loss_agg_mode="seq-mean-token-sum-norm",
            # which the script leaves to the batch, and this package asks for
            loss_scale_factor=8192,
            clip_ratio_low=0.15,
            clip_ratio_high=0.15,
            clip_ratio_c=10000.0,
        ),
        PolicyLossConfig(
            DPPO("tv", 0.15, 0.15, 10000.0),
            kl=OFF,
            aggregation="sequence_mean_token_sum_norm",
            aggregation_norm=8192.0,
        ),
    ),
    "gpg_trainer/run_qwen3_8b_fsdp": (
        verl_recipe("gpg", "gpg"),
        PolicyLossConfig(Reinforce(), kl=OFF),
    ),
    "docs/algo/grpo.md, Dr. GRPO": (
        verl_recipe(
            loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=2048, use_kl_loss=False
        ),
        dataclasses.replace(presets.dr_grpo(2048), loss=PPO(0.2, 0.2, 3.0), kl=OFF),
    ),
    "one_step_off_policy/shell/dapo_7b_math_fsdp2_64_64_ris": (
        verl_recipe(
            correction={
                "rollout_is": None,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.999_1.001",
            },
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=10.0,
            loss_agg_mode="token-mean",
        ),
        dataclasses.replace(
            presets.dapo(),
            loss=PPO(0.2, 0.28, 10.0),
            kl=OFF,
            off_policy=OffPolicyConfig(rejections=(Rejection("seq_mean_k1", 0.999, 1.001),)),
        ),
    ),
    "fully_async_policy/shell/dapo_7b_math_fsdp2_64_64_mis": (
        verl_recipe(
            correction={
                "bypass_mode": False,
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.99_1.001",
            },
            clip_ratio_high=0.28,
            clip_ratio_c=10.0,
        ),
        PolicyLossConfig(
            PPO(0.2, 0.28, 10.0),
            kl=OFF,
            off_policy=OffPolicyConfig(
                "token", 0.0, 2.0, rejections=(Rejection("seq_mean_k1", 0.99, 1.001),)
            ),
        ),
    ),
    "rollout_correction/run_qwen2_5_7b_fsdp_multi_rs": (
        verl_recipe(
            correction={
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "token_k1,seq_max_k2",
                "rollout_rs_threshold": "0.6_1.6,2.5",
                "bypass_mode": True,
                "loss_type": "ppo_clip",
            },
        )
        | {"trainer": {"use_v1": False}},
        PolicyLossConfig(
            PPO(0.2, 0.2, 3.0),
            kl=OFF,
            ratio_to="rollout",
            off_policy=OffPolicyConfig(
                rejections=(
                    Rejection("token_k1", 0.6, 1.6, "current/rollout"),
                    Rejection("seq_max_k2", 0.0, 2.5, "current/rollout"),
                )
            ),
        ),
    ),
}
# Of the files under scripts/ and examples/ at the commit in keys/slime.json.
SLIME = {
    "scripts/run-qwen3-4B": (
        {
            "advantage_estimator": "grpo",
            "use_kl_loss": True,
            "kl_loss_type": "low_var_kl",
            "eps_clip_high": 0.28,
        }
        | {
            "eps_clip": 0.2,
            "kl_loss_coef": 0.0,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 9216,
        },
        PolicyLossConfig(
            PPO(0.2, 0.28), kl=OFF, aggregation="rollout_mean", metric_aggregation="loss"
        ),
    ),
    "scripts/run-qwen3-235B-A22B": (
        {
            "advantage_estimator": "gspo",
            "kl_loss_coef": 0.0,
            "kl_loss_type": "low_var_kl",
            "eps_clip": 4e-4,
        },
        PolicyLossConfig(
            GSPO(4e-4, 4e-4), kl=OFF, aggregation="rollout_mean", metric_aggregation="loss"
        ),
    ),
    "scripts/run-glm4.7-355B-A32B": (
        {
            "advantage_estimator": "gspo",
            "kl_loss_type": "low_var_kl",
            "eps_clip": 1e-4,
            "eps_clip_high": 2e-4,
        }
        | {"use_tis": True, "num_steps_per_rollout": 4, "over_sampling_batch_size": 256},
        PolicyLossConfig(
            GSPO(1e-4, 2e-4),
            kl=OFF,
            aggregation="rollout_mean",
            metric_aggregation="loss",
            off_policy=OffPolicyConfig("token", 0.0, 2.0),
        ),
    ),
    "scripts/run-qwen2.5-0.5B-reproducibility": (
        {
            "use_kl_loss": True,
            "kl_loss_type": "low_var_kl",
            "eps_clip_high": 0.28,
            "calculate_per_token_loss": True,
        },
        PolicyLossConfig(
            PPO(0.2, 0.28), kl=OFF, aggregation="token_mean", metric_aggregation="loss"
        ),
    ),
    "examples/search-r1/run_qwen2.5_3B": (
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "eps_clip_high": 0.28,
        },
        PolicyLossConfig(
            PPO(0.2, 0.28),
            kl=KL(0.001, "low_var_kl"),
            aggregation="rollout_mean",
            metric_aggregation="loss",
        ),
    ),
}


def pytest_generate_tests(metafunc):
    parametrize_cases(metafunc, "slime_case", "slime", "policy_loss_function")
    parametrize_cases(metafunc, "verl_case", "verl", "compute_policy_loss")


@pytest.mark.parametrize("name", VERL)
def test_verl_recipe(name):
    given, expected = VERL[name]
    found = verl.translate(given)
    assert found.config == verl.config_of(given) == expected
    assert found.batching == {"row_length": 3072, "max_tokens": 16384}
    assert found.elsewhere["actor_rollout_ref.rollout.n"] == "the rollout engine"


def test_gmpo_wants_its_penalty_in_its_own_mean():
    """examples/gmpo_trainer has a KL loss whose mean is over tokens, and a policy loss whose
    mean is over sequences.
    """
    recipe = {
        "loss": "geo_mean",
        "clip_ratio_low": 0.4,
        "clip_ratio_high": 0.4,
        "use_kl_loss": True,
    }
    with pytest.raises(ValueError, match="loss_agg_mode: got 'token-mean'"):
        verl.config_of(verl_recipe(**recipe))
    found = verl.config_of(verl_recipe(**recipe, loss_agg_mode="seq-mean-token-mean"))
    assert found == dataclasses.replace(
        presets.gmpo(), loss=GMPO(0.4, 0.4), kl=KL(0.001, "low_var_kl")
    )


@pytest.mark.parametrize("name", SLIME)
def test_slime_recipe(name):
    given, expected = SLIME[name]
    assert slime.translate(given).config == slime.config_of(given) == expected


def test_slime_vectors(slime_case: Case):
    """The same losses as in test_golden_policy, which holds them to slime's numbers."""
    given = {
        key: value for key, value in slime_case.config.items() if key not in ("icepop", "reduction")
    }
    if slime_case.config["icepop"]:
        given["custom_tis_function_path"] = ICEPOP
    found = slime.config_of(given)
    expected = slime_config(slime_case.config)
    # slime divides by the number of tokens outside of its loss function
    if expected.aggregation == "token_sum":
        expected = dataclasses.replace(expected, aggregation="token_mean")
    assert found == expected


def test_verl_vectors(verl_case: Case):
    """The same losses as in test_golden_policy, which holds them to verl's numbers."""
    expected = verl_config(verl_case)
    sections = {key.rpartition(".")[2]: key for key in verl_keys.DEFAULTS}
    given = {sections[key]: value for key, value in verl_case.config.items()}
    given[verl_keys.ACTOR + "loss_scale_factor"] = expected.aggregation_norm
    # alone it is refused: verl 0.9.1 reads the two defaults in its place
    if "clip_ratio" in verl_case.config:
        given = {
            verl_keys.ACTOR + name: 0.2 for name in ("clip_ratio_low", "clip_ratio_high")
        } | given
    if expected.off_policy is not None:  # whose weights the vector has as an input
        given |= {
            verl_keys.CORRECTION + "rollout_is": "token",
            verl_keys.CORRECTION + "rollout_is_threshold": 1e6,
        }
    assert verl.config_of(given) == expected
