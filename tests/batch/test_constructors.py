"""Batches from arrays as frameworks hold them: every value against what was written down by
hand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    explain_broken_rules,
    policy_loss,
)
from jaxppo.batch.rules import RULES
from sharding import logical_positions, make_parallel_mesh

# Row 0 is padded on the left and has a hole in its completion; row 1 is padded between prompt and
# completion, and its completion ends before its row does.
PADDED = {
    "prompt_ids": [[0, 0, 5, 6], [7, 8, 0, 0]],
    "completion_ids": [[11, 12, 13, 0], [21, 22, 23, 24]],
    "completion_mask": [[1, 0, 1, 0], [1, 1, 0, 0]],
    "prompt_mask": [[0, 0, 1, 1], [1, 1, 0, 0]],
    "advantages": [2.0, -1.0],
    "old_log_probs": [[-1.0, -2.0, -3.0, -9.0], [-4.0, -5.0, -9.0, -9.0]],
    "rewards": [0.5, 1.5],
    "group_ids": [3, 3],
    "rollout_ids": [5, 6],
}
FROM_PADDED = {
    "tokens": [[0, 0, 5, 6, 11, 12, 13, 0], [7, 8, 0, 0, 21, 22, 23, 24]],
    "targets": [[0, 0, 6, 11, 12, 13, 0, 0], [8, 21, 0, 0, 22, 0, 0, 0]],
    "segment_ids": [[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0]],
    "positions": [[0, 0, 0, 1, 2, 3, 4, 0], [0, 1, 1, 1, 2, 3, 0, 0]],
    "loss_mask": [[0, 0, 0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 1, 0, 0, 0]],
    "advantages": [[0, 0, 0, 2, 2, 2, 0, 0], [0, -1, 0, 0, -1, 0, 0, 0]],
    "old_log_probs": [[0, 0, 0, -1, -2, -3, 0, 0], [0, -4, 0, 0, -5, 0, 0, 0]],
    "rewards": [[0.5], [1.5]],
    "group_ids": [[3], [3]],
    "rollout_ids": [[5], [6]],
    "sample_ids": [[0], [1]],
}
# Every value is at its token. No position predicts the first token of a sequence.
TOKEN_ALIGNED = {
    "tokens": [[5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]],
    "segment_ids": [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]],
    "positions": [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]],
    "loss_mask": [[0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]],
    "returns": [[9, 1, 2, 9, 3, 9, 9, 9], [9, 4, 5, 6, 9, 9, 9, 9]],
    "rewards": [[1, 2], [3, 0]],
    "rollout_ids": [[7, 7], [8, -1]],
}
FROM_TOKEN_ALIGNED = TOKEN_ALIGNED | {
    "targets": [[6, 7, 0, 9, 0, 0, 0, 0], [2, 3, 4, 0, 0, 0, 0, 0]],
    "loss_mask": [[1, 1, 0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]],
    "returns": [[1, 2, 0, 3, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0, 0, 0]],
    "sample_ids": [[0, 1], [2, -1]],
}
# Nothing moves; the target of a sequence's last position is not a token of the row.
TARGET_ALIGNED = TOKEN_ALIGNED | {
    "targets": [[6, 7, 70, 9, 90, 0, 0, 0], [2, 3, 4, 40, 0, 0, 0, 0]],
    "loss_mask": [[0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]],
    "returns": [[9, 1, 2, 9, 3, 0, 0, 0], [9, 4, 5, 6, 0, 0, 0, 0]],
}
FROM_TARGET_ALIGNED = TARGET_ALIGNED | {"sample_ids": [[0, 1], [2, -1]]}
CASES = {
    "from_padded": (PADDED, FROM_PADDED),
    "from_token_aligned": (TOKEN_ALIGNED, FROM_TOKEN_ALIGNED),
    "from_target_aligned": (TARGET_ALIGNED, FROM_TARGET_ALIGNED),
}
POSITIONAL = {
    "from_padded": ("prompt_ids", "completion_ids", "completion_mask"),
    "from_token_aligned": ("tokens", "segment_ids", "positions", "loss_mask"),
    "from_target_aligned": ("tokens", "targets", "segment_ids", "positions", "loss_mask"),
}
# and no other rule, which would be an effect
OF_CONSTRUCTORS = f"loss_mask_values: expected {RULES[0].expected}"
PLACES = [
    None,
    ("dp=2", "contiguous"),
    ("dp=2,cp=2,tp=2", "contiguous"),
    ("cp=4", "zigzag"),
    ("dp=2,cp=4", "striped"),
]


def as_arrays(values):
    kinds = (np.int32, np.float32)
    return {
        name: np.asarray(x, kinds[np.asarray(x).dtype.kind == "f"]) for name, x in values.items()
    }


def made(name, arrays, **options):
    arrays = {k: x.astype(np.float32) if k == "returns" else x for k, x in arrays.items()}
    if name != "from_padded":
        options = {"num_segments": 2} | options
    positional = [arrays.pop(k) for k in POSITIONAL[name]]
    return getattr(RolloutBatch, name)(*positional, **arrays, **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values(name, jitted, place):
    mesh, layout = place or (None, "contiguous")
    shards = (
        1 if mesh is None else int(dict(part.split("=") for part in mesh.split(",")).get("cp", 1))
    )
    devices = jax.devices()[: int(np.prod([int(part[3:]) for part in (mesh or "dp=1").split(",")]))]
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout, devices=devices)
    given, expected = CASES[name]

    def make(arrays):
        return made(name, arrays, parallel=parallel)

    batch = (jax.jit(make) if jitted else make)(as_arrays(given))
    order = logical_positions(layout, 8, shards)
    for field in dataclasses.fields(RolloutBatch):
        x = getattr(batch, field.name)
        if field.name in expected:
            wanted = np.asarray(expected[field.name])
            wanted = wanted if wanted.shape[1] <= 2 else wanted[:, order]
            np.testing.assert_array_equal(x, wanted, err_msg=field.name)
            assert x.dtype == (
                jnp.int32 if wanted.dtype.kind == "i" and x.dtype.kind == "i" else jnp.float32
            )
        elif field.default is None or field.name == "sample_ids":
            assert x is None, field.name
    assert (batch.context_layout, batch.context_shards) == (layout, shards)
    assert batch.real_last_targets == (name == "from_target_aligned")
    if name != "from_padded":  # which leaves out numbers if there is padding within a sequence
        batch.validate(100)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_vmap_of_what_is_made_under_them(name):
    """`loss_mask` aside, the gradient of a value is 1 at its token, for each position that the
    value reached.
    """
    given = as_arrays(CASES[name][0])
    expected = CASES[name][1]
    field = "old_log_probs" if name == "from_padded" else "returns"

    def total(x):
        return getattr(made(name, given | {field: x}), field).sum()

    slope = jax.grad(total)(jnp.asarray(given[field], jnp.float32))
    moved = np.asarray(expected[field])
    assert float((np.asarray(slope) * given[field]).sum()) == moved.sum()
    assert set(np.unique(slope)) <= {0.0, 1.0}
    stacked = jax.tree.map(lambda x: np.stack([x, x]), given)
    batches = jax.vmap(lambda arrays: made(name, arrays))(stacked)
    np.testing.assert_array_equal(batches.targets, np.stack([expected["targets"]] * 2))


def test_where_attention_mask_says_otherwise():
    """Without an attention mask, a completion ends at its last token with loss, and a prompt's
    padding is not known.
    """
    given = as_arrays(PADDED)
    attention = np.array([[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1]])
    batch = made("from_padded", given | {"prompt_mask": None}, attention_mask=attention)
    np.testing.assert_array_equal(batch.targets[1], [8, 21, 0, 0, 22, 23, 24, 0])
    np.testing.assert_array_equal(batch.segment_ids[1], np.ones(8))
    np.testing.assert_array_equal(batch.loss_mask[1], [0, 1, 0, 0, 1, 0, 0, 0])
    whole = made("from_padded", given | {"prompt_mask": None})
    np.testing.assert_array_equal(whole.segment_ids[0], [1, 1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(whole.targets[1], [8, 0, 0, 21, 22, 0, 0, 0])


@pytest.mark.parametrize("seed", range(3))
def test_padded_rows_have_the_loss_of_packed_samples(seed):
    rng = np.random.default_rng(seed)
    B, P, C = 4, 5, 6
    prompts = rng.integers(1, 50, (B, P))
    completions = rng.integers(1, 50, (B, C))
    starts = rng.integers(0, P, B)
    ends = rng.integers(1, C + 1, B)
    prompt_mask = np.arange(P) >= starts[:, None]
    mask = (np.arange(C) < ends[:, None]) & (rng.random((B, C)) < 0.7)
    old = -rng.exponential(size=(B, C))
    new = -rng.exponential(size=(B, C))
    advantages = rng.normal(size=B)
    padded = RolloutBatch.from_padded(
        prompts,
        completions,
        mask,
        prompt_mask=prompt_mask,
        advantages=advantages,
        old_log_probs=old,
        returns=new,
    )
    samples = [
        Sample(
            np.concatenate([prompts[b, starts[b] :], completions[b]]),
            response_start=P - int(starts[b]),
            loss_mask=np.concatenate([np.zeros(P - starts[b]), mask[b]]),
            advantages=np.full(C, advantages[b]),
            old_log_probs=old[b],
            returns=new[b],
        )
        for b in range(B)
    ]
    packed = RolloutBatch.from_samples(samples, row_length=2 * (P + C))
    config = PolicyLossConfig(aggregation="sequence_mean_token_mean")
    losses = [
        policy_loss(TokenStats(jnp.asarray(b.returns)), b, config)[0] for b in (padded, packed)
    ]
    assert losses[0] == pytest.approx(float(losses[1]), rel=1e-5)


ONES = np.ones((2, 4), np.int32)
FLOATS = np.ones((2, 4), np.float32)
MISUSE = {
    "float prompts": (
        "from_padded",
        {"prompt_ids": FLOATS},
        TypeError,
        "prompt_ids: got float32, expected integers",
    ),
    "rows that differ": (
        "from_padded",
        {"completion_ids": ONES[:1]},
        ValueError,
        r"prompt_ids: got shape \(2, 4\), expected \(1, 4\)",
    ),
    "no completion": (
        "from_padded",
        {"completion_ids": ONES[:, :0]},
        ValueError,
        r"completion_ids: got shape \(2, 0\), expected two dimensions, each at least 1",
    ),
    "advantages of all tokens": (
        "from_padded",
        {"advantages": np.ones((2, 8))},
        ValueError,
        r"advantages: got shape \(2, 8\), expected \(2, 4\) or \(2,\)",
    ),
    "rewards per token": (
        "from_padded",
        {"rewards": FLOATS},
        ValueError,
        r"rewards: got shape \(2, 4\), expected \(2,\)",
    ),
    "an unknown array": (
        "from_padded",
        {"logps": FLOATS},
        TypeError,
        "logps: got an unknown array, expected one of advantages, old_log_probs",
    ),
    "one dimension": (
        "from_token_aligned",
        {"tokens": ONES[0]},
        ValueError,
        r"tokens: got shape \(4,\), expected two dimensions",
    ),
    "a mask of another shape": (
        "from_token_aligned",
        {"loss_mask": ONES},
        ValueError,
        r"loss_mask: got shape \(2, 4\), expected \(2, 8\)",
    ),
    "more segments than said": (
        "from_token_aligned",
        {"rewards": np.ones((2, 3))},
        ValueError,
        r"rewards: got shape \(2, 3\), expected \(2, 2\)",
    ),
    "float segments": (
        "from_target_aligned",
        {"segment_ids": np.ones((2, 8))},
        TypeError,
        "segment_ids: got float\\d*, expected integers",
    ),
    "strings": (
        "from_target_aligned",
        {"old_log_probs": np.full((2, 8), "a")},
        TypeError,
        "old_log_probs: got <U1, expected numbers",
    ),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse(what):
    name, wrong, error, message = MISUSE[what]
    arrays = as_arrays(CASES[name][0])
    with pytest.raises(error, match=message):
        made(name, arrays | wrong)


WIDE = [(name, what) for name, (given, _) in CASES.items() for what in given]
WIDE = [
    (name, what)
    for name, what in WIDE
    if what.endswith("ids") or what in ("tokens", "targets", "positions")
]


@pytest.mark.parametrize(("name", "what"), WIDE)
def test_integers_of_numpy_that_do_not_fit_are_refused(name, what):
    """Before: cut to i32, as plausible tokens."""
    arrays = as_arrays(CASES[name][0])
    wide = arrays[what].astype(np.int64)
    made(name, arrays | {what: wide})
    with pytest.raises(ValueError, match=f"{what}: got {(wide + 2**32).max()}, expected"):
        made(name, arrays | {what: wide + 2**32})


PROMPTS = {"left-padded": [[0, 5, 6], [7, 8, 9]], "right-padded": [[4, 5, 6], [7, 8, 0]]}


@pytest.mark.parametrize("padded", PROMPTS)
def test_padded_prompts_without_a_mask(padded):
    """Before: the padding counted as tokens of the prompt, silently."""
    given = as_arrays({"prompt_ids": PROMPTS[padded], "completion_ids": [[11, 12], [13, 14]]})
    given |= {"completion_mask": np.ones((2, 2)), "old_log_probs": -np.ones((2, 2), np.float32)}
    row = 0 if padded == "left-padded" else 1
    with pytest.raises(
        ValueError,
        match=f"prompt_mask: got None, and 0, the pad_id, at an end of the prompt of row {row}",
    ):
        made("from_padded", given, pad_id=0)
    batch = made("from_padded", given, pad_id=0, prompt_mask=given["prompt_ids"] > 0)
    np.testing.assert_array_equal(batch.loss_mask.sum(1), [2, 2])
    made("from_padded", given | {"completion_mask": np.zeros((2, 2))}, pad_id=0).validate(100)
    made("from_padded", given, pad_id=3).validate(100)
    loss, found = jax.jit(lambda x: padded_loss(x, pad_id=0))(
        given | {"advantages": np.ones(2, np.float32)}
    )
    assert np.isnan(loss)
    assert explain_broken_rules(found["broken_rules"].value) == [OF_CONSTRUCTORS]


def test_sample_ids_are_i32_with_x64():
    """They were i64 where num_segments is an integer of numpy."""
    with jax.enable_x64(True):
        batch = made("from_token_aligned", as_arrays(TOKEN_ALIGNED), num_segments=np.int64(2))
        assert batch.sample_ids.dtype == jnp.int32


def test_the_number_of_segments():
    arrays = as_arrays(TOKEN_ALIGNED)
    assert made("from_token_aligned", arrays, num_segments=None).num_segments == 2
    with pytest.raises(ValueError, match="num_segments: got None under jit, expected S"):
        jax.jit(lambda a: made("from_token_aligned", a, num_segments=None))(arrays)


def test_meshes_that_do_not_fit():
    arrays = as_arrays(TOKEN_ALIGNED)
    with pytest.raises(
        ValueError,
        match=r"tokens: got shape \(2, 8\) in .*, expected dimension 0 to be a multiple of 8",
    ):
        made("from_token_aligned", arrays, parallel=make_parallel_mesh("dp=8"))
    with pytest.raises(ValueError, match="row length: got 8, expected a multiple of 16"):
        made(
            "from_token_aligned",
            arrays,
            parallel=make_parallel_mesh("cp=8", context_layout="zigzag"),
        )
    per_segment = make_parallel_mesh("cp=8", context_layout="zigzag_per_segment")
    with pytest.raises(
        ValueError, match="parallel: got context layout 'zigzag_per_segment' in RolloutBatch"
    ):
        made(
            "from_token_aligned",
            {k: np.repeat(x, 2, 1) for k, x in arrays.items()},
            parallel=per_segment,
            num_segments=4,
        )


def test_a_completion_without_a_token_before_it():
    """No position predicts its first token: refused, and under jit the loss is NaN, and a metric
    says why.
    """
    given = as_arrays(PADDED) | {"prompt_mask": np.zeros((2, 4), np.int32)}

    def loss(arrays):
        batch = made("from_padded", arrays)
        return policy_loss(TokenStats(batch.old_log_probs), batch, PolicyLossConfig())

    with pytest.raises(
        ValueError,
        match="completion_mask: got 1 at 0 of row 0, expected 0 on padding, and at a token",
    ):
        loss(given)
    value, found = jax.jit(loss)(given)
    assert np.isnan(value)
    assert explain_broken_rules(found["broken_rules"].value) == [OF_CONSTRUCTORS]


LEFT = {
    "prompt_ids": [[5, 6], [7, 8], [9, 3]],
    "completion_ids": [[0, 0, 11, 12], [21, 22, 23, 0], [0, 0, 0, 0]],
    "completion_mask": [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]],
    "advantages": [1.0, -1.0, 2.0],
    "old_log_probs": [[-1.0] * 4] * 3,
}


def padded_loss(arrays, **options):
    batch = made("from_padded", arrays, **options)
    return policy_loss(TokenStats(batch.old_log_probs), batch, PolicyLossConfig())


def test_completions_that_are_padded_in_front():
    """Without the check, a padding token predicted token 11, and the loss was finite."""
    given = as_arrays(LEFT)
    message = (
        "completion_ids: got 0, the pad_id, before the tokens of row 0, expected completions that"
        " are right-padded"
    )
    for arrays in (given, jax.tree.map(jnp.asarray, given)):
        with pytest.raises(ValueError, match=message):
            made("from_padded", arrays, pad_id=0)
    attention = np.concatenate([given["prompt_ids"], given["completion_ids"]], axis=1) > 0
    loss, _ = jax.jit(lambda x: padded_loss(x, pad_id=0, attention_mask=attention))(given)
    assert np.isfinite(loss)
    batch = made("from_padded", given, pad_id=0, attention_mask=attention)
    np.testing.assert_array_equal(batch.targets[0], [6, 11, 0, 0, 12, 0])


@pytest.mark.parametrize("place", PLACES)
def test_completions_that_are_padded_in_front_under_jit(place):
    mesh, layout = place or (None, "contiguous")
    sizes = [int(part[3:]) for part in (mesh or "dp=1").split(",")]
    parallel = mesh and make_parallel_mesh(
        mesh, context_layout=layout, devices=jax.devices()[: np.prod(sizes)]
    )
    rows = {k: np.concatenate([x, x[1:2]]) for k, x in as_arrays(LEFT).items()}
    rows |= {
        k: np.pad(rows[k], ((0, 0), (0, 1)))
        for k in ("completion_ids", "completion_mask", "old_log_probs")
    }
    rows["prompt_ids"] = np.pad(rows["prompt_ids"], ((0, 0), (1, 0)), constant_values=4)

    @jax.jit
    def run(arrays):
        batch = made("from_padded", arrays, pad_id=0, parallel=parallel)
        stats = TokenStats(batch.old_log_probs)
        loss, found = policy_loss(stats, batch, PolicyLossConfig(), parallel=parallel)
        return loss, found["broken_rules"].value

    loss, broken = run(rows)
    assert np.isnan(loss)
    assert explain_broken_rules(broken) == [OF_CONSTRUCTORS]
    loss, _ = run({k: x[[1, 1, 2, 2]] for k, x in rows.items()})
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    "change",
    [
        # sampled, and trained on
        {"completion_ids": [[0, 11, 12, 13]], "completion_mask": [[1, 1, 1, 1]]},
        {"completion_ids": [[11, 0, 12, 13]], "completion_mask": [[0, 0, 1, 1]]},  # within
        {"completion_ids": [[0, 0, 0, 0]], "completion_mask": [[0, 0, 0, 0]]},  # nothing else
    ],
)
def test_the_padding_id_elsewhere(change):
    given = {k: x[:1] for k, x in LEFT.items()} | change
    made("from_padded", as_arrays(given), pad_id=0).validate(100)
    jax.jit(lambda x: padded_loss(x, pad_id=0)[0])(as_arrays(given)).item()
    with pytest.raises(TypeError, match="pad_id: got '0', expected an integer"):
        made("from_padded", as_arrays(given), pad_id="0")


def test_last_positions_count_where_their_targets_are_real():
    batch = made("from_target_aligned", as_arrays(TARGET_ALIGNED))
    batch = dataclasses.replace(batch, advantages=jnp.ones((2, 8)), old_log_probs=-jnp.ones((2, 8)))
    loss, found = policy_loss(
        TokenStats(-jnp.ones((2, 8))), batch, PolicyLossConfig(aggregation="token_sum")
    )
    assert (float(loss), int(found["broken_rules"].value)) == (-6.0, 0)
    wrong = dataclasses.replace(batch, real_last_targets=False)
    assert np.isnan(policy_loss(TokenStats(-jnp.ones((2, 8))), wrong, PolicyLossConfig())[0])


SEGMENTS = {"segment_ids": [[0, 0, 1, 1]], "positions": [[0, 1, 0, 1]], "loss_mask": [[0, 1, 0, 1]]}
WRONG_MASKS = {
    "sequences from 0, at tokens": (
        "from_token_aligned",
        {},
        "loss_mask: got 1 at 1 of row 0, expected 0 where",
    ),
    "sequences from 0, at targets": (
        "from_target_aligned",
        {},
        "loss_mask: got 1 at 1 of row 0, expected 0 where",
    ),
    "a sequence that goes on": (
        "from_token_aligned",
        {"segment_ids": [[1, 1, 2, 1]], "loss_mask": [[0, 1, 0, 0]]},
        "segment_ids: got 1 again in row 0, expected each sequence to be contiguous",
    ),
    "sequences that fall": (
        "from_target_aligned",
        {"segment_ids": [[2, 2, 1, 1]], "loss_mask": [[1, 0, 1, 0]]},
        "segment_ids: got 1 again in row 0, expected each sequence to be contiguous",
    ),
    "half a mask at tokens": (
        "from_token_aligned",
        {"segment_ids": [[1, 1, 1, 1]], "loss_mask": [[0, 0.5, 1, 1]]},
        "loss_mask: got 0.5 in row 0, expected 0 and 1",
    ),
    "half a mask of a pack": (
        "from_cu_seqlens",
        {"loss_mask": [[0, 0.5, 1, 1]]},
        "loss_mask: got 0.5 in row 0, expected 0 and 1",
    ),
    "loss outside of a pack": (
        "from_cu_seqlens",
        {"cu_seqlens": [[0, 3]], "loss_mask": [[0, 1, 1, 1]]},
        "loss_mask: got 1 in row 0, expected 0 tokens to train on outside",
    ),
    "half a mask of completions": (
        "from_padded",
        {"completion_mask": [[0.5, 1]]},
        "completion_mask: got 0.5 in row 0, expected 0 and 1",
    ),
    "a completion mask on padding": (
        "from_padded",
        {"attention_mask": [[1, 1, 1, 0]]},
        "completion_mask: got 1 at 1 of row 0, expected 0 on padding",
    ),
    "a row of padding alone": (
        "from_padded",
        {"attention_mask": [[0, 0, 0, 0]]},
        "completion_mask: got 1 at 0 of row 0, expected 0 on padding",
    ),
    "a mask that is added to scores": (
        "from_padded",
        {"attention_mask": [[0, 0, 0, -np.inf]], "completion_mask": [[0, 0]]},
        "attention_mask: got -inf in row 0, expected 0 and 1",
    ),
}


def row_of(name, arrays, old):
    ids = np.array([[1, 2, 3, 4]])
    if name == "from_padded":
        given = {"completion_mask": jnp.ones((1, 2))} | arrays
        return RolloutBatch.from_padded(ids[:, :2], ids[:, 2:], old_log_probs=old[:, 2:], **given)
    if name == "from_cu_seqlens":
        given = {"cu_seqlens": jnp.array([[0, 4]])} | arrays
        return RolloutBatch.from_cu_seqlens(ids, aligned="token", old_log_probs=old, **given)
    if name == "from_target_aligned":
        arrays = {"targets": ids, **arrays}
    return getattr(RolloutBatch, name)(ids, old_log_probs=old, num_segments=2, **arrays)


@pytest.mark.parametrize("case", WRONG_MASKS)
def test_all_constructors_ask_the_same_of_a_mask(case):
    """Sequences from 0 lost the loss of the first one in silence: 2 for 1.5 here.

    Others were NaN, or refused.
    """
    name, arrays, message = WRONG_MASKS[case]
    given = {k: np.array(x) for k, x in ((SEGMENTS if "aligned" in name else {}) | arrays).items()}
    given = {k: x.astype(np.float32 if x.dtype.kind == "f" else np.int32) for k, x in given.items()}
    old = -np.ones((1, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        row_of(name, given, old)

    @jax.jit
    def loss(arrays, old):
        batch = row_of(name, arrays, old)
        batch = dataclasses.replace(batch, advantages=jnp.ones(batch.loss_mask.shape))
        return policy_loss(TokenStats(batch.old_log_probs), batch, PolicyLossConfig())

    value, found = loss(given, old)
    assert np.isnan(value)
    assert explain_broken_rules(found["broken_rules"].value)[0] == OF_CONSTRUCTORS


def test_ids_of_images():
    """Ids above the vocabulary, which a model embeds in another way, were refused where nothing
    trains them.
    """
    batch = RolloutBatch.from_samples([Sample([1, 99, 99, 2, 3], response_start=3)], row_length=8)
    batch.validate(10)
    trained = RolloutBatch.from_samples([Sample([1, 2, 99, 3], response_start=2)], row_length=8)
    with pytest.raises(ValueError, match="targets: got 99 at row 0, position 1"):
        trained.validate(10)
    with pytest.raises(
        ValueError, match="tokens: got -1 at row 0, position 1, expected at least 0"
    ):
        dataclasses.replace(batch, tokens=np.where(batch.tokens == 99, -1, batch.tokens)).validate(
            10
        )
