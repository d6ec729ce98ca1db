"""Each argument of each public function, made wrong in each way that its kind can be: a named
error, or NaN.

Functions and arguments are found by introspection: a new one without a row fails here.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_surface import R, T, arguments_of, names_of, surface

from jaxppo.base.arrays import PER_TOKEN_VALUES

SURFACE = surface()
NAN = float("nan")
INF = float("inf")


def filled(x, value):
    """The array with another value at all places, since only some of them carry loss."""
    return jax.tree.map(
        lambda a: jnp.full_like(a, value) if isinstance(a, jax.Array) else np.full_like(a, value), x
    )


def cast(dtype):
    return lambda x: x.astype(dtype)


NO_ARRAY = {
    "a text": lambda x: "x",
    "a list": lambda x: np.asarray(x).tolist(),
    "a number": lambda x: 1.0,
}
SHAPES = {"one less dimension": lambda x: x[0], "one more dimension": lambda x: x[None, None]}
BROADCASTS = {"one position": lambda x: x[:, :1] if x.ndim > 1 else x, "one row": lambda x: x[:1]}
TEXT = {"complex": cast(complex)}
NARROW = {"bf16": cast(jnp.bfloat16), "f16": cast(jnp.float16)}
INTEGERS = {"i32": cast(jnp.int32), "bool": cast(bool)}
VALUES = {"NaN": lambda x: filled(x, NAN), "infinity": lambda x: filled(x, INF)}
POSITIVE = {**VALUES, "probabilities": lambda x: filled(x, 0.5)}
WRONG = {  # by kind, the ways to be wrong that every argument of that kind must refuse
    "own log-probs": NO_ARRAY | SHAPES | BROADCASTS | TEXT | NARROW | INTEGERS | POSITIVE,
    "given log-probs": NO_ARRAY | SHAPES | BROADCASTS | TEXT | INTEGERS | POSITIVE,
    "floats": NO_ARRAY | SHAPES | BROADCASTS | TEXT | INTEGERS | VALUES,
    "floats that may be NaN": NO_ARRAY | SHAPES | BROADCASTS | TEXT | INTEGERS,
    "statistic": NO_ARRAY | SHAPES | BROADCASTS | TEXT | NARROW | INTEGERS | VALUES,
    "mask": NO_ARRAY | SHAPES | BROADCASTS | TEXT | {str(n): lambda x, n=n: filled(1.0 * x, n) for n in (NAN, 2, 0.5)},
    "where": NO_ARRAY | SHAPES | BROADCASTS | TEXT,
    "ids": NO_ARRAY | SHAPES | BROADCASTS | TEXT | {"floats": cast(float), "bool": cast(bool)},
    "states": NO_ARRAY | SHAPES | TEXT | INTEGERS | {"NaN": VALUES["NaN"]},
    "one array": {name: NO_ARRAY[name] for name in ("a text",)} | TEXT,
    "one array of log-probs": NO_ARRAY | TEXT | NARROW | INTEGERS | {"probabilities": POSITIVE["probabilities"]},
    "values checked by losses": NO_ARRAY | TEXT | SHAPES | BROADCASTS,
    "sizes": NO_ARRAY | TEXT | SHAPES,
    "held": {},
    "bool": NO_ARRAY | SHAPES | BROADCASTS | TEXT | {"floats": cast(float), "i32": cast(int)},
    "integer": {"half": lambda x: 1.5, "True": lambda x: True, "a text": lambda x: "1", "several": lambda x: [1, 2]},
    "list": {"a text": lambda x: "x", "a number": lambda x: NAN, "one more": lambda x: [*x, *x]},
    "flag": {"no": lambda x: "no", "1": lambda x: 1, "None": lambda x: None, "an array": lambda x: jnp.ones(2)},
    "number": {
        "NaN": lambda x: NAN, "infinity": lambda x: INF, "True": lambda x: True, "a text": lambda x: "0.1",
        "an array": lambda x: jnp.ones((R, 1)), "a list": lambda x: [0.1], "a scalar bool": lambda x: jnp.bool_(True),
    },
    "reward": {"infinity": lambda x: INF, "True": lambda x: True, "a text": lambda x: "0.1", "a list": lambda x: [0.1]},
    "bound": {"NaN": lambda x: NAN, "True": lambda x: True, "a text": lambda x: "0.1"},
    "count": {
        "half": lambda x: 1.5, "below": lambda x: -2, "True": lambda x: True, "a text": lambda x: "1",
        "an array": lambda x: jnp.ones(2, int), "NaN": lambda x: NAN,
    },
    "name": {"a number": lambda x: 1.5, "an array": lambda x: jnp.ones((R, T))},
    "choice": {"another": lambda x: "another", "a number": lambda x: 3, "a list": lambda x: ["x"]},
    "object": {"a text": lambda x: "x", "a number": lambda x: 1.5, "an array": lambda x: jnp.ones((R, T))},
}  # fmt: skip


def _rows(kind, names):
    return dict.fromkeys(names.split(), kind)


OF_NAME = {
    **_rows("own log-probs", "log_probs ref_log_probs old_log_probs trainer_log_probs"),
    **_rows("bool", "among"),
    **_rows("given log-probs", "rollout_log_probs teacher_log_probs"),
    **_rows("floats", "advantages values returns scores x baselines kl importance_ratio"),
    **_rows("floats that may be NaN", "rewards last_values"),
    **_rows("mask", "loss_mask mask"),
    **_rows("where", "where lengths selected"),
    **_rows(
        "ids",
        "ids targets group_ids sample_ids state_ids policy_versions nucleus_ids positions"
        " segment_ids rollout_ids",
    ),
    **_rows("ids", "tokens prompt_ids completion_ids state_ids"),
    **_rows("mask", "completion_mask prompt_mask attention_mask"),
    **_rows("floats", "loss_weights"),
    **_rows("statistic", "entropy"),
    **_rows(
        "states",
        "hidden head teacher_hidden teacher_head policy_hidden policy_head rollout_hidden"
        " rollout_head",
    ),
    **_rows("states", "logits kernel bias a b"),
    **_rows(
        "flag",
        "batch_normalize deterministic follow_mask keep_lone leave_one_out length_normalised"
        " scale_by_std",
    ),
    **_rows("flag", "shift_mean unbiased unified_mask whitened share_prefixes clip_by_sign dft"),
    **_rows(
        "number",
        "tolerance at_least beta bound buffer centring clip clip_high clip_low coef decay"
        " desirable_weight",
    ),
    **_rows(
        "number",
        "tolerance dual_clip epsilon eta f_norm factor gamma horizon huber_delta k_negative"
        " k_positive kl_coef",
    ),
    **_rows(
        "number",
        "label_smoothing lam lambda_negative lambda_positive length_alpha margin max_length most"
        " nll_coef",
    ),
    **_rows(
        "number",
        "opsm_delta pull ratio_cap reference_point reward samples scale share softcap step target",
    ),
    **_rows(
        "number",
        "tau_negative tau_positive undesirable_weight value_lam veto z_loss low high limit",
    ),
    **_rows(
        "number", "step_coef entropy_coef aggregation_norm temperature lora_scale gain alpha tau"
    ),
    **_rows(
        "count",
        "bins by columns seed depths first_id group_id rollout_id sample_id response_start top_k"
        " vocab_size",
    ),
    **_rows("count", "batch_row_length"),
    **_rows(
        "count",
        "width memory row_length rows max_tokens num_segments mtp_depths choice version"
        " proximal_version",
    ),
    **_rows("count", "update"),
    **_rows("ids", "cu_seqlens cu_seqlens_padded draft_ids d2t counts"),
    **_rows("count", "size block"),
    **_rows("number", "largest"),
    **_rows("object", "quantized"),
    **_rows("choice", "aligned"),
    **_rows("count", "broken_rules"),
    **_rows(
        "choice",
        "aggregation clip_fraction compares divergence estimator gradient gradient_sum_dtype"
        " importance",
    ),
    **_rows(
        "choice",
        "layout level logit_stats logits_dtype masked mean metric_aggregation name nll objective",
    ),
    **_rows(
        "choice",
        "opsm_compares opsm_fraction outside place precision reduce rounded_to singletons"
        " statistic std",
    ),
    **_rows("choice", "tail truncated implementation link ranks ratio_to unusable dtype"),
    **_rows("choice", "policy denominators penalties system"),
    **_rows(
        "object",
        "apply args batch chosen config first fn hidden_fn hidden_spec key loss loss_fn lora"
        " margins masks metrics",
    ),
    **_rows(
        "object",
        "micro_batches mismatched module normalizer normalizers off_policy output parallel parts",
    ),
    **_rows(
        "object",
        "prompts quantiles recorded rejected rejections rollout_hidden_spec spec stacked starts"
        " state",
    ),
    **_rows("list", "ends teacher_ends spans teacher_spans"),
    **_rows("own log-probs", "replayed_log_probs"),
    **_rows("ids", "own"),
    **_rows("count", "seed layers"),
    **_rows("number", "fill"),
    **_rows("choice", "at"),
    **_rows("object", "hidden_fn explained"),
    **_rows("object", "extras positive negative losses numbers head_extras"),
    **_rows("object", "stats teacher_hidden_spec weights adapter_ids nucleus buckets total count"),
}
# their arrays may be traced or specs; functions check them, as the rows of `head` show
HELD = ("Head", "LoRA")
CONSTRUCTORS = [
    f"RolloutBatch.from_{of}" for of in ("token_aligned", "target_aligned", "padded", "cu_seqlens")
]


def arrays_of(name):
    return [x for x, value in arguments_of(name, SURFACE[name]).items() if hasattr(value, "dtype")]


# where a name has another kind than elsewhere, or a value that means something there
OF_FUNCTION = {
    **{(of, x): "held" for of in HELD for x in ("kernel", "bias", "lora", "a", "b")},
    **{("Metric", x): "held" for x in ("total", "count")},
    **{(of, x): "values checked by losses" for of in CONSTRUCTORS for x in arrays_of(of)},
    **{("Sample", x): "list" for x in (*PER_TOKEN_VALUES, "tokens", "loss_mask")},
    **{(of, "tokens"): "sizes" for of in CONSTRUCTORS},
    ("RolloutBatch.from_cu_seqlens", "tokens"): "one array",
    **{("RolloutBatch.from_padded", x): "sizes" for x in ("prompt_ids", "completion_ids")},
    **{(f"Sample.from_{of}", "loss_mask"): "list" for of in ("vllm", "sglang")},
    **{(of, "high"): "bound" for of in ("OffPolicyConfig", "Rejection")},
    **{(of, "low"): "bound" for of in ("OffPolicyConfig", "Rejection")},
    ("last_values", "truncated"): "bool",
    **{("span_distillation", x): "list" for x in ("log_probs", "teacher_log_probs")},
    ("span_distillation", "teacher_spans"): "held",
    ("Extra", "values"): "held",
    ("routed_experts", "rows"): "list",
    ("routed_experts", "tokens"): "count",
    ("routing_metrics", "name"): "name",
    ("gdpo", "weights"): "object",
    ("gigpo", "returns"): "floats that may be NaN",
    **{("state_groups", x): "list" for x in ("group_ids", "states")},
    **{("step_returns", x): "list" for x in ("rewards", "rollout_ids")},
    ("Sample", "reward"): "reward",
    ("RolloutBatch.from_padded", "pad_id"): "integer",
    ("proximal_log_probs", "proximal_version"): "integer",
    **{("PolicyLossConfig", x): "object" for x in ("kl", "loss", "off_policy")},
    ("OffPolicyConfig", "weights"): "choice",
    **{
        (of, x): "name"
        for of in ("TopKDistillation", "ScoreCentering")
        for x in ("ids", "log_probs")
    },
    ("TopKDistillation", "target_log_probs"): "name",
    **{("Part", x): "name" for x in ("mask", "weights")},
    ("Part", "equals"): "count",
    ("by_row", "which"): "name",
    ("tinker", "loss_fn"): "choice",
    ("tinker", "loss_fn_config"): "held",
    **{
        (of, "samples"): "object"
        for of in ("drop_equal_groups", "mismatched_samples", "pack_nucleus_ids")
    },
    **{(of, "samples"): "object" for of in ("micro_batches_of_pairs", "RolloutBatch.from_samples")},
    ("TokenTrees.from_samples", "samples"): "object",
    ("TokenTrees.from_samples", "micro_batches"): "count",
    ("RolloutBatch.from_samples", "twin"): "object",
    ("optimal_token_baseline", "weights"): "floats",
    **{("Quantization", x): "flag" for x in ("hidden", "powers_of_two")},
    **{("QuantizedArray", x): "held" for x in ("values", "scale")},
    ("log_probs_from_hidden", "entropy"): "choice",
    ("log_probs_from_logits", "entropy"): "choice",
    ("AdaptiveEntropy.update", "entropy"): "number",
    ("adaptive_kl_coef", "kl"): "number",
    ("mismatch_report", "tokens"): "object",
    ("gdpo", "whitened"): "choice",
    ("overlong_penalty", "lengths"): "one array",
    ("renormalised_entropy", "log_probs"): "one array of log-probs",
    ("check_top_k", "log_probs"): "one array",
    ("check_top_k", "ids"): "one array",
    ("micro_batches_of_pairs", "micro_batches"): "count",
    ("RolloutBatch.from_samples", "micro_batches"): "count",
    ("Head.of", "module"): "held",
    ("draft_ids_of_d2t", "d2t"): "sizes",
    ("draft_targets", "draft_ids"): "sizes",
    ("accumulate_gradients", "micro_batches"): "held",
    ("StepTerm.of", "counts"): "where",
    ("StepTerm.of", "sums"): "floats",
}
FREE = {"params": "any pytree: apply reads it", "path": "opened, and the system's errors name it"}


@pytest.mark.parametrize("name", SURFACE)
def test_every_argument_has_a_row(name):
    names = names_of(SURFACE[name])
    assert set(names) <= set(arguments_of(name, SURFACE[name]))
    assert {x for x in names if (name, x) not in OF_FUNCTION} <= {*OF_NAME, *FREE}


MAY_BE_NONE = ("flag", "number", "count", "choice", "object", "name")


def spoilt(kind, x):
    """The argument, wrong in each way of its kind.

    Of several arrays in a list or a dictionary each is.
    """
    if x is None and kind not in MAY_BE_NONE:
        return {}
    if kind in (*MAY_BE_NONE, "bound", "reward", "list", "held", "integer"):
        return {how: spoil(x) for how, spoil in WRONG[kind].items()}
    if isinstance(x, dict):
        inside = {
            how: {name: spoil(of) for name, of in x.items()} for how, spoil in WRONG[kind].items()
        }
        return inside | {f"for {how}": spoil(x) for how, spoil in WRONG["object"].items()}
    if isinstance(x, list):
        return {how: [spoil(of) for of in x] for how, spoil in WRONG[kind].items()}
    made = {how: spoil(x) for how, spoil in WRONG[kind].items()}
    same = {how for how, bad in made.items() if how in BROADCASTS and bad.shape == x.shape}
    return {how: bad for how, bad in made.items() if how not in same}


def outcome(name, argument, function, given):
    """None where the call raised an error that names the argument, or gave NaN; else what
    happened.
    """
    try:
        found = function(**given)
    except (TypeError, ValueError) as error:
        lines = str(error)
        named = re.search(r": got .*, expected", lines, re.DOTALL) and re.search(
            rf"\b{argument}\b", lines
        )
        return (
            None
            if named and type(error) in (TypeError, ValueError)
            else f"{type(error).__name__}: {lines[:200]}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if any(
        jnp.issubdtype(x.dtype, jnp.floating) and (~np.isfinite(x)).any()
        for x in jax.tree.leaves(found)
        if hasattr(x, "dtype")
    ):
        return None
    return f"passed: {str(found)[:100]}"


@pytest.mark.parametrize("name", SURFACE)
def test_a_wrong_argument_is_named(name):
    function = SURFACE[name]
    good = arguments_of(name, SURFACE[name])
    wrong = []
    for argument, x in good.items():
        kind = OF_FUNCTION.get((name, argument), OF_NAME.get(argument))
        if kind is None:
            continue
        for how, bad in spoilt(kind, x).items():
            found = outcome(name, argument, function, {**good, argument: bad})
            wrong += [f"{argument}, {how}: {found}"] * (found is not None)
    assert not wrong, "\n" + "\n".join(wrong)
