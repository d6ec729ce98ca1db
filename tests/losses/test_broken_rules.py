"""If `broken_rules` is not 0, the loss and its gradient are NaN: every rule, with every loss, on
every path.

A path is compiled once for each loss; the data break the rules. "Before" says what an earlier
version gave.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import LOSSES, loss_named, normalizer_of, quick_jit
from programs import compilations
from tables import sampled

from jaxppo import (
    PPO,
    SFT,
    Head,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    accumulate_gradients,
    explain_broken_rules,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.base.metrics import merge_metrics
from jaxppo.batch.broken_rules import Broken
from jaxppo.batch.rules import ON_DEVICE, STRUCTURE
from jaxppo.losses.distillation import distillation_loss
from jaxppo.losses.mtp import MTP, mtp_loss
from sharding import make_parallel_mesh
from sharding.audit.program import notes

K, R, T, H, V = 2, 4, 16, 6, 24
AGGREGATION = "rollout_mean"  # the only one that reads rollout ids
VALUES = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")


def make_batch() -> RolloutBatch:
    """Two micro-batches; the first sequence of the last row of each has loss from its second
    position on.
    """
    rng = np.random.default_rng(1)
    samples = []
    for _ in range(12):
        n = int(rng.integers(4, 6))
        values = {name: -rng.exponential(size=n) for name in VALUES}
        samples.append(
            Sample(rng.integers(0, V - 1, 2 + n), response_start=2, loss_weights=0.5, **values)
        )
    batch = RolloutBatch.from_samples(
        samples, row_length=T, rows=R, micro_batches=K, num_segments=2
    )
    return dataclasses.replace(batch, rollout_ids=batch.sample_ids)


BATCH = make_batch()
RNG = np.random.default_rng(0)
INPUTS = {
    "hidden": RNG.normal(size=(K, R, T, H)).astype(np.float32),
    "kernel": RNG.normal(size=(H, V)).astype(np.float32),
    "bias": RNG.normal(size=V).astype(np.float32),
    "values": RNG.normal(size=(K, R, T)).astype(np.float32),
}
NORMALIZER = normalizer_of(BATCH, AGGREGATION)


def entry(where: np.ndarray) -> tuple[int, ...]:
    """The entry to break: in the last micro-batch, after a sound one, and not at the first
    position of a sequence.
    """
    return tuple(
        int(i)
        for i in np.argwhere(where & (BATCH.positions != 0) | (where & (BATCH.segment_ids == 0)))[
            -1
        ]
    )


# with loss before and after it, so that every depth of `mtp_loss` reads this entry
LOSS_TOKEN = entry(
    (BATCH.loss_mask > 0) & (np.roll(BATCH.loss_mask, -1, -1) > 0) & (BATCH.positions > 1)
)
PADDING = entry(BATCH.segment_ids == 0)
LAST = entry((BATCH.segment_ids > 0) & (np.roll(BATCH.segment_ids, -1, -1) != BATCH.segment_ids))


def spoilt(x: np.ndarray, at: tuple, value: float) -> np.ndarray:
    x = np.array(x)
    x[at] = value
    return x


def batch_with(name: str, at: tuple = LOSS_TOKEN, value: float = np.nan) -> dict:
    return {"batch": dataclasses.replace(BATCH, **{name: spoilt(getattr(BATCH, name), at, value)})}


def inputs_with(name: str, at: tuple, value: float) -> dict:
    return {"inputs": INPUTS | {name: spoilt(INPUTS[name], at, value)}}


SMALLER = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask * (np.arange(T) < 3))
TARGET = int(BATCH.targets[LOSS_TOKEN])
EVERY = ("policy", "sft", "value", "mtp", "distillation")
OF_LOG_PROBS = ("policy", "sft", "mtp")
# for each rule: the losses that have it, and the data that break it
RULES = {
    "loss_mask_values": (EVERY, batch_with("loss_mask", value=0.5)),
    "loss_mask_values, NaN": (EVERY, batch_with("loss_mask")),
    "loss_mask_on_padding": (EVERY, batch_with("loss_mask", PADDING, 1)),
    "loss_mask_on_last_position": (EVERY, batch_with("loss_mask", LAST, 1)),
    "segment_ids_range": (EVERY, batch_with("segment_ids", value=9)),
    "old_log_probs, above 0": (("policy",), batch_with("old_log_probs", value=0.1)),
    "old_log_probs, NaN": (("policy",), batch_with("old_log_probs")),
    "log_probs, hidden states": (OF_LOG_PROBS, inputs_with("hidden", LOSS_TOKEN, np.nan)),
    "log_probs, a masked column": (OF_LOG_PROBS, inputs_with("bias", (TARGET,), -np.inf)),
    "log_probs, no column": (OF_LOG_PROBS, batch_with("targets", value=V)),
    "advantages": (("policy",), batch_with("advantages", value=np.inf)),
    "returns": (("value",), batch_with("returns")),
    "new_values": (("value",), inputs_with("values", LOSS_TOKEN, np.inf)),
    "divergence": (("distillation",), inputs_with("hidden", LOSS_TOKEN, np.nan)),
    "rollout_ids_missing": (
        EVERY,
        {"batch": dataclasses.replace(BATCH, rollout_ids=np.full_like(BATCH.sample_ids, -1))},
    ),
    "rollout_ids_missing, of no sample": (
        EVERY,  # before: -2.311 for -0.289 from such segments
        {
            "batch": dataclasses.replace(
                BATCH,
                **dict.fromkeys(["sample_ids", "rollout_ids"], np.full_like(BATCH.sample_ids, -1)),
            )
        },
    ),
    "loss_weights": (EVERY, batch_with("loss_weights", value=-0.5)),
    "loss_weights, NaN": (EVERY, batch_with("loss_weights")),
    "normalizer_of_another_step": (EVERY, {"normalizer_of": SMALLER}),
}
WAYS = {
    "statistics": {"from_hidden": False},
    "one pass": {"memory": 2**30},
    "two passes": {"memory": 18_000},
    "micro-batches": {"memory": 2**30},
    "mesh": {"memory": 2**30, "mesh": "dp=2,cp=2,tp=2"},
    "mesh, statistics": {"from_hidden": False, "mesh": "dp=2,cp=2,tp=2"},
}
MTP_NORMALIZERS = Normalizer.of(MTP(1, aggregation=AGGREGATION), BATCH)[0]


def loss_of(
    kind: str,
    inputs: dict,
    batch: RolloutBatch,
    normalizer: Normalizer,
    parallel,
    from_hidden,
    memory,
):
    """The loss of one micro-batch, and its metrics."""
    options = {"parallel": parallel, "normalizer": normalizer}
    if kind == "value":
        return loss_from_stats(inputs["values"], batch, Value(aggregation=AGGREGATION), **options)
    hidden = inputs["hidden"]
    head = Head(inputs["kernel"], inputs["bias"])
    of_head = {"memory": memory}
    if kind == "mtp":
        options = {"parallel": parallel, "normalizers": [normalizer]}
        return mtp_loss([hidden], head, batch, MTP(aggregation=AGGREGATION), **options, **of_head)
    if kind == "distillation":
        teacher = 1.5 * jnp.where(jnp.isfinite(hidden), hidden, 0), inputs["kernel"]
        return distillation_loss(hidden, head, *teacher, batch, aggregation=AGGREGATION, **options)
    if not from_hidden:
        stats = log_probs_from_hidden(
            hidden, head, batch.targets, parallel=parallel, entropy="none"
        )
    if kind == "sft" and from_hidden:
        return loss_from_hidden(
            hidden, head, batch, SFT(aggregation=AGGREGATION), **options, **of_head
        )
    if kind == "sft":
        return loss_from_stats(stats, batch, SFT(aggregation=AGGREGATION), **options)
    config = PolicyLossConfig(loss_named(kind), aggregation=AGGREGATION)
    if config.loss.selects is not None:
        batch = dataclasses.replace(batch, extras={"selected": jnp.zeros(batch.loss_mask.shape)})
    if from_hidden:
        return policy_loss_from_hidden(hidden, head, batch, config, **options, **of_head)
    return policy_loss(stats, batch, config, **options)


def program(kind: str, way: str):
    """A function of (inputs, batch, normalizer), all stacked: loss, gradient, bits of the rules."""
    options = {"from_hidden": True, "memory": None} | WAYS[way]
    parallel = make_parallel_mesh(options.pop("mesh")) if "mesh" in options else None
    names = ("values",) if kind == "value" else ("hidden", "kernel", "bias")

    def part(params, given):
        place, inputs, batch, normalizer = given
        own = (
            inputs | {"kernel": params["kernel"], "bias": params["bias"]}
            if kind != "value"
            else dict(inputs)
        )
        for name in {"hidden", "values"} & set(names):
            own[name] = jnp.where(
                place.reshape(-1, *(1,) * (inputs[name].ndim)) > 0, params[name], 0
            ).sum(axis=0)
        return loss_of(kind, own, batch, normalizer, parallel, **options)

    def run(inputs, batch, normalizer):
        params = {name: inputs[name] for name in names}
        rest = {name: inputs[name] for name in ("hidden", "values")}
        given = jnp.eye(K), rest, batch, normalizer
        if way == "micro-batches":
            (loss, found), gradient = accumulate_gradients(part, given)(params)
        else:  # the broken micro-batch by itself
            last = jax.tree.map(lambda x: x[-1], given)
            (loss, found), gradient = jax.value_and_grad(part, has_aux=True)(params, last)
        bits = [x.value for name, x in found.items() if name.endswith("broken_rules")]
        return loss, gradient, bits[0]

    return run


def ways(kind: str) -> list[str]:
    if kind == "value":
        return ["statistics", "micro-batches", "mesh, statistics"]
    if kind in ("mtp", "distillation"):
        return ["two passes", "micro-batches", "mesh"]
    if kind == "sft" or loss_named(kind).token_local:
        return [*WAYS]
    return [way for way in WAYS if way != "one pass"]


CASES = [
    (kind, way) for kind in (*LOSSES, "sft", "value", "mtp", "distillation") for way in ways(kind)
]
# by day each path of one policy loss of each kind, and a path of each other one
WHOLE = ("reinforce", "sft", "value", "mtp", "distillation")
BY_DAY = sampled(
    CASES, lambda i, case: case[0] in WHOLE or case[1] == ("one pass", "mesh", "two passes")[i % 3]
)


@pytest.mark.every(16)
@pytest.mark.parametrize(("kind", "way"), BY_DAY)
def test_the_loss_is_nan(kind, way):
    """Before: from hidden states in one pass, a target in a column of bias -inf gave -0.399, or
    inf, and bit 32.
    """
    run = quick_jit(program(kind, way))
    of = kind if kind in EVERY else "policy"
    normalizer = MTP_NORMALIZERS if kind == "mtp" else NORMALIZER
    loss, gradient, bits = run(INPUTS, BATCH, normalizer)
    assert np.isfinite(loss)
    assert int(bits) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    for rule, (losses, changed) in RULES.items():
        if of not in losses:
            continue
        its = normalizer
        if "normalizer_of" in changed:
            smaller = changed["normalizer_of"]
            of_depths = Normalizer.of(MTP(1, aggregation=AGGREGATION), smaller)[0]
            its = of_depths if kind == "mtp" else normalizer_of(smaller, AGGREGATION)
            if way == "micro-batches":  # each micro-batch has fewer tokens than this step
                its = dataclasses.replace(its, tokens=jnp.ones(K))
            else:
                its = dataclasses.replace(its, tokens=jnp.minimum(its.tokens, 1))
        loss, gradient, bits = run(changed.get("inputs", INPUTS), changed.get("batch", BATCH), its)
        assert np.isnan(loss), f"{rule}: got {loss}"
        assert any(np.isnan(x).any() for x in jax.tree.leaves(gradient)), (
            f"{rule}: a gradient without NaN"
        )
        explained = explain_broken_rules(bits)
        name = (
            "loss_mask_values"
            if kind == "mtp" and rule.startswith("loss_mask_on")
            else rule.split(",")[0]
        )
        assert any(line.startswith(f"{name}: expected ") for line in explained), (rule, explained)


def test_the_ways_are_what_they_say():
    for way in ("one pass", "two passes"):
        traced = jax.make_jaxpr(program("reinforce", way))(INPUTS, BATCH, NORMALIZER)
        assert notes(traced)[0].startswith(way), notes(traced)


def test_a_step_without_a_loss_token_too():
    """There is nothing to sum, so a NaN weight alone would not show.

    Before: in one pass 0, with bit 8.
    """
    batch = jax.tree.map(
        lambda x: x[0], dataclasses.replace(BATCH, loss_mask=np.zeros_like(BATCH.loss_mask))
    )
    batch = dataclasses.replace(
        batch, segment_ids=np.where(batch.positions == 3, 9, batch.segment_ids)
    )
    hidden = INPUTS["hidden"][0]
    head = Head(INPUTS["kernel"])
    batch = dataclasses.replace(batch, micro_batches=None)
    for memory in (2**30, 18_000):

        def of(hidden, memory=memory):
            return loss_from_hidden(hidden, head, batch, SFT(), memory=memory)

        (loss, found), _ = quick_jit(jax.value_and_grad(of, has_aux=True))(hidden)
        assert np.isnan(loss)
        assert "segment_ids_range" in explain_broken_rules(found["broken_rules"].value)[0]


@pytest.mark.parametrize(
    "rule", [rule for rule, (_, changed) in RULES.items() if "batch" in changed]
)
def test_the_host_refuses_it(rule):
    with pytest.raises(ValueError, match=r": got .* at row"):
        RULES[rule][1]["batch"].validate(V)
    BATCH.validate(V)


def test_every_rule_that_losses_check_has_a_case():
    # see test_preference, test_tree_losses and the next test
    elsewhere = {"pairs", "parents", "loss_without_sample", "own_ids_of_rollouts"}
    assert {rule.split(",")[0] for rule in RULES} | elsewhere >= {
        rule.name for rule in STRUCTURE
    } - {"normalizer"}


@pytest.mark.parametrize("way", ["one batch", "micro-batches"])
def test_two_samples_of_one_id_are_no_rollout(way):
    """Before: one rollout with the tokens of both.

    On the host `from_samples` and `validate` refuse them.
    """
    samples = [
        Sample([1, 2, 3], 1, sample_id=i, advantages=[1.0, 2.0], old_log_probs=[-1.0, -2.0])
        for i in range(2)
    ]
    config = PolicyLossConfig(PPO(), aggregation="rollout_mean")
    batch = RolloutBatch.from_samples(samples, row_length=3, rows=1, micro_batches=2)
    if way == "one batch":
        batch = dataclasses.replace(
            jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch), micro_batches=None
        )

    @jax.jit
    def run(batch):
        normalizer = Normalizer.of(config, batch)
        if way == "micro-batches":
            batch, normalizer = jax.tree.map(lambda x: x[0], (batch, normalizer))
        stats = TokenStats(jnp.full(batch.loss_mask.shape, -1.0))
        loss, found = policy_loss(stats, batch, config, normalizer=normalizer)
        return loss, found["broken_rules"].value

    def loss_and_rules(batch):
        loss, broken = run(batch)
        return loss, explain_broken_rules(broken)

    twice = dataclasses.replace(batch, sample_ids=np.zeros_like(batch.sample_ids))
    loss, rules = loss_and_rules(twice)
    assert np.isnan(loss)
    assert rules[0].startswith("own_ids_of_rollouts: expected an id of its own")
    for sound in (batch, dataclasses.replace(twice, rollout_ids=twice.sample_ids)):
        loss, rules = loss_and_rules(sound)
        assert np.isfinite(loss)
        assert rules == []


def test_the_first_three_are_named():
    """As one number that f32 holds exactly, on the host, as a metric and merged."""
    numbers = (1, 4, 40, 60, len(ON_DEVICE))
    for counts in (
        [0, 0, 0, 0, 0],
        [0, 2, 0, 1, 0],
        [1, 0, 3, 1, 0],
        [1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ):
        loss = jnp.float32(np.nan if counts[-1] else 0)  # the last rule is that it is finite
        metric = Broken(numbers[:-1], jnp.float32(counts[:-1])).metric(loss)
        found = merge_metrics({"it": metric}, {"it": metric})["it"].value
        assert float(np.float32(found)) == int(found) < 2**24
        names = [ON_DEVICE[n - 1].name for n, c in zip(numbers, counts, strict=True) if c][:3]
        for value in (found, int(found), float(found), np.float32(found)):
            assert [line.split(":")[0] for line in explain_broken_rules(value)] == names
    assert len(ON_DEVICE) < 1 << 8
    assert len({rule.name for rule in ON_DEVICE}) == len(ON_DEVICE)


def test_reading_the_number_compiles_one_program():
    """Outside of a `jit` it was a program for each operation."""
    metric = Broken((1, 4, 60), jnp.zeros(3)).metric(jnp.float32(0))
    assert compilations(lambda: metric.value) <= 1


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "broken_rules: got -1, expected an integer that names rules 1 to"),
        (0.5, ValueError, "broken_rules: got 0.5, expected an integer"),
        (np.nan, ValueError, "broken_rules: got nan, expected an integer"),
        (255, ValueError, "broken_rules: got 255, expected an integer"),
        (2**24, ValueError, "broken_rules: got 1.67772e+07, expected an integer"),
        (jnp.zeros(2), TypeError, r"broken_rules: got shape \(2,\), expected a number"),
        ("2", TypeError, "broken_rules: got str, expected a number, such as"),
        (
            Broken((1,), jnp.zeros(1)).metric(jnp.float32(0)),
            TypeError,
            "broken_rules: got Composite, expected a number, such as",
        ),
    ],
)
def test_what_is_no_such_number(value, error, message):
    with pytest.raises(error, match=message.replace("+", r"\+")):
        explain_broken_rules(value)
