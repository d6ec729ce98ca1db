"""Checks an installed jaxppo, in an environment that may have its requirements and nothing else."""

import jax
import numpy as np
import typed_user as user


def check(params, alone, placed, config):
    """One device and eight have the same loss and gradients; log-probs from logits and from
    hidden states agree.
    """
    parallel = user.mesh()

    def on_one(params, batch):
        return user.loss_of(params, batch, config, None)[0]

    def on_eight(params, batch):
        return user.loss_of(params, batch, config, parallel)[0]

    loss, gradients = jax.jit(jax.value_and_grad(on_one))(params, alone)
    sharded_loss, sharded_gradients = jax.jit(jax.value_and_grad(on_eight))(params, placed)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(user.by_hand, static_argnums=2)(params, alone, config), loss, atol=1e-4
    )
    for name in params:
        scale = float(np.abs(gradients[name]).max())
        assert scale > 1e-4, (config, name)
        np.testing.assert_allclose(
            sharded_gradients[name], gradients[name], rtol=1e-4, atol=1e-5 * scale
        )


def main():
    assert jax.device_count() == 8
    parallel = user.mesh()
    params = user.parameters()
    alone = user.batches(None)[0]
    placed = user.batches(parallel)[0].put(parallel)
    for config in user.configs()[1:3]:
        check(params, alone, placed, config)
    assert np.isfinite(
        jax.jit(user.in_my_own_shard_map, static_argnums=2)(params, placed, parallel)
    )
    micro = user.RolloutBatch.from_samples(
        user.samples(), row_length=16, micro_batches=2, parallel=parallel
    )
    after = jax.jit(user.step, static_argnums=2)(params, micro, parallel)
    assert not np.array_equal(after["kernel"], params["kernel"])
    assert np.max(user.old_log_probs(params, alone)) <= 0
    assert np.any(user.group_advantages(placed, parallel))
    print("fine")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
