"""Each argument of each public function, made wrong in each way that its kind can be: a named
error, or NaN.

Functions and arguments are found by introspection: a new one without a row fails here.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_surface import R, T, arguments_of, names_of, surface

from jaxppo.base.arrays import PER_TOKEN_VALUES

SURFACE = surface()
NAN = float("nan")
INF = float("inf")


def always(value):
    """A function that gives the value in the place of any argument."""

    def spoil(x):
        return value

    return spoil


def by_numpy(function):
    """The function on numpy's arrays, for which nothing is compiled; jax's arrays stay such."""

    def spoil(x):
        made = function(np.asarray(x))
        return jnp.asarray(made) if isinstance(x, jax.Array) else made

    return spoil


def cast(dtype):
    @by_numpy
    def spoil(x):
        return x.astype(dtype)

    return spoil


def filled(value):
    """The array, or each array of a tree, with the value at all places, since only some of them
    carry loss.
    """

    @by_numpy
    def full(x):
        return np.full_like(x, value)

    return partial(jax.tree.map, full)


def filled_floats(value):
    """As `filled`, of integers and bools too."""

    @by_numpy
    def full(x):
        return np.full(x.shape, value, np.result_type(x, np.float32))

    return full


def as_list(x):
    return np.asarray(x).tolist()


def twice(x):
    return [*x, *x]


@by_numpy
def first(x):
    return x[0]


@by_numpy
def nested(x):
    return x[None, None]


@by_numpy
def one_position(x):
    return x[:, :1] if x.ndim > 1 else x


@by_numpy
def one_row(x):
    return x[:1]


def ones(*shape, dtype=np.float32):
    return jnp.asarray(np.ones(shape, dtype))


NO_ARRAY = {"a text": always("x"), "a list": as_list, "a number": always(1.0)}
SHAPES = {"one less dimension": first, "one more dimension": nested}
BROADCASTS = {"one position": one_position, "one row": one_row}
TEXT = {"complex": cast(complex)}
NARROW = {"bf16": cast(jnp.bfloat16), "f16": cast(np.float16)}
INTEGERS = {"i32": cast(np.int32), "bool": cast(bool)}
VALUES = {"NaN": filled(NAN), "infinity": filled(INF)}
PROBABILITIES = {"probabilities": filled(0.5)}
POSITIVE = VALUES | PROBABILITIES
ARRAYS = NO_ARRAY | SHAPES | BROADCASTS | TEXT  # wrong for every argument that is an array
BOOL = {"True": always(True)}
ONE_TEXT = {"a text": always("0.1")}
A_LIST = {"a list": always([0.1])}
WRONG = {  # by kind, the ways to be wrong that every argument of that kind must refuse
    "own log-probs": ARRAYS | NARROW | INTEGERS | POSITIVE,
    "given log-probs": ARRAYS | INTEGERS | POSITIVE,
    "floats": ARRAYS | INTEGERS | VALUES,
    "floats that may be NaN": ARRAYS | INTEGERS,
    "statistic": ARRAYS | NARROW | INTEGERS | VALUES,
    "mask": ARRAYS | {str(value): filled_floats(value) for value in (NAN, 2, 0.5)},
    "where": ARRAYS,
    "ids": ARRAYS | {"floats": cast(float), "bool": cast(bool)},
    "states": NO_ARRAY | SHAPES | TEXT | INTEGERS | {"NaN": VALUES["NaN"]},
    "one array": {"a text": NO_ARRAY["a text"]} | TEXT,
    "one array of log-probs": NO_ARRAY | TEXT | NARROW | INTEGERS | PROBABILITIES,
    "values checked by losses": ARRAYS,
    "sizes": NO_ARRAY | TEXT | SHAPES,
    "held": {},
    "bool": ARRAYS | {"floats": cast(float), "i32": cast(int)},
    "integer": {
        "half": always(1.5),
        **BOOL,
        "a text": always("1"),
        "several": always([1, 2]),
    },
    "list": {"a text": always("x"), "a number": always(NAN), "one more": twice},
    "flag": {
        "no": always("no"),
        "1": always(1),
        "None": always(None),
        "an array": always(ones(2)),
    },
    "number": {
        "NaN": always(NAN),
        "infinity": always(INF),
        **BOOL,
        **ONE_TEXT,
        "an array": always(ones(R, 1)),
        **A_LIST,
        "a scalar bool": always(jnp.bool_(True)),
    },
    "reward": {"infinity": always(INF), **BOOL, **ONE_TEXT, **A_LIST},
    "bound": {"NaN": always(NAN), **BOOL, **ONE_TEXT},
    "count": {
        "half": always(1.5),
        "below": always(-2),
        **BOOL,
        "a text": always("1"),
        "an array": always(ones(2, dtype=np.int32)),
        "NaN": always(NAN),
    },
    "name": {"a number": always(1.5), "an array": always(ones(R, T))},
    "choice": {"another": always("another"), "a number": always(3), "a list": always(["x"])},
    "object": {"a text": always("x"), "a number": always(1.5), "an array": always(ones(R, T))},
}


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
