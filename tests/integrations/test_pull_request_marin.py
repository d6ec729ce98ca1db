"""The function of docs/pull_requests/marin.md beside the one that it would replace, and the memory that each takes.

marin, Levanter and haliax are not installed at night: there the function runs in a stand-in for a model.
"""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from pull_request_cases import GIB, assert_same, mesh_of, value_and_gradients
from pull_requests import documented

from sharding.audit import audit

pytestmark = pytest.mark.nightly


class Named:
    """What the page of marin reads of a NamedArray of haliax."""

    def __init__(self, array, *axes):
        self.array, self.axes = array, axes

    def rearrange(self, axes):
        return Named(self.array.transpose([self.axes.index(axis) for axis in axes]), *axes)


def marin_batch(named, temperature=(0.7, 1.0, 0.0, 1.5), length=9):
    """What the page reads of a batch; a temperature of 0 divides by nothing."""
    ids = jax.random.randint(jax.random.key(0), (4, length), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(length), (4, length))
    arrays = {"input_ids": named(ids, "batch", "position"), "position_ids": named(positions, "batch", "position")}
    return arrays | {"temperature": named(jnp.asarray(temperature, jnp.float32), "batch")}


def test_marin_in_a_stand_in(monkeypatch):
    """The block "def compute_model_logprobs_and_entropy(model" where marin and Levanter are not installed."""
    attention, partitioning = ModuleType("attention"), ModuleType("partitioning")
    attention.AttentionMask, partitioning.get_concrete_mesh = SimpleNamespace(causal=lambda: "causal"), lambda: None
    monkeypatch.setitem(sys.modules, "levanter.layers.attention", attention)
    monkeypatch.setitem(sys.modules, "haliax.partitioning", partitioning)
    batch = SimpleNamespace(**marin_batch(Named))
    hidden, kernel = jax.random.normal(jax.random.key(1), (4, 16, 9)), jax.random.normal(jax.random.key(2), (16, 64))

    def ours(hidden, kernel):
        def activations(**inputs):
            assert inputs == {"input_ids": batch.input_ids, "attn_mask": "causal"} | {
                "pos_ids": batch.position_ids,
                "key": None,
            }
            return Named(hidden, "batch", "embed", "position"), "a loss of experts"

        model = SimpleNamespace(activations=activations, get_lm_head=lambda: Named(kernel, "embed", "vocab"))
        model.Embed, model.Vocab = "embed", "vocab"
        return documented("marin")(model, batch, None, vocab_tile_size=8, compute_entropy=True)

    def plain(hidden, kernel):
        logits = jnp.einsum("bht,hv->btv", hidden, kernel)[:, :-1] / jnp.array([0.7, 1.0, 1.0, 1.5])[:, None, None]
        log_p = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(log_p, batch.input_ids.array[:, 1:, None], axis=-1)[..., 0]
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)
        return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (taken, entropy))

    weights = jax.random.normal(jax.random.key(3), (2, 4, 9))
    found, expected = (value_and_gradients(f, weights, hidden, kernel) for f in (ours, plain))
    assert_same(found, expected, atol=5e-6)
    without = documented("marin", theirs=lambda *args, **options: (args, options))("model", batch, "key")
    assert without == (("model", batch, "key"), {"compute_entropy": False})


def levanter_mesh(shape, devices):
    """A mesh with Levanter's axes, and a context in which its models shard their rows over it."""
    return mesh_of((1, shape[0], 1, shape[1]), ("replica_dcn", "data", "replica", "model"), devices)


ROWS_OF_LEVANTER = {"batch": ("replica_dcn", "replica", "data"), "mlp": "model", "heads": "model"}


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["lm_head", "tied"])
def test_marin(shape, tied):
    """The same block, in a Llama of Levanter's, beside marin's function."""
    scoring = pytest.importorskip("marin.rl.scoring", reason="marin is not installed")
    import equinox as eqx
    import haliax as hax
    from levanter.models import llama
    from marin.rl.types import TrainingBatch

    sizes = {"hidden_dim": 16, "intermediate_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    config = llama.LlamaConfig(**sizes, max_seq_len=9, tie_word_embeddings=tied)
    batch = marin_batch(lambda x, *axes: hax.named(x, axes))
    zeros = jnp.zeros((4, 9))
    others = {x: hax.named(zeros, ("batch", "position")) for x in ("loss_weights", "loss_masks", "policy_logprobs")}
    others |= {"top_k": hax.named(jnp.zeros(4, int), "batch"), "truncated": jnp.zeros(4, bool), "max_output_tokens": 9}
    batch = TrainingBatch(**batch, **others)
    mesh = levanter_mesh(shape, jax.devices()[: shape[0] * shape[1]])
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(ROWS_OF_LEVANTER):
        model = llama.LlamaLMHeadModel.init(hax.Axis("vocab", 64), config, key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def found(function, weights, **options):
            def called(params):
                return function(eqx.combine(params, static), batch, None, **options)

            return value_and_gradients(called, weights, params)

        weights = jax.random.normal(jax.random.key(3), (2, 4, 9))
        theirs, ours = scoring.compute_model_logprobs_and_entropy, documented("marin")
        both = found(theirs, weights, compute_entropy=True)
        assert_same(found(ours, weights, vocab_tile_size=16, compute_entropy=True), both, atol=5e-6)
        tiles = [found(f, weights[:1], vocab_tile_size=16) for f in (ours, theirs)]
        assert_same(*tiles, atol=5e-6)


def test_peak_temporaries_of_marin():
    """The head of a Qwen3 over 64 rows of 1024 tokens on a described v5p of 16 chips; the figures stand on the page."""
    scoring = pytest.importorskip("marin.rl.scoring", reason="marin is not installed")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    import haliax as hax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices
    mesh = levanter_mesh((4, 4), devices)

    def put(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))

    hidden, kernel = put((64, 1024, 1024), jnp.bfloat16, "data"), put((151936, 1024), jnp.bfloat16, None, "data")
    ids, temperature = put((64, 1024), jnp.int32, "data"), put((64,), jnp.float32, "data")

    class Model:
        Embed, Vocab = hax.Axis("embed", 1024), hax.Axis("vocab", 151936)

        def __init__(self, hidden, kernel):
            self.hidden = hax.named(hidden, ("batch", "position", self.Embed))
            self.kernel = hax.named(kernel, (self.Vocab, self.Embed))

        def activations(self, **_):
            return self.hidden

        def get_lm_head(self):
            return self.kernel

        def __call__(self, **_):
            return hax.dot(self.hidden, self.kernel, axis=self.Embed)

    def peak(function, **options):
        def loss(hidden, kernel, ids, temperature):
            arrays = {"input_ids": hax.named(ids, ("batch", "position")), "position_ids": None}
            batch = scoring.TokenScoreInputs(**arrays, sampling_temperature=hax.named(temperature, "batch"))
            found = function(Model(hidden, kernel), batch, None, **options)
            return sum(x.sum() for x in jax.tree.leaves(found))

        return audit(jax.value_and_grad(loss, (0, 1)), hidden, kernel, ids, temperature).temp_bytes / GIB

    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(ROWS_OF_LEVANTER):
        tiles = scoring.chunked_compute_logprobs
        found = {"ours": peak(documented("marin"), vocab_tile_size=1, compute_entropy=True)}
        found |= {f"theirs, tiles of {size}": peak(tiles, block_size=size) for size in (32064, 2048)}
        found["theirs, logits"] = peak(scoring.compute_logprobs_and_entropy, compute_entropy=True)
    print({name: f"{x:.2f} GiB" for name, x in found.items()})
    assert found["ours"] < min(found.values()) * 1.01, found
