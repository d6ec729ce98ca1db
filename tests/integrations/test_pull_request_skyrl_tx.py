"""The function of docs/pull_requests/skyrl_tx.md beside the one that it would replace, and the
memory that each takes.

SkyRL comes from a checkout on the path, as the page says. It is not installed at night: there our
function runs in a model with the attributes of SkyRL-tx's models.
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


class AdaptedHead(nnx.Module):
    """The attributes of SkyRL-tx's LoRALinear, and what it computes."""

    def __init__(self, features, columns, adapters, rank):
        self.max_lora_adapters = adapters
        self.kernel = nnx.Param(jnp.zeros((features, columns)))
        self.lora_A = nnx.Param(jnp.zeros((adapters, features, rank)))
        self.lora_B = nnx.Param(jnp.zeros((adapters, rank, columns)))
        self.lora_scaling = nnx.Variable(jnp.ones(adapters))

    def __call__(self, hidden, ids):
        low = jnp.einsum("rth,rhk->rtk", hidden, self.lora_A[...][ids])
        adapted = jnp.einsum("rtk,rkv->rtv", low, self.lora_B[...][ids])
        return hidden @ self.kernel[...] + adapted * self.lora_scaling[...][ids][:, None, None]


class Model(nnx.Module):
    """What the log-probs of SkyRL-tx's models read, and those log-probs without chunks."""

    def __init__(self, tied):
        self.lm_head = None if tied else AdaptedHead(16, 64, 3, 2)
        self.model = nnx.Module()
        self.model.embed_tokens = nnx.Embed(64, 16, rngs=nnx.Rngs(0))

    def _compute_chunked_logprobs(self, hidden, targets, chunk_size, ids):
        kernel = self.model.embed_tokens.embedding[...]
        logits = hidden @ kernel.T if self.lm_head is None else self.lm_head(hidden, ids)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def qwen3(tied=False, dtype=jnp.float32, adapters=3, rank=2, checkpointing=True, **options):
    models = pytest.importorskip("skyrl.tx.models.qwen3", reason="SkyRL is not installed")
    import transformers
    from skyrl.tx.models.configs import Qwen3Config

    sizes = {
        "hidden_size": 16,
        "vocab_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 0,
        "head_dim": 8,
    }
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    } | options
    of_lora = {"max_lora_adapters": adapters, "max_lora_rank": rank, "shard_attention_heads": True}
    config = Qwen3Config(
        transformers.Qwen3Config(**sizes), **of_lora, gradient_checkpointing=checkpointing
    )
    return models.Qwen3ForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["adapters", "tied"])
@pytest.mark.parametrize("model_of", [Model, qwen3], ids=["attributes", "SkyRL"])
def test_skyrl_tx(model_of, tied, shape):
    """The block "def _compute_chunked_logprobs(self" of the page; the rows have different
    adapters.
    """
    with jax.set_mesh(mesh_of(shape, ("fsdp", "ep", "tp"), jax.devices()[: np.prod(shape)])):
        model = model_of(tied)
        theirs = type(model)._compute_chunked_logprobs
        if tied:
            of_head = {"embedding": model.model.embed_tokens.embedding}
        else:
            model.lm_head.lora_scaling.set_value(jnp.array([1.0, 0.5, 2.0]))
            of_head = {
                name: getattr(model.lm_head, name) for name in ("kernel", "lora_A", "lora_B")
            }
        keys = jax.random.split(jax.random.key(0), 2 + len(of_head))
        for key, parameter in zip(keys[2:], of_head.values(), strict=True):
            parameter.set_value(0.3 * jax.random.normal(key, parameter.shape))
        hidden = jax.random.normal(keys[0], (4, 7, 16))
        weights = jax.random.normal(keys[1], (1, 4, 7))
        targets = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 7)), jnp.int32)
        ids = jnp.array([2, 0, 1, 2], jnp.int32)
        graph, state, rest = nnx.split(model, nnx.Param, ...)

        def found(function):
            def called(state, hidden):
                return function(nnx.merge(graph, state, rest), hidden, targets, 3, ids)

            return value_and_gradients(called, weights, state, hidden)

        assert_same(found(documented("skyrl_tx")), found(theirs), atol=5e-6)


def test_peak_temporaries_of_skyrl_tx():
    """The head of Qwen3-8B with 32 adapters over 64 rows of 768 tokens on a described v5p of 16
    chips.

    The figures stand on the page.
    """
    pytest.importorskip("skyrl.tx.models.qwen3", reason="SkyRL is not installed")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices
    mesh = mesh_of((4, 1, 4), ("fsdp", "ep", "tp"), devices)
    with jax.set_mesh(mesh):

        def put(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

        def of_adapters(path, _):
            return "lm_head" in path and path[-1] in ("lora_A", "lora_B")

        hidden = put(jax.ShapeDtypeStruct((64, 768, 4096), jnp.bfloat16), jax.P("fsdp"))
        targets = put(jax.ShapeDtypeStruct((64, 768), jnp.int32), jax.P("fsdp"))
        ids = put(jax.ShapeDtypeStruct((64,), jnp.int32), jax.P("fsdp"))

        def peak(function=None, adapters=32, checkpointing=False):
            sizes = {
                "vocab_size": 151936,
                "hidden_size": 4096,
                "rank": 32,
                "dtype": jnp.bfloat16,
                "adapters": adapters,
            }
            model = nnx.eval_shape(functools.partial(qwen3, checkpointing=checkpointing, **sizes))
            graph, adapted, rest = nnx.split(model, of_adapters, ...)
            adapted, rest = (
                jax.tree.map(put, x, nnx.get_partition_spec(x)) for x in (adapted, rest)
            )
            function = function or type(model)._compute_chunked_logprobs

            def loss(adapted, hidden, rest, targets, ids):
                return function(nnx.merge(graph, adapted, rest), hidden, targets, 1024, ids).sum()

            return (
                audit(
                    jax.value_and_grad(loss, (0, 1)), adapted, hidden, rest, targets, ids
                ).temp_bytes
                / GIB
            )

        ours = documented("skyrl_tx")
        found = {
            "theirs": peak(),
            "theirs, gradient_checkpointing": peak(checkpointing=True),
            "ours": peak(ours),
        }
        alone = {"theirs, gradient_checkpointing": peak(None, 0, True), "ours": peak(ours, 0)}
    for adapters, peaks in ((32, found), (0, alone)):
        print(f"{adapters} adapters:", {name: f"{x:.2f} GiB" for name, x in peaks.items()})
    assert found["ours"] < found["theirs"], found
    assert alone["ours"] < alone["theirs, gradient_checkpointing"], alone
