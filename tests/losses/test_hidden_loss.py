"""policy_loss_from_hidden: one pass or two, the same loss, gradients and metrics."""

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from compiled_flops import compiled_flops
from head_cases import tiles_of
from hidden_loss_cases import (
    ADAPTERS,
    BATCH,
    HIDDEN,
    KERNEL,
    KEYS,
    ONE_PASS,
    TWO_PASSES,
    H,
    R,
    T,
    V,
    bonus_and_kl,
    make_batch,
    normal,
    step,
)
from jax.sharding import PartitionSpec as P
from tables import sampled

from jaxppo import (
    KL,
    PPO,
    SFT,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.policy_losses import BY_NAME, ClipCov, PolicyLoss, by_name
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.audit.program import hang_risks, notes
from sharding.testing import assert_trees_close, factorings


def local_losses():
    return sorted(
        name for name, loss in BY_NAME.items() if loss().token_local and loss.selects is None
    )


@functools.cache
def compiled(config, memory, mesh):
    """`step` of hidden states, kernel and batch, compiled once for the tests that share it."""
    parallel = mesh and make_parallel_mesh(mesh)
    return jax.jit(functools.partial(step, parallel, config=config, memory=memory))


@pytest.mark.every(9)
@pytest.mark.parametrize("loss", local_losses())
def test_one_pass_is_two_passes(loss):
    config = PolicyLossConfig(by_name(loss), kl=KL(0.1), entropy_coef=0.01)
    one = compiled(config, ONE_PASS, None)(HIDDEN, KERNEL, BATCH)
    two = compiled(config, TWO_PASSES, None)(HIDDEN, KERNEL, BATCH)
    assert_trees_close(one, two, rtol=1e-5, atol=2e-6)


OF_SEQUENCES = {
    "a divergence by sequence": PolicyLossConfig(
        PPO(clip_high=0.28), kl=KL(0.1, importance="sequence")
    ),
    "a constant weight by sequence": PolicyLossConfig(by_name("vespo")),
    "a ratio by sequence": PolicyLossConfig(by_name("cispo", level="sequence")),
}


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "config", [bonus_and_kl(), *OF_SEQUENCES.values()], ids=["by token", *OF_SEQUENCES]
)
def test_from_hidden_is_the_two_public_functions(config):

    def loss(hidden, kernel):
        where = BATCH.loss_mask > 0
        stats = log_probs_from_hidden(
            hidden, kernel, BATCH.targets, temperature=0.8, entropy="bonus", where=where
        )
        return policy_loss(stats, BATCH, config)

    (value, found), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        HIDDEN, KERNEL
    )
    gradients = *gradients, None
    for budget in (ONE_PASS, TWO_PASSES):
        got = compiled(config, budget, None)(HIDDEN, KERNEL, BATCH)
        assert_trees_close(got, (value, finalize_metrics(found), gradients), rtol=1e-5, atol=2e-6)


MESHES = ["dp=8,cp=1,tp=1", "dp=1,cp=8,tp=1", "dp=1,cp=1,tp=8", "dp=2,cp=2,tp=2"]


@pytest.mark.every(11)
@pytest.mark.parametrize(
    "mesh", [m if m in MESHES else pytest.param(m, marks=pytest.mark.nightly) for m in factorings()]
)
def test_one_pass_on_any_mesh(mesh):
    found = compiled(bonus_and_kl(), ONE_PASS, mesh)(HIDDEN, KERNEL, BATCH)
    alone = compiled(bonus_and_kl(), ONE_PASS, None)(HIDDEN, KERNEL, BATCH)
    # sums of up to 512 tokens in another order
    assert_trees_close(found, alone, rtol=2e-5, atol=3e-6)


def test_one_pass_on_an_explicit_mesh_with_many_blocks_and_options():
    nucleus = jax.random.randint(KEYS[9], (R, T, 5), -1, V - 2)
    options = {
        "nucleus_ids": nucleus,
        "softcap": 3.0,
        "bias": normal(0, V),
        "vocab_size": V - 2,
        "layout": "vh",
    }
    targets = jnp.minimum(BATCH.targets, V - 3)
    batch = dataclasses.replace(BATCH, targets=targets)

    def run(parallel, memory):
        fn = functools.partial(
            step, parallel, batch=batch, config=bonus_and_kl(), memory=memory, **options
        )
        return jax.jit(fn).trace(HIDDEN, KERNEL.T)

    def result_of(traced):
        return traced.lower().compile()(HIDDEN, KERNEL.T)

    explicit = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=True)
    with tiles_of("groups"):
        alone = run(None, ONE_PASS)
        assert notes(alone.jaxpr)[0].endswith("groups of 48 tokens")
        one = result_of(alone)
        on_mesh = result_of(run(explicit, ONE_PASS))
    assert_trees_close(on_mesh, one, rtol=2e-5, atol=3e-6)
    two = result_of(run(None, TWO_PASSES))
    assert_trees_close(one, two, rtol=1e-5, atol=2e-6)


@dataclasses.dataclass(frozen=True)
class Squared(PolicyLoss):
    """A user's loss, with a hyperparameter."""

    strength: float = 1.0
    token_local: ClassVar[bool] = True

    def __call__(self, log_probs, old_log_probs, advantages, **_):
        off = jnp.abs(log_probs - old_log_probs)
        return self.strength * off**2 * jnp.abs(advantages), {"off": off}


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_a_loss_of_the_users_own_with_traced_hyperparameters(mesh):
    parallel = mesh and make_parallel_mesh(mesh)

    @functools.partial(jax.jit, static_argnames="budget")
    def at(hidden, kernel, strength, entropy_coef, budget):
        config = PolicyLossConfig(Squared(strength), entropy_coef=entropy_coef)
        return step(parallel, hidden, kernel, config=config, memory=budget)

    run = functools.partial(at, HIDDEN, KERNEL)
    one = run(2.0, 0.1, ONE_PASS)
    assert_trees_close(one, run(2.0, 0.1, TWO_PASSES), 1e-5, 2e-6)
    plain = compiled(PolicyLossConfig(Squared(2.0), entropy_coef=0.1), ONE_PASS, None)
    assert_trees_close(one, plain(HIDDEN, KERNEL, BATCH), 1e-5, 2e-6)
    assert_trees_close(run(0.0, 0.0, ONE_PASS)[2][:2], (0 * HIDDEN, 0 * KERNEL))


@functools.cache
def with_adapters_merged(layout):
    kernel = KERNEL if layout == "hv" else KERNEL.T

    def merged(hidden, kernel, lora):
        whole = (kernel if layout == "hv" else kernel.T) + 0.5 * jnp.matmul(
            *lora, precision="highest"
        )
        options = {"temperature": 0.8, "memory": TWO_PASSES}
        return policy_loss_from_hidden(hidden, whole, BATCH, bonus_and_kl(), **options)

    (value, found), gradients = jax.jit(jax.value_and_grad(merged, (0, 1, 2), has_aux=True))(
        HIDDEN, kernel, ADAPTERS
    )
    return kernel, (value, finalize_metrics(found), gradients)


LORA = itertools.product([None, *MESHES], [ONE_PASS, TWO_PASSES], ["hv", "vh"])


@pytest.mark.every(7)
@pytest.mark.parametrize(
    ("mesh", "budget", "layout"), sampled(LORA, lambda i, _: (i // 4 + i // 2 + i) % 2 == 0)
)
def test_lora(mesh, budget, layout):
    """Equal to a kernel with the product of the adapters added: value, metrics, and gradients of
    both adapters.
    """
    config = bonus_and_kl()
    parallel = mesh and make_parallel_mesh(mesh)
    kernel, expected = with_adapters_merged(layout)

    def run(h, k, lora):
        return step(parallel, h, k, config=config, memory=budget, lora=lora, layout=layout)

    got = jax.jit(run)(HIDDEN, kernel, ADAPTERS)
    assert_trees_close(got, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("budget", [ONE_PASS, TWO_PASSES])
def test_a_frozen_kernel_beneath_a_lora_costs_no_product(budget):

    def loss(hidden, lora):
        head = Head(KERNEL, lora=LoRA(*lora, scale=1.0))
        options = {"memory": budget, "follow_mask": False}
        return policy_loss_from_hidden(hidden, head, BATCH, bonus_and_kl(), **options)[0]

    found = audit(jax.grad(loss, (0, 1)), HIDDEN, ADAPTERS)
    products = 2 if budget == ONE_PASS else 3  # logits, again in two passes, and dhidden
    low = 2 * R * T * 3 * (V * (2 * products - 1) + 3 * H)  # those of rank 3
    assert compiled_flops(found.text) == pytest.approx(products * 2 * R * T * H * V + low, rel=0.1)


@pytest.mark.every(2)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_sft_in_one_pass(aggregation):
    def two(hidden, kernel):
        stats = log_probs_from_hidden(
            hidden, kernel, BATCH.targets, entropy="metric", where=BATCH.loss_mask > 0
        )
        return loss_from_stats(stats, BATCH, SFT(aggregation=aggregation))

    def one(hidden, kernel):
        return loss_from_hidden(
            hidden, kernel, BATCH, SFT(aggregation=aggregation), memory=ONE_PASS
        )

    @functools.partial(jax.jit, static_argnums=0)
    def run(loss, hidden, kernel):
        (value, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, kernel)
        return value, finalize_metrics(found), gradients

    assert_trees_close(run(one, HIDDEN, KERNEL), run(two, HIDDEN, KERNEL), 1e-5, 2e-6)
    assert "one pass" in notes(run.trace(one, HIDDEN, KERNEL).jaxpr)[0]


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_masked_positions_hold_anything(mesh):
    """On a mesh, devices that have fewer tokens with loss than another compute as many."""
    off = BATCH.loss_mask == 0
    if mesh is not None:  # the last half has few, so that devices differ
        off = off | (jnp.arange(T)[None] >= T // 2) & (jnp.arange(T)[None] % 8 > 0)
    hidden = jnp.where(off[..., None], jnp.nan, HIDDEN)

    def nan(x):
        return jnp.where(off, jnp.nan, x)

    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    clean_batch = dataclasses.replace(BATCH, loss_mask=jnp.where(off, 0, BATCH.loss_mask))
    batch = dataclasses.replace(
        clean_batch,
        targets=jnp.where(off, -100, BATCH.targets),
        **{n: nan(getattr(BATCH, n)) for n in names},
    )
    for budget in (ONE_PASS, TWO_PASSES):
        run = compiled(bonus_and_kl(), budget, mesh)
        clean = run(HIDDEN, KERNEL, clean_batch)
        dirty = run(hidden, KERNEL, batch)
        assert_trees_close(dirty, clean, 0, 0)  # to the bit: 0 * NaN anywhere would show


@pytest.mark.parametrize("budget", [ONE_PASS, TWO_PASSES])
def test_no_loss_token_anywhere_is_exactly_zero(budget):
    batch = make_batch(jnp.zeros((R, T)))
    run = compiled(bonus_and_kl(), budget, "dp=2,cp=2,tp=2")
    value, _, gradients = run(HIDDEN, KERNEL, batch)
    assert float(value) == 0
    for gradient in gradients[:2]:
        assert not gradient.any()


def test_a_program_says_which_way_it_went_and_cannot_hang():
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")

    def put(x, spec):
        return jax.device_put(x, mesh.sharding(spec))

    hidden = put(HIDDEN, mesh.hidden_spec)
    kernel = put(KERNEL[:, :1000], mesh.kernel_spec())
    batch = dataclasses.replace(BATCH, targets=jnp.minimum(BATCH.targets, 999))
    programs = [
        jax.jit(functools.partial(step, mesh, batch=batch, memory=budget))
        for budget in (ONE_PASS, TWO_PASSES)
    ]
    one, two = (audit(program, hidden, kernel) for program in programs)
    assert one.notes == ("one pass, 128 tokens x 500 columns",)
    assert two.notes == (
        "two passes: one pass does not fit the memory",
        "forward, 16 tokens x 500 columns",
        "gradients, 64 tokens x 56 columns",
    )
    # three products instead of four; the last of nine blocks of columns overlaps the one before it
    assert one.flops.high == pytest.approx(0.75 * two.flops.high, rel=0.02)
    for program in programs:
        assert hang_risks(program.trace(hidden, kernel).jaxpr) == []
    mesh = make_parallel_mesh("fsdp=4,tp=2")
    kernel = jax.device_put(KERNEL[:, :1000], mesh.sharding(mesh.kernel_spec()))
    hidden = jax.device_put(HIDDEN, mesh.sharding(mesh.hidden_spec))
    gathered = jax.jit(functools.partial(step, mesh, batch=batch)).trace(hidden, kernel)
    assert notes(gathered.jaxpr) == ("one pass, 128 tokens x 500 columns",)


@pytest.mark.every(2)
@pytest.mark.parametrize("budget", [ONE_PASS, TWO_PASSES])
def test_devices_with_masks_of_their_own_may_share_hidden_states(budget):
    """Their blocks of tokens differ, so blocks must not be summed over devices as they are."""
    mesh = make_parallel_mesh("dp=8")
    shared = HIDDEN[:1]
    config = bonus_and_kl()

    def alone(hidden, kernel):
        return policy_loss_from_hidden(
            jnp.broadcast_to(hidden, HIDDEN.shape), kernel, BATCH, config
        )[0]

    def local(hidden, kernel, batch):
        return policy_loss_from_hidden(
            hidden, kernel, batch, config, parallel=mesh.axes, memory=budget
        )[0]

    specs = (P(), P(), BATCH.specs(mesh))
    whole = jax.jit(jax.shard_map(local, mesh=mesh.mesh, in_specs=specs, out_specs=P()))
    got = jax.jit(jax.grad(lambda h, k: whole(h, k, BATCH), (0, 1)))(shared, KERNEL)
    assert_trees_close(got, jax.jit(jax.grad(alone, (0, 1)))(shared, KERNEL), 1e-5, 2e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("passes", "tokens", "features", "columns", "mib"),
    [
        *(
            ("two", 2048, 1024, 8192, 48),
            ("two", 2048, 1024, 32768, 48),
            ("two", 4096, 256, 32768, 48),
        ),
        *(("one", 512, 1024, 8192, 32), ("one", 2048, 256, 4096, 48), ("one", 128, 256, 32768, 40)),
        *(("two", 700, 512, 4096, 16), ("one", 700, 512, 4096, 24)),
    ],
)
def test_passes_stay_within_their_bytes(passes, tokens, features, columns, mib):
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    ids, one = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (tokens, 1))
    x = f32(1, tokens)
    batch = RolloutBatch(ids, ids, ids, ids, x, one, one, one, advantages=x, old_log_probs=x)
    config = PolicyLossConfig(entropy_coef=0.01)
    budget = mib * 2**20

    def run(hidden, kernel, batch):
        return step(None, hidden, kernel, batch, config, budget)

    found = audit(run, f32(1, tokens, features), f32(features, columns), batch)
    assert found.notes[0].startswith(f"{passes} pass")
    assert found.temp_bytes <= budget


def test_a_frozen_head_leaves_nothing_of_its_gradient():
    config = PolicyLossConfig(PPO(clip_high=0.28))

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(hidden):
        return policy_loss_from_hidden(
            hidden, KERNEL, BATCH, config, memory=ONE_PASS, follow_mask=False
        )[0]

    found = audit(loss_and_gradient, HIDDEN)
    # the logits and dhidden
    assert compiled_flops(found.text) == pytest.approx(2 * 2 * R * T * H * V, rel=0.05)
    of_both = jax.jit(functools.partial(step, None, temperature=1.0))
    expected = of_both(HIDDEN, KERNEL)[2][0]
    assert_trees_close(loss_and_gradient(HIDDEN)[1], expected, 1e-5, 2e-6)


def test_bad_input():
    with pytest.raises(ValueError, match=r"kernel: got shape \(16, 3\).*expected 7"):
        step(None, HIDDEN[..., :7], KERNEL[:, :3])
    with pytest.raises(
        ValueError,
        match=r"batch.extras: got \[\], expected 'selected' among them, the step's covariance_mask",
    ):
        step(None, HIDDEN, KERNEL, config=PolicyLossConfig(ClipCov()))
    with pytest.raises(ValueError, match=r"batch.advantages: got None"):
        step(None, HIDDEN, KERNEL, dataclasses.replace(BATCH, advantages=None))
