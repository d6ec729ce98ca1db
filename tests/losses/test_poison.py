"""Each input of each loss is spoilt in turn: the loss is NaN and the rule names the input, or
nothing changes at all.

An input is a float array of the batch, another array of the call, or a number that a schedule may
trace. A loss is compiled once, with all its numbers traced; the data are spoilt.
"""

import dataclasses
from functools import partial

import chex
import jax
import numpy as np
import pytest
from policy_steps import loss_named, quick_jit

from jaxppo import (
    KL,
    SFT,
    Head,
    LoRA,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    explain_broken_rules,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.contrib.a2po import A2PO
from jaxppo.contrib.draft import Draft, draft_loss
from jaxppo.contrib.real import REAL
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.losses import Part, ReferenceKL, TopKDistillation, preference
from jaxppo.losses.distillation import distillation_loss
from jaxppo.losses.mtp import MTP, mtp_loss
from jaxppo.policy_losses import BY_NAME

R, T, H, V, K = 2, 12, 4, 20, 3
RNG = np.random.default_rng(5)
OF_TOKENS = (
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
    "loss_weights",
)
OF_K_IDS = {"id_log_probs", "teacher_log_probs", "sampled"}
LOG_PROBS = {"log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", *OF_K_IDS}
LOG_PROBS |= {"teacher_target_log_probs"}


def make_batch() -> RolloutBatch:
    """Four samples, which are two pairs."""
    samples = []
    for i in range(4):
        values = {name: -RNG.uniform(0.5, 2, size=4) for name in OF_TOKENS}
        values["loss_weights"] = -values["loss_weights"]
        tokens = RNG.integers(0, V, 6)
        if i % 2:
            tokens[:2] = samples[-1].tokens[:2]  # the two of a pair have one prompt
        samples.append(
            Sample(tokens, response_start=2, group_id=i // 2, reward=float(i % 2), **values)
        )
    return RolloutBatch.from_samples(samples, row_length=T, rows=R, num_segments=2)


BATCH = make_batch()
FLOATS = ("loss_mask", *OF_TOKENS, "rewards")
AT = tuple(int(i) for i in np.argwhere((BATCH.loss_mask > 0) & (BATCH.positions == 3))[-1])


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ids_of(columns=V):
    return (
        np.stack([RNG.permutation(columns)[:K] for _ in range(R * T)])
        .reshape(R, T, K)
        .astype(np.int32)
    )


def log_probs_of(*shape):
    """Log-probs of which K have less mass than 1."""
    return -RNG.uniform(2.5, 4, size=shape).astype(np.float32)


STATS = {
    "log_probs": log_probs_of(R, T),
    "entropy": np.abs(normal(R, T)),
    "log_z": normal(R, T),
    "mean_logit": normal(R, T),
}
OF_IDS = {"id_log_probs": log_probs_of(R, T, K), "teacher_log_probs": log_probs_of(R, T, K)}
STATES = {"hidden": normal(R, T, H), "head": normal(H, V)}
TEACHER = {"teacher_hidden": normal(R, T, H), "teacher_head": normal(H, V)}
IDS = ids_of()


def stats_of(x):
    return TokenStats(
        x["log_probs"], x["entropy"], x["log_z"], x["mean_logit"], entropy_mode="bonus"
    )


def numbers_of(loss) -> dict[str, float]:
    """The numbers of a loss or a config by field."""
    fields = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
    return {name: float(x) for name, x in fields.items() if type(x) in (int, float)}


def with_numbers(loss, x):
    return dataclasses.replace(loss, **{name: x[name] for name in numbers_of(loss)})


def aggregated(x, batch, make, **options):
    """The normalizer of the step, with the numbers of x added to its own, which are 0 in the
    sound case.
    """
    found = make(batch, **options)
    return jax.tree.map(lambda y: y + x["denominators"], found)


def of_policy(loss, **options):
    """A policy loss from statistics, and its inputs."""
    config = PolicyLossConfig(loss, **{"entropy_coef": 0.1, "kl": KL(0.1)} | options)
    inputs = STATS | numbers_of(loss) | {"entropy_coef": 0.1, "kl.coef": 0.1, "denominators": 0.0}
    if loss.selects:
        inputs["selected"] = np.ones((R, T), np.float32)

    def call(x, batch):
        its = dataclasses.replace(config, loss=with_numbers(loss, x))
        its = dataclasses.replace(
            its, entropy_coef=x["entropy_coef"], kl=dataclasses.replace(its.kl, coef=x["kl.coef"])
        )
        if its.off_policy is not None:
            its = dataclasses.replace(
                its, off_policy=dataclasses.replace(its.off_policy, opsm_delta=x["opsm_delta"])
            )
        its = dataclasses.replace(its, aggregation_norm=x.get("aggregation_norm"))
        if "selected" in x:
            batch = dataclasses.replace(batch, extras={"selected": x["selected"]})
        return policy_loss(
            stats_of(x), batch, its, normalizer=aggregated(x, batch, partial(Normalizer.of, its))
        )

    if config.off_policy is not None:
        inputs["opsm_delta"] = 0.1
    if config.aggregation_norm is not None:
        inputs["aggregation_norm"] = config.aggregation_norm
    return call, inputs


def from_hidden(x, batch):
    head = Head(x["head"], x["bias"], lora=LoRA(x["lora.a"], x["lora.b"], 0.5))
    options = {
        "temperature": x["temperature"],
        "adapter_ids": x["adapter_ids"],
        "nucleus_ids": x["nucleus_ids"],
    }
    return policy_loss_from_hidden(x["hidden"], head, batch, PolicyLossConfig(), **options)


def joint(x, batch):
    parts = {
        "policy": Part(PolicyLossConfig(), coef=x["part.coef"]),
        "written": Part(
            SFT(label_smoothing=x["label_smoothing"], z_loss=x["z_loss"]),
            mask="mask",
            weights="weights",
        ),
        "reference": Part(ReferenceKL()),
        "teacher": Part(TopKDistillation("mixed_kl", beta=x["beta"])),
    }
    extras = {name: x[name] for name in ("mask", "weights", "teacher_log_probs")} | {
        "teacher_ids": x["ids"]
    }
    batch = dataclasses.replace(batch, extras=extras)
    normalizer = aggregated(x, batch, partial(Normalizer.of, parts))
    return loss_from_hidden(
        x["hidden"], x["head"], batch, parts, normalizer=normalizer, temperature=x["temperature"]
    )


def top_k(divergence, x, batch):
    stats = TokenStats(x["log_probs"], id_log_probs=x["id_log_probs"], ids=IDS)
    return loss_from_stats(
        stats,
        dataclasses.replace(
            batch, extras={"teacher_ids": x["ids"], "teacher_log_probs": x["teacher_log_probs"]}
        ),
        TopKDistillation(divergence=divergence, beta=x["beta"]),
    )


def sampled_tail(x, batch):
    stats = TokenStats(x["log_probs"], id_log_probs=x["id_log_probs"], ids=IDS)
    names = ("teacher_log_probs", "teacher_target_log_probs")
    batch = dataclasses.replace(
        batch, extras={"teacher_ids": x["ids"]} | {name: x[name] for name in names}
    )
    return loss_from_stats(stats, batch, TopKDistillation("reverse_kl", tail="sampled"))


def centring(x, batch):
    stats = TokenStats(x["log_probs"], id_log_probs=x["id_log_probs"], ids=IDS)
    config = PolicyLossConfig(with_numbers(loss_named("cispo"), x), ratio_to="rollout")
    return loss_from_stats(
        stats,
        dataclasses.replace(
            batch, extras={"sampler_ids": x["ids"], "sampler_log_probs": x["sampled"]}
        ),
        ScoreCentering(config),
    )


def of_preference(loss):
    def call(x, batch):
        batch = dataclasses.replace(batch, loss_weights=None)
        if isinstance(loss, REAL):
            batch = dataclasses.replace(batch, rollout_ids=batch.group_ids)
        its = with_numbers(loss, x)
        if isinstance(loss, preference.BradleyTerry):
            return loss_from_stats(x["scores"], batch, its)
        if "hidden" in x:
            return loss_from_hidden(
                x["hidden"], x["head"], batch, its, temperature=x["temperature"]
            )
        return loss_from_stats(TokenStats(x["log_probs"]), batch, its)

    return call


def value(x, batch):
    return loss_from_stats(
        x["new_values"],
        batch,
        Value(clip=x["clip"], factor=x["factor"], huber_delta=x["huber_delta"]),
    )


SCHEDULES = {"temperature": np.float32(0.9)}
TOP_K = STATS | OF_IDS | {"ids": IDS}
ADAPTERS = {
    "bias": normal(V),
    "lora.a": normal(2, H, 2),
    "lora.b": normal(2, 2, V),
    "adapter_ids": np.array([0, -1]),
}
CORRECTED = OffPolicyConfig(
    weights="token",
    batch_normalize=True,
    rejections=(Rejection("token_k1", 0.01, 100.0),),
    opsm_delta=0.1,
)
PREFERENCES = {
    "dpo": preference.DPO(label_smoothing=0.1, nll_coef=0.1),
    "ipo": preference.IPO(),
    "simpo": preference.SimPO(),
    "orpo": preference.ORPO(),
    "kto": preference.KTO(reference_point=0.3),
    "a2po": A2PO(beta=0.3),
    "real": REAL(),
}
CASES = {
    **{f"policy, {name}": of_policy(loss_named(name)) for name in sorted(BY_NAME)},
    "policy, dual clip": of_policy(loss_named("ppo", dual_clip=3.0)),
    "policy, gspo's dual clip": of_policy(loss_named("gspo", dual_clip=3.0)),
    "policy, over the sampler": of_policy(loss_named("ppo"), ratio_to="rollout"),
    "policy, corrected": of_policy(
        loss_named("ppo"), off_policy=CORRECTED, aggregation="sequence_mean_token_mean"
    ),
    "policy, constant length": of_policy(
        loss_named("ppo"), aggregation="sequence_mean_token_sum_norm", aggregation_norm=8.0
    ),
    "policy, metrics of the reference": (
        lambda x, batch: policy_loss(stats_of(x), batch, PolicyLossConfig(kl=KL(0.0))),
        STATS,
    ),
    "policy from hidden": (from_hidden, STATES | ADAPTERS | SCHEDULES | {"nucleus_ids": IDS}),
    "sft": (
        lambda x, batch: loss_from_stats(
            stats_of(x), batch, SFT(label_smoothing=x["label_smoothing"], z_loss=x["z_loss"])
        ),
        STATS | {"label_smoothing": 0.1, "z_loss": 0.1},
    ),
    "sft from hidden": (
        lambda x, batch: loss_from_hidden(
            x["hidden"], x["head"], batch, SFT(), temperature=x["temperature"]
        ),
        STATES | {"temperature": np.ones((R, T), np.float32)},
    ),
    "value": (value, {"new_values": normal(R, T), "clip": 0.2, "factor": 0.5, "huber_delta": 1.0}),
    "value, unclipped": (
        lambda x, batch: loss_from_stats(x["new_values"], batch, Value(clip=None)),
        {"new_values": normal(R, T)},
    ),
    "mtp": (
        lambda x, batch: mtp_loss(
            [x["hidden"]],
            x["head"],
            batch,
            MTP(coef=x["coef"]),
            temperature=x["temperature"],
            normalizers=aggregated(x, batch, partial(Normalizer.of, MTP(1))),
        ),
        STATES | SCHEDULES | {"coef": 0.1, "denominators": 0.0},
    ),
    "draft": (
        lambda x, batch: draft_loss(
            [x["hidden"]],
            x["head"],
            x["teacher_hidden"],
            x["teacher_head"],
            batch,
            Draft(objective="likelihood", eta=x["eta"], coef=x["coef"]),
            temperature=x["temperature"],
            draft_ids=x["draft_ids"],
            normalizers=aggregated(x, batch, partial(Normalizer.of, Draft(1))),
        ),
        STATES
        | TEACHER
        | SCHEDULES
        | {
            "eta": 3.0,
            "coef": 0.1,
            "denominators": 0.0,
            "draft_ids": np.arange(V)[::-1],
        },
    ),
    "distillation": (
        lambda x, batch: distillation_loss(
            x["hidden"],
            x["head"],
            x["teacher_hidden"],
            x["teacher_head"],
            batch,
            temperature=x["temperature"],
        ),
        STATES | TEACHER | SCHEDULES,
    ),
    "top-k": (partial(top_k, "mixed_kl"), TOP_K | {"beta": 0.3}),
    "top-k, between": (partial(top_k, "jensen_shannon"), TOP_K | {"beta": 0.3}),
    "top-k from hidden": (
        lambda x, batch: loss_from_hidden(
            x["hidden"],
            x["head"],
            dataclasses.replace(
                batch, extras={"teacher_ids": x["ids"], "teacher_log_probs": x["teacher_log_probs"]}
            ),
            TopKDistillation(),
            temperature=x["temperature"],
        ),
        STATES | SCHEDULES | {"ids": IDS, "teacher_log_probs": OF_IDS["teacher_log_probs"]},
    ),
    "joint": (
        joint,
        STATES
        | SCHEDULES
        | {"ids": IDS, "teacher_log_probs": OF_IDS["teacher_log_probs"], "mask": BATCH.loss_mask}
        | {
            "weights": np.ones((R, T), np.float32),
            "part.coef": 0.7,
            "label_smoothing": 0.1,
            "z_loss": 0.1,
        }
        | {"beta": 0.3, "denominators": 0.0},
    ),
    "score centring": (
        centring,
        STATS
        | numbers_of(loss_named("cispo"))
        | {
            "ids": IDS,
            "id_log_probs": OF_IDS["id_log_probs"],
            "sampled": OF_IDS["teacher_log_probs"],
        },
    ),
    **{
        f"preference, {name}": (of_preference(x), STATS | numbers_of(x))
        for name, x in PREFERENCES.items()
    },
    "preference from hidden": (
        of_preference(PREFERENCES["dpo"]),
        STATES | SCHEDULES | numbers_of(PREFERENCES["dpo"]),
    ),
    "reward model": (
        of_preference(preference.BradleyTerry(margin=0.5, centring=0.1)),
        {"scores": normal(R, T), "margin": 0.5, "centring": 0.1},
    ),
    "top-k, sampled tail": (sampled_tail, TOP_K | {"teacher_target_log_probs": log_probs_of(R, T)}),
}
# the word of an explanation that stands for an input: an input of a model is found by what the
# model returns
WORDS = {
    "new_values": "values",
    "lora.a": "heads",
    "lora.b": "heads",
    "bias": "heads",
    "head": "heads",
    "hidden": "hidden",
    "teacher_hidden": "hidden",
    "teacher_head": "heads",
    "opsm_delta": "off_policy.opsm_delta",
    "sampled": "rollout_log_probs",
    "mask": "loss_mask",
    "weights": "loss_weights",
    "denominators": "normalizer",
}
# a probability of 0: the student's beside a teacher who has the token, or the reverse, is an
# infinite divergence


def poisons(name: str, x, of_stats: bool) -> list[float]:
    """Values for the entry at the chosen token of an input."""
    # outside the vocabulary, a second time; of another id the statistics do not know
    if name == "ids":
        return [V, -2, int(x[*AT, 0]), *([int((x[*AT].max() + 1) % V)] if of_stats else [])]
    if name == "draft_ids":
        return [V, -2, int(x[1])]
    if name in ("nucleus_ids", "adapter_ids"):
        return [V, -2]
    values = [np.nan, np.inf, -np.inf] + [0.5] * (
        name in LOG_PROBS or name in ("loss_mask", "mask")
    )
    return values + [7.0, -1.0] * (name == "selected")


def refused(case: str, name: str) -> list[float]:
    """The values of a number, out of some, that the call refuses where they are known: as traced
    ones they are NaN.
    """
    call, inputs = CASES[case]
    if name == "denominators" or np.ndim(inputs[name]):
        return []
    known = {k: float(x) if np.ndim(x) == 0 else x for k, x in inputs.items()}

    def raises(value: float) -> bool:
        try:
            jax.eval_shape(partial(call, known | {name: value}), BATCH)
        except ValueError:
            return True
        return False

    return [value for value in (-1.0, 0.0, 0.5, 1.0, 2.0) if raises(value)]


def place_of(name: str, x) -> tuple[int, ...]:
    """The entry to spoil: at the chosen loss token, of its row, sequence or target."""
    row, position = AT
    x = np.asarray(x)
    sequence = int(BATCH.segment_ids[AT]) - 1
    if name == "scores":
        return row, int(np.argwhere(BATCH.segment_ids[row] == sequence + 1)[-1, 0])
    if name in ("hidden", "teacher_hidden"):  # a draft reads its teacher one place later
        return row, position + (name != "hidden"), 0
    if name in ("head", "teacher_head"):
        return 0, int(BATCH.targets[AT])
    if name == "draft_ids":
        return (0,)
    if name == "bias":
        return (int(BATCH.targets[AT]),)
    if name in ("lora.a", "lora.b"):
        return (0, 0, 0) if name == "lora.a" else (0, 0, int(BATCH.targets[AT]))
    if name == "rewards":
        return row, sequence
    if name == "adapter_ids":
        return (row,)
    return (*AT, 1) if x.ndim == 3 else AT if x.ndim == 2 else ()


def spoilt(name: str, x, poison):
    x = np.array(
        x,
        (
            np.result_type(np.asarray(x).dtype, np.float32)
            if np.asarray(x).dtype.kind == "f"
            else None
        ),
    )
    x[place_of(name, x)] = poison
    return x


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


ONLY_IN_METRICS = {
    "policy, ppo": {"rollout_log_probs", "values", "returns"},
    "policy, over the sampler": {"old_log_probs"},
    "policy, metrics of the reference": {"ref_log_probs", "rollout_log_probs", "entropy"},
    "policy from hidden": {"rollout_log_probs", "ref_log_probs"},
    "value": {"advantages", "old_log_probs", "rollout_log_probs"},
    "value, unclipped": {"values"},
    "top-k": {"log_probs", "advantages"},
    "score centring": {"log_probs", "old_log_probs", "rollout_log_probs"},
    "preference, simpo": {"ref_log_probs"},
}


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES)
def test_each_input_spoilt(case):
    call, inputs = CASES[case]
    floats = {
        name: np.asarray(x, np.float32)
        for name, x in inputs.items()
        if np.asarray(x).dtype.kind == "f"
    }
    whole = {name: x for name, x in inputs.items() if name not in floats}
    of_batch = {name: np.asarray(getattr(BATCH, name), np.float32) for name in FLOATS}
    learnt = [
        x
        for x in ("log_probs", "id_log_probs", "hidden", "head", "new_values", "scores")
        if x in floats
    ]

    @quick_jit
    def run(given, of_batch):
        def loss_of(learnt_ones):
            return call(given | learnt_ones, dataclasses.replace(BATCH, **of_batch))

        (loss, found), gradient = jax.value_and_grad(loss_of, has_aux=True)(
            {name: given[name] for name in learnt}
        )
        return (
            loss,
            gradient,
            {name: x.value for name, x in found.items() if name.endswith("broken_rules")},
        )

    sound = run(floats | whole, of_batch)
    assert all(int(x) == 0 for x in sound[2].values())
    chex.assert_tree_all_finite(sound[:2])
    read = set()
    for name, x in (inputs | of_batch).items():
        beyond = refused(case, name) if name in inputs else []
        for poison in [*poisons(name, x, "id_log_probs" in inputs), *beyond]:
            new = {name: spoilt(name, x, poison)}
            given = (
                (floats | whole, of_batch | new)
                if name in of_batch
                else (floats | whole | new, of_batch)
            )
            loss, gradient, broken = run(*given)
            if same((loss, gradient), sound[:2]) and not any(broken.values()):
                continue
            read.add(name)
            lines = [line for x in broken.values() for line in explain_broken_rules(x)]
            if name in OF_K_IDS and poison == -np.inf and np.isfinite(loss):
                assert lines == [], (name, poison, lines)
                continue
            if name == "bias" and poison == -np.inf and np.isfinite(loss):
                continue  # a column that is masked
            assert np.isnan(loss), (name, poison, loss)
            assert any(np.isnan(x).any() for x in jax.tree.leaves(gradient)), (name, poison)
            word = WORDS.get(name, name)
            assert any(word in line for line in lines), (name, poison, lines)
            assert not any(line.startswith("another_number") for line in lines), (name, poison)
    assert set(inputs) - read - set(STATS) == set()
    assert not read & ONLY_IN_METRICS.get(case, set())
