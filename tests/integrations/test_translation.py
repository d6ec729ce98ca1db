"""verl's and slime's configurations: every key of theirs is known, and each that is translated
does what it says.
"""

import dataclasses
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
from golden_configs import ICEPOP

from jaxppo import (
    CISPO,
    GSPO,
    KL,
    PPO,
    SAPO,
    OffPolicyConfig,
    Rejection,
    RolloutBatch,
    Sample,
    presets,
)
from jaxppo.integrations import miles, miles_keys, slime, slime_keys, verl, verl_keys
from jaxppo.integrations.options import about
from jaxppo.policy_losses import DPPO, DRO, GMPO, ClipCov, KLCov, Reinforce

KEYS = Path(__file__).parents[1] / "keys"
ACTOR = verl_keys.ACTOR
LOSS = verl_keys.LOSS
CORRECTION = verl_keys.CORRECTION
ROLLOUT = "actor_rollout_ref.rollout."


def actor(**values):
    return {ACTOR + name: value for name, value in values.items()}


def mode(name, **values):
    return {LOSS + "loss_mode": name} | {LOSS + key: value for key, value in values.items()}


def corrected(**values):
    return {CORRECTION + name: value for name, value in values.items()}


LEGACY = {CORRECTION + "bypass_mode": True, "trainer.use_v1": False}

# (what is given, the fields of the config that differ from the defaults of verl 0.9.1)
VERL = [
    (actor(clip_ratio_low=0.1), {"loss": PPO(0.1, 0.2, 3.0)}),
    (actor(clip_ratio_high="2.8e-1"), {"loss": PPO(0.2, 0.28, 3.0)}),
    (
        actor(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None),
        {"loss": PPO(0.3, 0.3, 3.0)},
    ),
    (actor(clip_ratio_c=10.0), {"loss": PPO(0.2, 0.2, 10.0)}),
    # gspo obeys loss_agg_mode, and so do the penalties beside it
    (mode("gspo"), {"loss": GSPO(0.2, 0.2, gradient="token")}),
    (
        mode("gspo") | actor(loss_agg_mode="seq-mean-token-sum", entropy_coeff=0.1),
        {
            "loss": GSPO(0.2, 0.2, gradient="token"),
            "aggregation": "sequence_mean_token_sum",
            "entropy_coef": 0.1,
        },
    ),
    (mode("cispo") | actor(clip_ratio_low=10, clip_ratio_high=0.2), {"loss": CISPO(10.0, 0.2)}),
    (
        mode("sapo") | actor(tau_pos=1.5, tau_neg=2.0),
        {"loss": SAPO(1.5, 2.0), "aggregation": "sequence_mean_token_mean"},
    ),
    (mode("geo_mean"), {"loss": GMPO(0.2, 0.2), "aggregation": "sequence_mean_token_mean"}),
    (mode("gpg"), {"loss": Reinforce()}),
    (mode("dppo_tv") | actor(clip_ratio_c=20.0), {"loss": DPPO("tv", 0.2, 0.2, 20.0)}),
    (mode("dppo_kl"), {"loss": DPPO("kl", 0.2, 0.2, 3.0)}),
    (
        mode("clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.5, clip_cov_ub=4.0),
        {"loss": ClipCov(0.2, 0.2, 0.1, 0.5, 4.0)},
    ),
    (mode("kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=0.5), {"loss": KLCov(0.1, 0.5)}),
    (mode("dro", dro_beta=0.3), {"loss": DRO(0.3)}),
    (actor(loss_agg_mode="token-sum"), {"aggregation": "token_sum"}),
    (actor(loss_agg_mode="seq-mean-token-sum"), {"aggregation": "sequence_mean_token_sum"}),
    (actor(loss_agg_mode="seq-mean-token-mean"), {"aggregation": "sequence_mean_token_mean"}),
    (
        actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=4096),
        {"aggregation": "sequence_mean_token_sum_norm", "aggregation_norm": 4096.0},
    ),
    (actor(loss_scale_factor=4096), {}),  # read by one aggregation only
    (actor(entropy_coeff=0.01), {"entropy_coef": 0.01}),
    (actor(kl_loss_coef=0.5), {}),
    (actor(use_kl_loss=True), {"kl": KL(0.001, "low_var_kl")}),
    (actor(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="kl"), {"kl": KL(0.5, "k1")}),
    (actor(kl_loss_type="abs"), {"kl": KL(0.0, "abs")}),
    (actor(kl_loss_type="mse"), {"kl": KL(0.0, "k2")}),
    (actor(kl_loss_type="k2+"), {"kl": KL(0.0, "k2+")}),
    (actor(kl_loss_type="k3"), {"kl": KL(0.0, "low_var_kl")}),
    (actor(kl_loss_type="k3+"), {"kl": KL(0.0, "low_var_kl+")}),
    (actor(kl_loss_type="k1+"), {"kl": KL(0.0, "k1+")}),
    (corrected(rollout_is="token"), {"off_policy": OffPolicyConfig(weights="token", high=2.0)}),
    (
        corrected(
            rollout_is="sequence", rollout_is_threshold="3.0", rollout_is_batch_normalize=True
        ),
        {"off_policy": OffPolicyConfig(weights="sequence", high=3.0, batch_normalize=True)},
    ),
    (
        corrected(rollout_is="token", rollout_is_threshold="0.5_5.0"),
        {"off_policy": OffPolicyConfig(weights="token", low=0.5, high=5.0, outside="zero")},
    ),
    (corrected(rollout_is="token", rollout_is_threshold=None), {}),
    (
        corrected(rollout_rs="seq_mean_k1, token_k3", rollout_rs_threshold="0.999_1.001,0.1"),
        {
            "off_policy": OffPolicyConfig(
                rejections=(Rejection("seq_mean_k1", 0.999, 1.001), Rejection("token_k3", 0, 0.1))
            )
        },
    ),
    (
        corrected(rollout_rs="token_k1,seq_sum_k1", rollout_rs_threshold=4),
        {
            "off_policy": OffPolicyConfig(
                rejections=(Rejection("token_k1", 0.25, 4), Rejection("seq_sum_k1", 0.25, 4))
            )
        },
    ),
    (corrected(bypass_mode=True), {"ratio_to": "rollout"}),
    (corrected(bypass_mode=True) | mode("gpg"), {"ratio_to": "rollout", "loss": Reinforce()}),
    (LEGACY, {"ratio_to": "rollout"}),
    (LEGACY | corrected(rollout_is="token"), {"ratio_to": "rollout"}),  # already in the ratio
    (
        LEGACY | corrected(rollout_rs="token_k2", rollout_rs_threshold=2.5),
        {
            "ratio_to": "rollout",
            "off_policy": OffPolicyConfig(
                rejections=(Rejection("token_k2", 0, 2.5, "current/rollout"),)
            ),
        },
    ),
    (
        LEGACY | corrected(loss_type="reinforce", rollout_is="sequence"),
        {
            "ratio_to": "rollout",
            "loss": Reinforce(),
            "off_policy": OffPolicyConfig(weights="sequence", compares="current/rollout"),
        },
    ),
    ({"trainer.use_v1": False}, {}),
    (actor(ppo_micro_batch_size=None), {}),
    (
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.use_pf_ppo": False,
            "distillation.enabled": False,
        },
        {},
    ),
    ({"algorithm": {"rollout_correction": None, "filter_groups": {}}, "critic": None}, {}),
]
# (what is given, the error)
VERL_REFUSED = [
    (actor(ppo_micro_batch_size=64), "ppo_micro_batch_size: got 64, expected None"),
    (
        {"algorithm.adv_estimator": "gdpo2"},
        "algorithm.adv_estimator: got 'gdpo2', expected one of gae",
    ),
    ({"algorithm.use_pf_ppo": True}, "algorithm.use_pf_ppo: got True"),
    ({"distillation.enabled": True}, "distillation.enabled: got True"),
    (actor(kl_loss_type="full"), "kl_loss_type: got 'full', expected one of kl"),
    (actor(loss_agg_mode="mean"), "loss_agg_mode: got 'mean', expected one of token-mean"),
    (
        actor(loss_agg_mode="seq-mean-token-sum-norm"),
        "loss_scale_factor: got None, expected a number",
    ),
    (actor(entropy_coeff="much"), "entropy_coeff: got 'much', expected a finite number"),
    (actor(entropy_coeff=True), "entropy_coeff: got True, expected a finite number"),
    (actor(use_kl_loss="yes"), "use_kl_loss: got 'yes', expected True or False"),
    # which verl reads
    (actor(clip_ratio=0.3), "clip_ratio: got 0.3, expected clip_ratio_low and clip_ratio_high"),
    (actor(clip_ratio_c="${x}"), "clip_ratio_c: got"),
    (actor(clip_ratio_c=0.9), "dual_clip: got 0.9"),
    (mode("mine"), "loss_mode: got 'mine', expected one of vanilla"),
    (mode("dro"), "dro_beta: got None, expected a number above 0"),
    (
        mode("sapo") | actor(use_kl_loss=True),
        "loss_agg_mode: got 'token-mean', expected 'seq-mean-token-mean' with",
    ),
    (
        mode("geo_mean") | corrected(rollout_is="token"),
        "rollout_is: got 'token', expected 'sequence' or None",
    ),
    (
        corrected(rollout_is="geometric"),
        "rollout_is: got 'geometric', expected one of token, sequence",
    ),
    (corrected(rollout_is="token", rollout_is_threshold="a_b"), "rollout_is_threshold: got 'a_b'"),
    (corrected(rollout_rs="token_k1"), "rollout_rs_threshold: got None, expected one threshold"),
    (corrected(rollout_rs="token_k4", rollout_rs_threshold=1), "rollout_rs: got 'token_k4'"),
    (
        corrected(rollout_rs="token_k3", rollout_rs_threshold="0.1_0.2"),
        "rollout_rs_threshold: got '0.1_0.2'",
    ),
    (
        corrected(bypass_mode=True, rollout_is="token"),
        "rollout_is: got 'token', expected None with bypass_mode",
    ),
    (
        corrected(bypass_mode=True, rollout_rs="token_k3"),
        "rollout_rs: got 'token_k3', expected None with bypass_mode",
    ),
    (
        corrected(bypass_mode=True, loss_type="reinforce"),
        "loss_type: got 'reinforce', expected 'ppo_clip' with",
    ),
    (LEGACY | mode("gspo"), "loss_mode: got 'gspo', expected 'vanilla' with bypass_mode"),
    (
        LEGACY
        | corrected(loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True),
        "rollout_is_batch_normalize: got True, expected False",
    ),
]
VERL_BATCHING = [
    ({}, {"row_length": 1024}),
    ({"data.max_prompt_length": 2048, "data.max_response_length": 8192}, {"row_length": 10240}),
    (actor(ppo_micro_batch_size_per_gpu=4), {"row_length": 1024, "max_tokens": 4096}),
    (actor(use_dynamic_bsz=True), {"row_length": 1024, "max_tokens": 16384}),
    (
        actor(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=2048),
        {"row_length": 1024, "max_tokens": 2048},
    ),
    (actor(ppo_max_token_len_per_gpu=2048), {"row_length": 1024}),
    ({ROLLOUT + "temperature": 0.7}, {"row_length": 1024}),
]

HELPER = {
    "use_tis": True,
    "custom_tis_function_path": (
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    ),
    "use_rs": False,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 4.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1e-4,
    "tis_batch_normalize": False,
}
SLIME = [
    ({"eps_clip": 0.1}, {"loss": PPO(0.1, 0.1)}),
    ({"eps_clip_high": 0.28}, {"loss": PPO(0.2, 0.28)}),
    ({"eps_clip_c": 3.0}, {"loss": PPO(0.2, 0.2, 3.0)}),
    ({"advantage_estimator": "gspo", "eps_clip": 3e-4}, {"loss": GSPO(3e-4, 3e-4)}),
    (
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
        {"loss": CISPO(1.0, 4.0)},
    ),
    ({"advantage_estimator": "reinforce_plus_plus"}, {}),
    ({"calculate_per_token_loss": True}, {"aggregation": "token_mean"}),
    ({"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    ({"kl_loss_coef": 0.5}, {}),
    ({"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3"}, {"kl": KL(0.5, "k3")}),
    ({"kl_loss_type": "low_var_kl"}, {"kl": KL(0.0, "low_var_kl")}),
    ({"use_unbiased_kl": True}, {"kl": KL(0.0, "k1", importance="token")}),
    ({"use_rollout_logprobs": True}, {"ratio_to": "rollout"}),
    ({"use_tis": True}, {"off_policy": OffPolicyConfig(weights="token", high=2.0)}),
    (
        {"use_tis": True, "tis_clip": 5.0, "tis_clip_low": 0.5},
        {"off_policy": OffPolicyConfig("token", 0.5, 5.0)},
    ),
    (
        {"use_tis": True, "tis_clip_low": 0.5, "custom_tis_function_path": ICEPOP},
        {"off_policy": OffPolicyConfig("token", 0.5, 2.0, "zero")},
    ),
    ({"tis_clip": 5.0, "custom_tis_function_path": ICEPOP}, {}),
    (
        {"get_mismatch_metrics": True, "custom_tis_function_path": ICEPOP},
        {"off_policy": OffPolicyConfig("token", 0.0, 2.0, "zero")},
    ),
    (HELPER | {"use_tis": False, "get_mismatch_metrics": True}, {}),
    (
        {"use_opsm": True},
        {"off_policy": OffPolicyConfig(opsm_delta=1e-4, opsm_fraction="response")},
    ),
    (
        {"use_opsm": True, "opsm_delta": 0.1, "use_tis": True},
        {"off_policy": OffPolicyConfig("token", opsm_delta=0.1, opsm_fraction="response")},
    ),
    (HELPER, {"off_policy": OffPolicyConfig("token", 0.0, 4.0)}),
    (
        HELPER | {"tis_mode": "clip", "tis_level": "geometric", "tis_lower_bound": None},
        {"off_policy": OffPolicyConfig("geometric", 0.25, 4.0)},
    ),
    (
        HELPER | {"tis_mode": "mask", "tis_level": "sequence", "tis_batch_normalize": True},
        {
            "off_policy": OffPolicyConfig(
                "sequence",
                0.0,
                math.inf,
                batch_normalize=True,
                rejections=(Rejection("seq_sum_k1", 0.25, 2.0),),
            )
        },
    ),
    (
        HELPER | {"use_rs": True},
        {
            "off_policy": OffPolicyConfig(
                "token", 0.0, 4.0, rejections=(Rejection("token_k1", 0.25, 2.0),), veto=1e-4
            )
        },
    ),
    (
        HELPER
        | {
            "use_rs": True,
            "rs_level": "geometric",
            "rs_lower_bound": 0.8,
            "rs_upper_bound": 1.25,
        },
        {
            "off_policy": OffPolicyConfig(
                "token", 0.0, 4.0, rejections=(Rejection("seq_mean_k1", 0.8, 1.25),), veto=1e-4
            )
        },
    ),
    ({"loss_type": "policy_loss", "custom_pg_loss_reducer_function_path": None}, {}),
]
SLIME_REFUSED = [
    ({"loss_type": "sft_loss"}, "loss_type: got 'sft_loss', expected one of policy_loss"),
    ({"advantage_estimator": "rloo"}, "advantage_estimator: got 'rloo', expected one of grpo"),
    ({"kl_loss_type": "abs"}, "kl_loss_type: got 'abs', expected one of k1"),
    (
        {"custom_pg_loss_reducer_function_path": "a.b"},
        "custom_pg_loss_reducer_function_path: got 'a.b', expected None",
    ),
    (
        {"use_tis": True, "custom_tis_function_path": "a.b"},
        "custom_tis_function_path: got 'a.b', expected None",
    ),
    (
        {"use_tis": True, "use_rollout_logprobs": True},
        "use_tis: got True, expected False with use_rollout_logprobs",
    ),
    (
        {name: HELPER[name] for name in ("use_tis", "custom_tis_function_path")},
        "the mismatch helper without tis_level",
    ),
    (HELPER | {"tis_mode": "fold"}, "tis_mode: got 'fold'"),
    (HELPER | {"tis_upper_bound": 0}, "tis_upper_bound: got 0, expected a number above 0"),
    (
        HELPER | {"use_rs": True, "entropy_coef": 0.1},
        "custom_tis_function_path: got .* expected no entropy_coef",
    ),
    (
        HELPER | {"tis_level": "geometric", "tis_batch_normalize": True},
        "tis_batch_normalize: got True",
    ),
]
SLIME_BATCHING = [
    ({}, {}),
    (
        {"rollout_max_context_len": 8192, "micro_batch_size": 2},
        {"row_length": 8192, "max_tokens": 16384},
    ),
    (
        {"rollout_max_prompt_len": 1024, "rollout_max_response_len": 7168},
        {"row_length": 8192, "max_tokens": 8192},
    ),
    ({"rollout_max_response_len": 7168}, {}),
    ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9216}, {"max_tokens": 9216}),
    ({"rollout_temperature": 0.7}, {}),
]
OF_MILES = {"custom_tis_function_path": miles_keys.ICEPOP}
# its loss is slime's
MILES = [
    ({k: miles_keys.ICEPOP if v == ICEPOP else v for k, v in given.items()}, expected)
    for given, expected in SLIME
    if given.get("advantage_estimator") != "cispo"
] + [
    ({"skip_actor_forward_only": True}, {"ratio_to": "current"}),
    ({"skip_actor_forward_only": True, "use_rollout_logprobs": True}, {"ratio_to": "rollout"}),
    (
        {"skip_actor_forward_only": True, "use_unbiased_kl": True},
        {"ratio_to": "current", "kl": KL(0.0, "k1", "score")},
    ),
    (
        {"skip_actor_forward_only": True, "use_tis": True} | OF_MILES,
        {
            "ratio_to": "current",
            "off_policy": OffPolicyConfig("token", 0.0, 2.0, "zero", compares="current/rollout"),
        },
    ),
    (
        HELPER | {"skip_actor_forward_only": True, "use_rs": True},
        {
            "ratio_to": "current",
            "off_policy": OffPolicyConfig(
                "token",
                0.0,
                4.0,
                rejections=(Rejection("token_k1", 0.25, 2.0, "current/rollout"),),
                veto=1e-4,
                compares="current/rollout",
            ),
        },
    ),
]
MILES_REFUSED = [
    *[row for row in SLIME_REFUSED if "advantage_estimator" not in row[0]],
    ({"advantage_estimator": "cispo"}, "advantage_estimator: got 'cispo', expected one of grpo"),
    (
        {"skip_actor_forward_only": True, "use_opsm": True},
        "use_opsm: got True, expected False with skip_actor_forward",
    ),
    ({"lora_rank": 16, "freeze": 1}, "freeze"),
]
SYSTEMS = {
    "miles": (miles, miles_keys, MILES, MILES_REFUSED, SLIME_BATCHING, presets.slime_default),
    "verl": (verl, verl_keys, VERL, VERL_REFUSED, VERL_BATCHING, presets.verl_default),
    "slime": (slime, slime_keys, SLIME, SLIME_REFUSED, SLIME_BATCHING, presets.slime_default),
}


def rows(which):
    tables = {name: system[which] for name, system in SYSTEMS.items()}
    return [
        pytest.param(name, *row, id=f"{name}-{i}")
        for name, table in tables.items()
        for i, row in enumerate(table)
    ]


def load(system):
    """Their keys, without those that name the class of a section."""
    theirs = json.loads((KEYS / f"{system}.json").read_text())
    return theirs | {"keys": [key for key in theirs["keys"] if not key.endswith("._target_")]}


def translated(keys):
    return {*keys.DEFAULTS, *getattr(keys, "MISMATCH_HELPER", ())}


@pytest.mark.parametrize(("system", "given", "expected"), rows(2))
def test_what_a_key_does(system, given, expected):
    module, *_, default = SYSTEMS[system]
    assert module.translate(given).config == dataclasses.replace(default(), **expected)


@pytest.mark.parametrize(("system", "given", "error"), rows(3))
def test_what_is_refused(system, given, error):
    with pytest.raises(ValueError, match=error):
        SYSTEMS[system][0].translate(given)


@pytest.mark.parametrize(("system", "given", "expected"), rows(4))
def test_batching(system, given, expected):
    found = SYSTEMS[system][0].translate(given)
    assert found.batching == expected
    temperature = [value for name, value in given.items() if name.endswith("temperature")]
    assert found.head == {"temperature": temperature[0] if temperature else 1.0}
    if "row_length" in expected:
        made = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], **found.batching)
        assert made.tokens.shape[-1] == expected["row_length"]


@pytest.mark.parametrize("system", SYSTEMS)
class TestKeys:
    def test_every_key_is_known_and_every_default_is_theirs(self, system):
        theirs = load(system)
        keys = SYSTEMS[system][1]
        assert theirs.get("version", theirs.get("commit", "")[:8]) == keys.VERSION
        assert [
            key
            for key in theirs["keys"]
            if key not in translated(keys) and not about(key, keys.ELSEWHERE)
        ] == []
        assert translated(keys) <= set(theirs["keys"])
        assert theirs["defaults"] == keys.DEFAULTS

    def test_no_line_is_about_a_key_that_is_not_theirs(self, system):
        theirs = load(system)["keys"]
        keys = SYSTEMS[system][1]
        # whose lines it takes over
        theirs = theirs + (load("slime")["keys"] if system == "miles" else [])
        alive = [
            name
            for name in keys.ELSEWHERE
            if name in theirs or any(key.startswith(name) for key in theirs)
        ]
        assert [
            name
            for name in keys.ELSEWHERE
            if name not in alive and name not in ("sglang_", "router_")
        ] == []

    def test_every_key_that_is_translated_stands_in_a_table_above(self, system):
        _, keys, *tables, _ = SYSTEMS[system]
        given = {key for table in tables for row, _ in table for key in row}
        assert translated(keys) - given == set()

    def test_all_of_their_keys_at_once(self, system):
        """Their own defaults, in full: nothing is unknown, and the loss is the default one."""
        module, keys, *_, default = SYSTEMS[system]
        theirs = load(system)
        given = {key: theirs["defaults"].get(key, "whatever") for key in theirs["keys"]}
        found = module.translate(given)
        assert found.config == default()
        assert set(found.elsewhere) >= set(theirs["keys"]) - translated(keys)

    def test_unknown_keys_are_all_listed(self, system):
        module, keys, *_ = SYSTEMS[system]
        near = next(iter(keys.DEFAULTS))
        with pytest.raises(
            ValueError, match=f"unknown keys one.two, {near}x .did you mean {near}"
        ) as error:
            module.translate({"one.two": 1, near + "x": 2, near: 0.2})
        assert system in str(error.value)


# What the files of slime at 624b824a that compute its loss read beside the keys that are translated
# (loss.py, model.py and actor.py of backends/megatron_utils, with Megatron's own losses), and what
# a remark on it must name.
READ_BY_THE_LOSS = {
    "allgather_cp": "context_layout=",
    "compute_advantages_and_returns": "advantages",
    "custom_advantage_function_path": "advantages",
    "custom_loss_function_path": "refused",
    "enable_mtp_training": "mtp_loss",
    "gamma": "advantages",
    "global_batch_size": "one step",
    "keep_old_actor": "old_log_probs",
    "kl_coef": "token_rewards",
    "lambd": "advantages.gae",
    "log_probs_chunk_size": "memory",
    "mask_offpolicy_in_partial_rollout": "loss mask",
    "moe_aux_loss_coeff": "beside the policy loss",
    "moe_z_loss_coeff": "beside the policy loss",
    "normalize_advantages": "advantages.whiten",
    "opd_kl_coef": "on_policy_distillation",
    "opd_type": "on_policy_distillation",
    "recompute_loss_function": "memory",
    "ref_ckpt_step": "ref_log_probs",
    "ref_load": "ref_log_probs",
    "ref_update_interval": "ref_log_probs",
    "rollout_data_postprocess_path": "loss mask",
    "rollout_sample_filter_path": "loss mask",
    "rollout_top_p": "nucleus_ids=",
    "use_opd": "on_policy_distillation",
    "use_rollout_routing_replay": "routed_experts",
    "use_routing_replay": "routed_experts",
    "value_clip": "Value(",
}
# of miles at 31f1ca96 (training_utils/loss_hub)
READ_BY_THE_LOSS_OF_MILES = READ_BY_THE_LOSS | {
    "observe_training_entropy": "always a metric",
    "opd_log_prob_top_k": "the sampled token alone",
    "opd_top_k_strategy": "the sampled token alone",
    "qkv_format": "rows",
    "true_on_policy_mode": "one program",
    "use_dynamic_global_batch_size": "one step",
}


@pytest.mark.parametrize(
    "how", [dict, lambda given: Namespace(**given)], ids=["a mapping", "a Namespace"]
)
@pytest.mark.parametrize("system", ["slime", "miles"])
def test_no_key_that_their_loss_reads_is_dropped_without_its_subject(system, how):
    """What changes loss masks was "the rollout engine", and the balance loss of routers no
    argument of slime's.
    """
    subjects = {"slime": READ_BY_THE_LOSS, "miles": READ_BY_THE_LOSS_OF_MILES}[system]
    module, keys, *_ = SYSTEMS[system]
    assert not translated(keys) & subjects.keys()
    found = module.translate(how(dict.fromkeys(subjects, 0.5))).elsewhere
    assert {key: remark for key, remark in found.items() if subjects[key] not in remark} == {}
    assert found.keys() == subjects.keys()


def test_nested_and_dotted_keys_are_the_same():
    nested = {
        "actor_rollout_ref": {"actor": {"clip_ratio_high": 0.28, "policy_loss.loss_mode": "cispo"}}
    }
    assert verl.config_of(nested).loss == CISPO(0.2, 0.28)


def test_a_key_that_is_nested_and_dotted_has_one_value():
    """Before: the last one won."""
    high = "actor_rollout_ref.actor.clip_ratio_high"
    nested = {"actor_rollout_ref": {"actor": {"clip_ratio_high": 0.28}}}
    for both in (nested | {high: 0.3}, {high: 0.3} | nested):
        with pytest.raises(
            ValueError,
            match=f"{high}: got 0.(28|3) and 0.(28|3), nested and dotted, expected one of them",
        ):
            verl.config_of(both)
    assert verl.config_of(nested | {high: 0.28}).loss.clip_high == 0.28


def test_a_namespace_may_hold_the_arguments_of_megatron():
    found = slime.translate(Namespace(eps_clip=0.1, tensor_model_parallel_size=2, sglang_dp_size=2))
    assert found.config.loss == PPO(0.1, 0.1)
    assert found.elsewhere["tensor_model_parallel_size"] == "no argument of slime's own"
    with pytest.raises(ValueError, match="unknown keys tensor_model_parallel_size"):
        slime.translate({"eps_clip": 0.1, "tensor_model_parallel_size": 2})
