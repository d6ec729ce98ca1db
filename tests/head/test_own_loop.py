"""A user's training loop compiles its step once: results have the shardings of the arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import monitoring
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxppo import (
    PPO,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    log_probs_from_hidden,
    make_parallel_mesh,
    policy_loss_from_hidden,
)

H, V, STEPS = 16, 64, 4
MESHES = ["dp=8", "dp=2,cp=2,tp=2", "fsdp=8", "dp=2,fsdp=2,tp=2", "cp=8", "tp=8"]
RNG = np.random.default_rng(0)
SAMPLES = [
    Sample(
        RNG.integers(0, V, 10),
        response_start=3,
        advantages=RNG.normal(size=7),
        old_log_probs=-np.ones(7),
    )
    for _ in range(12)
]


class Compilations:
    """How many programs were compiled, those from a persistent cache included."""

    def __init__(self):
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._seen)

    def _seen(self, name, *_, **__):
        self.count += name == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


def parameters(parallel, everywhere=False):
    """A trunk and a head with all its parameters, sharded by `parallel.kernel_spec`, or
    replicated.
    """
    h_names, v_names = (None, None) if everywhere else parallel.kernel_spec()
    shapes = {
        "embedding": ((V, H), P()),
        "kernel": ((H, V), P(h_names, v_names)),
        "bias": ((V,), P(v_names)),
        "lora_a": ((H, 2), P()),
        "lora_b": ((2, V), P(None, v_names)),
    }
    rng = np.random.default_rng(1)

    def make(shape, spec):
        return jax.device_put(
            jnp.asarray(rng.normal(size=shape), jnp.float32), parallel.sharding(spec)
        )

    return {name: make(shape, spec) for name, (shape, spec) in shapes.items()}


def step_of(parallel, spec=None, one_pass=True, **options):
    batch = RolloutBatch.from_samples(SAMPLES, row_length=16, rows=16).put(parallel)
    config = PolicyLossConfig(PPO())

    def loss(params, batch):
        embedding = params["embedding"]
        if parallel.is_explicit:
            hidden = embedding.at[batch.tokens].get(
                out_sharding=parallel.sharding(parallel.hidden_spec)
            )
        else:
            hidden = embedding[batch.tokens]
        lora = LoRA(params["lora_a"], params["lora_b"], 0.5)
        head = Head(params["kernel"], params["bias"], lora, spec=spec)
        if one_pass:
            return policy_loss_from_hidden(hidden, head, batch, config, parallel=parallel)[0]
        found = log_probs_from_hidden(
            hidden, head, batch.targets, parallel=parallel, where=batch.loss_mask > 0
        )
        return -found.log_probs.mean()

    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda x, g: x - 0.1 * g, params, gradients)

    return jax.jit(step, **options), batch


def train(compilations, step, params, batch):
    """How many compilations each step took, and the parameters after the last."""
    counts = []
    for _ in range(STEPS):
        before = compilations.count
        params = jax.block_until_ready(step(params, batch))
        counts.append(compilations.count - before)
    return counts, params


ONCE = [1] + [0] * (STEPS - 1)


@pytest.mark.every(13)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_plain_loop_compiles_its_step_once(mesh, one_pass, explicit, compilations):
    """With dp=8 the step's cache had two entries: `P(None, None)` went in, and its equal `P()`
    came back.
    """
    parallel = make_parallel_mesh(mesh, explicit=explicit)
    step, batch = step_of(parallel, one_pass=one_pass)
    params = parameters(parallel)
    counts, after = train(compilations, step, params, batch)
    assert counts == ONCE
    for name, x in params.items():
        assert after[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
    if not explicit:
        assert step._cache_size() == 1
        assert {k: x.sharding for k, x in after.items()} == {
            k: x.sharding for k, x in params.items()
        }


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["spec", "out_shardings", "explicit"])
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "fsdp=8"])
def test_parameters_that_lie_otherwise_than_the_mesh_says(mesh, how, compilations):
    """A kernel that is whole on each device.

    `Head(spec=)` says so, or its Explicit type, or the results are pinned.
    """
    parallel = make_parallel_mesh(mesh, explicit=how == "explicit")
    params = parameters(parallel, everywhere=True)
    options = (
        {"out_shardings": jax.tree.map(lambda x: x.sharding, params)}
        if how == "out_shardings"
        else {}
    )
    step, batch = step_of(parallel, spec=P() if how == "spec" else None, **options)
    counts, after = train(compilations, step, params, batch)
    assert counts == ONCE
    for name, x in params.items():
        assert after[name].sharding.is_equivalent_to(x.sharding, x.ndim), name


def test_what_is_pinned_is_needed(compilations):
    """Under `jit`, nothing says how an Auto array is sharded: without a pin the second step is
    another program.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    step, batch = step_of(parallel)
    counts, after = train(compilations, step, parameters(parallel, everywhere=True), batch)
    assert sum(counts) == 2
    assert isinstance(after["kernel"].sharding, NamedSharding)
    assert after["kernel"].sharding.spec == P(None, "tp")


@pytest.mark.every(3)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_with_an_optimiser(mesh, compilations):
    """As in docs/head.md: the state is made from placed parameters, and its counters are put on
    the mesh too.
    """
    parallel = make_parallel_mesh(mesh)
    update, batch = step_of(parallel)
    optimizer = optax.adam(1e-2)
    params = parameters(parallel)
    state = optimizer.init(params)

    def lies(x):
        return isinstance(x.sharding, NamedSharding)

    state = jax.tree.map(
        lambda x: x if lies(x) else jax.device_put(x, parallel.sharding(P())), state
    )

    def step(carry, batch):
        params, state = carry
        after = update(params, batch)
        updates, state = optimizer.update(jax.tree.map(jnp.subtract, params, after), state, params)
        return optax.apply_updates(params, updates), state

    pinned = jax.tree.map(lambda x: x.sharding, (params, state))
    counts, _ = train(compilations, jax.jit(step, out_shardings=pinned), (params, state), batch)
    assert counts == ONCE
