"""The function of docs/pull_requests/tunix.md beside the one that it would replace, and the memory
that each takes.

Tunix comes from a checkout on the path, as the page says. At night only the release that the extra
`tunix` installs is there, which has nothing to replace yet: our function is then compared with a
plain one, in a model of that release.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pull_request_cases import GIB, assert_same, mesh_of, value_and_gradients
from pull_requests import documented

from sharding.audit import audit

pytestmark = pytest.mark.nightly


def tunix_qwen3(**options):
    qwen3 = pytest.importorskip(
        "tunix.models.qwen3.model", reason="Tunix is not installed: the extra tunix"
    )
    sizes = {
        "num_layers": 1,
        "vocab_size": 64,
        "embed_dim": 16,
        "hidden_dim": 32,
        "num_heads": 2,
        "head_dim": 8,
    }
    sizes |= {"num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6} | options
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["lm_head", "tied"])
def test_tunix(shape, tied):
    """The block "def compute_chunked_logps(" of the page."""
    common = pytest.importorskip(
        "tunix.rl.common", reason="Tunix is not installed: the extra tunix"
    )
    ours = documented("tunix")
    with mesh_of(shape, ("fsdp", "tp"), jax.devices()[: shape[0] * shape[1]]):
        graph, state = nnx.split(tunix_qwen3(use_tied_embedding=tied))
        hidden = jax.random.normal(jax.random.key(0), (4, 7, 16))
        ids = jnp.asarray(np.random.default_rng(0).integers(-1, 64, (4, 7)), jnp.int32)
        weights = jax.random.normal(jax.random.key(1), (2, 4, 7))

        def plain(model, hidden, ids, temperature, chunk_size, return_entropy):
            logits = model.embedder.decode(hidden) if tied else model.lm_head(hidden)
            log_p = jax.nn.log_softmax(logits / (temperature or 1.0))
            taken = jnp.take_along_axis(log_p, ids[..., None], -1)[..., 0]
            entropy = -(jnp.exp(log_p) * log_p).sum(-1)
            return (taken, entropy) if return_entropy else taken

        theirs = getattr(common, "compute_chunked_logps", plain)

        def found(function):
            def called(state, hidden):
                return function(nnx.merge(graph, state), hidden, ids, 0.7, 3, True)

            return value_and_gradients(called, weights, state, hidden)

        assert_same(found(ours), found(theirs), atol=5e-6)
        beyond = [
            f(nnx.merge(graph, state), hidden, ids.at[0, 0].set(64), 0.0, 3, False)
            for f in (ours, theirs)
        ]
        np.testing.assert_array_equal(jnp.isnan(beyond[0]), jnp.isnan(beyond[1]))
        assert jnp.isnan(beyond[0])[0, 0]


def test_peak_temporaries_of_tunix():
    """The head of a Qwen3 over 64 rows of 768 tokens on a described v5p of 16 chips; the figures
    stand on the page.
    """
    common = pytest.importorskip(
        "tunix.rl.common", reason="Tunix is not installed: the extra tunix"
    )
    theirs = getattr(common, "compute_chunked_logps", None)
    if theirs is None:
        pytest.skip("this Tunix has no compute_chunked_logps: its main branch has")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices
    with mesh_of((4, 4), ("fsdp", "tp"), devices) as mesh:
        sizes = {
            "vocab_size": 151936,
            "embed_dim": 1024,
            "dtype": jnp.bfloat16,
            "param_dtype": jnp.bfloat16,
        }
        graph, state = nnx.split(nnx.eval_shape(functools.partial(tunix_qwen3, **sizes)))

        def put(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

        state = jax.tree.map(put, state, nnx.get_partition_spec(state))
        hidden = put(jax.ShapeDtypeStruct((64, 768, 1024), jnp.bfloat16), jax.P("fsdp"))
        ids = put(jax.ShapeDtypeStruct((64, 768), jnp.int32), jax.P("fsdp"))

        def peak(function, chunk_size):
            def loss(state, hidden, ids):
                found = function(nnx.merge(graph, state), hidden, ids, 0.9, chunk_size, True)
                return sum(x.sum() for x in found)

            return audit(jax.value_and_grad(loss, (0, 1)), state, hidden, ids).temp_bytes / GIB

        found = {f"theirs, chunks of {size}": peak(theirs, size) for size in (256, 64)}
        found["ours"] = peak(documented("tunix"), 0)
    print({name: f"{x:.2f} GiB" for name, x in found.items()})
    assert found["ours"] < min(found.values()) * 1.01, found
