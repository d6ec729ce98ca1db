"""A training step's functions that are exported, stored and called in another process.

python stored.py    # loads the function of each mesh from the file of its name, calls it, writes its numbers
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from policy_steps import normalizer_of
from programs import start_devices

MESHES = {"one device": None, "a mesh": "dp=2,cp=2,tp=2"}
V, H, RANK = 24, 8, 2


def arguments(mesh):
    """The mesh, and a head with an adapter, hidden states, a batch of two rows of samples, and
    its normalizer.
    """
    from jaxppo import Head, LoRA, OffPolicyConfig, RolloutBatch, Sample, make_parallel_mesh

    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            [i // 2, *rng.integers(0, V - 1, 5)],
            response_start=1,
            group_id=i // 2,
            **{
                name: -rng.random(5)
                for name in ("old_log_probs", "rollout_log_probs", "advantages", "ref_log_probs")
            },
        )
        for i in range(4)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=16, rows=2, parallel=parallel)
    batch = batch.put(parallel) if parallel else batch
    off_policy = OffPolicyConfig("token", batch_normalize=True)
    normalizer = normalizer_of(batch, "token_mean", off_policy=off_policy, parallel=parallel)
    head = Head(
        jnp.asarray(rng.normal(size=(H, V)), jnp.float32),
        lora=LoRA(
            *(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((H, RANK), (RANK, V))),
            scale=0.3,
        ),
        softcap=9.0,
        vocab_size=V - 1,
        spec=parallel and parallel.kernel_spec(),
    )
    hidden = jnp.asarray(rng.normal(size=(2, 16, H)), jnp.bfloat16)
    if parallel:
        everywhere = parallel.sharding(jax.P())
        hidden, head, normalizer = jax.device_put((hidden, head, normalizer), everywhere)
    return parallel, (head, hidden, batch, normalizer)


def step(parallel):
    """From a head, hidden states, a batch and a normalizer to gradients (a Head), metrics,
    statistics and paths.
    """
    from jaxppo import KL, OffPolicyConfig, PolicyLossConfig, log_probs_from_hidden, policy_loss
    from jaxppo.mismatch import token_mismatch
    from jaxppo.step.entropy import AdaptiveEntropy, entropy_metrics

    off_policy = OffPolicyConfig("token", batch_normalize=True)
    config = PolicyLossConfig(kl=KL(0.1), off_policy=off_policy, clip_by_sign=True)

    def run(head, hidden, batch, normalizer):
        def loss(head):
            stats = log_probs_from_hidden(
                hidden, head, batch.targets, entropy="metric", parallel=parallel
            )
            value, metrics = policy_loss(
                stats, batch, config, normalizer=normalizer, parallel=parallel
            )
            return value, (
                stats,
                metrics | entropy_metrics(stats, batch, quantiles=(0.5,), parallel=parallel),
            )

        (value, (stats, metrics)), gradients = jax.value_and_grad(loss, has_aux=True)(head)
        mismatch = token_mismatch(hidden, head, hidden, head, batch.targets, parallel=parallel)
        return (
            value,
            gradients,
            stats,
            metrics,
            mismatch,
            batch.paths,
            normalizer,
            AdaptiveEntropy(0.5).init(),
        )

    return run


def numbers(found):
    """The arrays of a result by their paths."""
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(found)
    }


if __name__ == "__main__":
    start_devices(8)
    import jaxppo.mismatch
    import jaxppo.step.entropy  # noqa: F401, the classes that the function returns

    for mesh, axes in MESHES.items():
        _, given = arguments(axes)
        function = jax.export.deserialize(bytearray(Path(mesh).read_bytes()))
        np.savez(f"{mesh}.npz", **numbers(jax.jit(function.call)(*given)))
