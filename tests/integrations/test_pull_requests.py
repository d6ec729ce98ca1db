"""The functions of docs/pull_requests beside those that they would replace, and the memory that each takes.

Each needs its trainer, from a checkout on the path, as its page says. At night there is the release of Tunix that the
extra `tunix` installs, which has nothing to replace yet: there our function meets a plain one in its model. MaxText is
not there: the functions of its page also run in a stand-in for its adapter.
"""

import functools
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pull_requests import defined, documented

from jaxppo import ParallelMesh, log_probs_from_hidden
from jaxppo.integrations import tunix as jaxppo_tunix
from sharding.audit import audit

pytestmark = pytest.mark.nightly
GIB = 2**30


def value_and_gradients(function, weights, *args):
    """The sum has weights, so that no two gradients are equal."""

    def weighted(*args):
        found = jax.tree.leaves(function(*args))
        return sum((weight * x).sum() for weight, x in zip(weights, found, strict=True)), found

    return jax.jit(jax.value_and_grad(weighted, tuple(range(len(args))), has_aux=True))(*args)


def assert_same(found, expected, atol, rtol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), found, expected)


def mesh_of(shape, names, devices):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=kinds)


def tunix_qwen3(**options):
    qwen3 = pytest.importorskip("tunix.models.qwen3.model", reason="Tunix is not installed: the extra tunix")
    sizes = {"num_layers": 1, "vocab_size": 64, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "head_dim": 8}
    sizes |= {"num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6} | options
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["lm_head", "tied"])
def test_tunix(shape, tied):
    """The block "def compute_chunked_logps(model" of the page."""
    common = pytest.importorskip("tunix.rl.common", reason="Tunix is not installed: the extra tunix")
    ours = documented("tunix")
    with mesh_of(shape, ("fsdp", "tp"), jax.devices()[: shape[0] * shape[1]]):
        graph, state = nnx.split(tunix_qwen3(use_tied_embedding=tied))
        hidden = jax.random.normal(jax.random.key(0), (4, 7, 16))
        ids = jnp.asarray(np.random.default_rng(0).integers(-1, 64, (4, 7)), jnp.int32)
        weights = jax.random.normal(jax.random.key(1), (2, 4, 7))

        def plain(model, hidden, ids, temperature, chunk_size, return_entropy):
            logits = model.embedder.decode(hidden) if tied else model.lm_head(hidden)
            log_p = jax.nn.log_softmax(logits / (temperature or 1.0))
            taken, entropy = jnp.take_along_axis(log_p, ids[..., None], -1)[..., 0], -(jnp.exp(log_p) * log_p).sum(-1)
            return (taken, entropy) if return_entropy else taken

        theirs = getattr(common, "compute_chunked_logps", plain)

        def found(function):
            def called(state, hidden):
                return function(nnx.merge(graph, state), hidden, ids, 0.7, 3, True)

            return value_and_gradients(called, weights, state, hidden)

        assert_same(found(ours), found(theirs), atol=5e-6)
        beyond = [f(nnx.merge(graph, state), hidden, ids.at[0, 0].set(64), 0.0, 3, False) for f in (ours, theirs)]
        np.testing.assert_array_equal(jnp.isnan(beyond[0]), jnp.isnan(beyond[1]))
        assert jnp.isnan(beyond[0])[0, 0]


def test_peak_temporaries_of_tunix():
    """The head of a Qwen3 over 64 rows of 768 tokens on a described v5p of 16 chips; the figures stand on the page."""
    common = pytest.importorskip("tunix.rl.common", reason="Tunix is not installed: the extra tunix")
    theirs = getattr(common, "compute_chunked_logps", None)
    if theirs is None:
        pytest.skip("this Tunix has no compute_chunked_logps: its main branch has")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices
    with mesh_of((4, 4), ("fsdp", "tp"), devices) as mesh:
        sizes = {"vocab_size": 151936, "embed_dim": 1024, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
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


def with_hooks(adapter):
    """A subclass of an adapter for Tunix that has the functions of the page of MaxText."""
    kind = type(adapter)("WithHooks", (adapter,), {})
    for name, x in defined("maxtext").items():
        setattr(kind, name, x)
    return kind


def maxtext_qwen3(devices, **options):
    """A config for MaxText of a small Qwen3, and its mesh."""
    pyconfig = pytest.importorskip("maxtext.configs.pyconfig", reason="MaxText is not installed: it wants Python 3.12")
    from maxtext.utils import maxtext_utils

    sizes = {"base_num_decoder_layers": 1, "base_emb_dim": 16, "base_mlp_dim": 32, "head_dim": 8, "vocab_size": 64}
    sizes |= {"base_num_query_heads": 2, "base_num_kv_heads": 2, "dtype": "float32", "weight_dtype": "float32"}
    sizes |= {"model_name": "qwen3-0.6b", "override_model_config": True, "attention": "dot_product"}
    sizes |= {"scan_layers": False, "max_target_length": 12, "per_device_batch_size": 1, "run_name": "test"}
    sizes |= {"enable_checkpointing": False, "dataset_type": "synthetic", "skip_jax_distributed_system": True}
    base = Path(pyconfig.__file__).with_name("base.yml")
    config = pyconfig.initialize(["", str(base)], **(sizes | options))
    return config, maxtext_utils.get_mesh_from_config(config, devices)


class OfAdapter:
    """Log-probs of completions under an adapter, as a function of its parameters."""

    def __init__(self, adapter, prompts, completions, parallel, temperature=0.7):
        self.graph, self.params, self.others = nnx.split(adapter, nnx.Param, ...)
        self.prompts, self.completions, self.temperature, self.parallel = prompts, completions, temperature, parallel

    def model(self, params):
        others = jax.tree.map(lambda x: x, self.others)  # MaxText counts random numbers in place, in this trace
        return nnx.merge(self.graph, params, others)

    def by_tunix(self, params, chunk_size=None):
        from tunix.rl import common

        options = {"pad_id": 0, "eos_id": 1, "stop_gradient": False, "temperature": self.temperature}
        options |= {} if chunk_size is None else {"chunk_size": chunk_size}
        state = nnx.merge_state(params, self.others)
        return common.compute_per_token_logps(self.graph, state, self.prompts, self.completions, **options)

    def by_jaxppo(self, params):
        options = {"pad_id": 0, "temperature": self.temperature, "parallel": self.parallel}
        return jaxppo_tunix.log_probs(self.model(params), self.prompts, self.completions, **options)

    def loss(self, params, name):
        """That of Tunix's registry of this name, for a GRPO learner without a reference."""
        from tunix.rl import function_registry
        from tunix.rl.grpo import grpo_learner

        config = grpo_learner.GRPOConfig(policy_loss_fn=name, beta=0.0)
        config.temperature = self.temperature
        ids = {"prompt_ids": self.prompts, "completion_ids": self.completions}
        masks = {"prompt_mask": self.prompts != 0, "completion_mask": self.completions != 0}
        nothing = {"ref_per_token_logps": None, "old_per_token_logps": None}
        advantages = jnp.linspace(-1.0, 2.0, len(self.prompts))
        example = grpo_learner.TrainExample(**ids, **masks, **nothing, advantages=advantages)
        found = function_registry.get_policy_loss_fn(name)(self.model(params), example, config, 0, 1)
        return found[0] if isinstance(found, tuple) else found.primary_loss.compute()


def padded_rows():
    """Prompts padded before, completions padded behind, and weights that are 0 at padding."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 64, (4, 5)) * (np.arange(5) >= np.arange(4)[:, None])
    completions = rng.integers(2, 64, (4, 7)) * (np.arange(7) < 7 - np.arange(4)[:, None])
    weights = jnp.asarray(rng.normal(size=(4, 7)) * (completions > 0), jnp.float32)
    return jnp.asarray(prompts, jnp.int32), jnp.asarray(completions, jnp.int32), weights


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["logits_dense", "tied"])
def test_maxtext(shape, tied):
    """The block "def __call__(" of the page in MaxText's adapter, beside the adapter as it is."""
    common = pytest.importorskip("tunix.rl.common", reason="Tunix is not installed: the extra tunix")
    devices = jax.devices()[: shape[0] * shape[1]]
    parallelism = {"ici_fsdp_parallelism": shape[0], "ici_tensor_parallelism": shape[1], "logits_via_embedding": tied}
    config, mesh = maxtext_qwen3(devices, **parallelism)
    from flax import linen
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import model_creation_utils

    prompts, completions, weights = padded_rows()
    parallel = ParallelMesh.from_rules(mesh, config.logical_axis_rules) if mesh.size > 1 else None
    with mesh, linen.logical_axis_rules(config.logical_axis_rules):
        base = model_creation_utils.from_config(config, devices, mesh, rngs=nnx.Rngs(params=0, dropout=1))
        theirs = OfAdapter(TunixMaxTextAdapter(base, pad_id=0), prompts, completions, parallel)
        hooks = OfAdapter(with_hooks(TunixMaxTextAdapter)(base, pad_id=0), prompts, completions, parallel)
        name = jaxppo_tunix.register(parallel=parallel)
        ours = {"log-probs": hooks.by_jaxppo, "loss": functools.partial(hooks.loss, name=name)}
        theirs = {"log-probs": theirs.by_tunix, "loss": functools.partial(theirs.loss, name="grpo")}
        if hasattr(common, "compute_chunked_logps"):
            ours["chunks"] = functools.partial(hooks.by_tunix, chunk_size=3)
            theirs["chunks"] = theirs["log-probs"]
        for kind, function in ours.items():
            scale = jnp.ones(()) if kind == "loss" else weights
            found, expected = (value_and_gradients(f, [scale], hooks.params) for f in (function, theirs[kind]))
            np.testing.assert_allclose(found[0][0], expected[0][0], rtol=2e-5, atol=1e-5)
            # their gradient of a tied table is rounded to bf16
            assert_same(found[1], expected[1], *((2e-2, 1e-2) if tied else (5e-6,)))


def test_peak_temporaries_of_maxtext():
    """A Qwen3 of two layers over 64 rows of 256 + 768 tokens on a described v5p of 16 chips; figures of the page."""
    common = pytest.importorskip("tunix.rl.common", reason="Tunix is not installed: the extra tunix")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices
    sizes = {"base_num_decoder_layers": 2, "base_emb_dim": 1024, "base_mlp_dim": 3072, "head_dim": 128}
    sizes |= {"vocab_size": 151936, "base_num_query_heads": 16, "base_num_kv_heads": 8, "max_target_length": 1024}
    sizes |= {"dtype": "bfloat16", "weight_dtype": "bfloat16", "remat_policy": "full", "per_device_batch_size": 4}
    sizes |= {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 4, "compile_topology": "v5p-32"}
    config, mesh = maxtext_qwen3(devices, compile_topology_num_slices=1, **sizes)
    from flax import linen
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import model_creation_utils

    parallel = ParallelMesh.from_rules(mesh, config.logical_axis_rules)
    found = {}
    with mesh, linen.logical_axis_rules(config.logical_axis_rules):
        _, base = model_creation_utils.create_nnx_abstract_model(config, mesh, devices)
        rows = jax.NamedSharding(mesh, parallel.tokens_spec)
        tokens = [jax.ShapeDtypeStruct((64, n), jnp.int32, sharding=rows) for n in (256, 768)]

        def peak(name, adapter, function, **options):
            def loss(params, others, *tokens):
                of_tokens = OfAdapter(adapter, *tokens, parallel)
                of_tokens.others = others
                return function(of_tokens, params, **options).sum()

            _, *state = nnx.split(adapter, nnx.Param, ...)
            found[name] = audit(jax.value_and_grad(loss), *state, *tokens).temp_bytes / GIB
            print(f"{name}: {found[name]:.2f} GiB")

        hooks = with_hooks(TunixMaxTextAdapter)(base, pad_id=0)
        peak("ours", hooks, OfAdapter.by_jaxppo)
        peak("theirs", TunixMaxTextAdapter(base, pad_id=0), OfAdapter.by_tunix)
        if hasattr(common, "compute_chunked_logps"):
            for size in (256, 64):
                peak(f"the hooks alone, chunks of {size}", hooks, OfAdapter.by_tunix, chunk_size=size)
    assert found["ours"] < found["theirs"] / 4, found


class Decoder(nnx.Module):
    """What the page's functions read of MaxText's decoder; a position reads those before it in its segment."""

    def __init__(self):
        self.decoder_norm = nnx.RMSNorm(16, rngs=nnx.Rngs(0))
        self.logits_dense = nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, shared_embedding, decoder_input_tokens, decoder_positions, decoder_segment_ids, **static):
        assert static == {"deterministic": False, "model_mode": "train"}
        x = shared_embedding(decoder_input_tokens) + jnp.sin(decoder_positions[..., None].astype(jnp.float32))
        return None, jnp.cumsum(x * decoder_segment_ids[..., None].astype(x.dtype), 1), None


class StandIn(nnx.Module):
    """The attributes of MaxText's adapter that the page's functions read, and what its model computes."""

    def __init__(self, tied):
        self.base, self._pad_id = nnx.Module(), 0
        options = {"logits_via_embedding": tied, "normalize_embedding_logits": True, "final_logits_soft_cap": 2.0}
        self.base.config, self.base.decoder = SimpleNamespace(**options), Decoder()
        self.base.token_embedder = nnx.Embed(64, 16, rngs=nnx.Rngs(2))

    def logits(self, tokens, positions):
        base, segments = self.base, (tokens != 0).astype(jnp.int32)
        _, y, _ = base.decoder(
            base.token_embedder, tokens, positions, segments, deterministic=False, model_mode="train"
        )
        y = base.decoder.decoder_norm(y)
        if not base.config.logits_via_embedding:
            return base.decoder.logits_dense(y)
        table = base.token_embedder.embedding[...].astype(jnp.bfloat16).astype(jnp.float32)
        return 2.0 * jnp.tanh(y @ table.T / math.sqrt(16) / 2.0)


@pytest.mark.parametrize("tied", [False, True], ids=["logits_dense", "tied"])
def test_maxtext_in_a_stand_in(tied):
    """The block "def __call__(" of the page where MaxText is not installed."""
    graph, state = nnx.split(with_hooks(StandIn)(tied))
    tokens = jax.random.randint(jax.random.key(0), (4, 7), 1, 64)
    tokens = jnp.where(jnp.arange(7)[None] < jnp.array([[7], [5], [2], [6]]), tokens, 0)
    positions = jnp.broadcast_to(jnp.arange(7), (4, 7))
    targets, weights = jnp.roll(tokens, -1, axis=1), jax.random.normal(jax.random.key(1), (4, 7))

    def ours(state):
        model = nnx.merge(graph, state)
        hidden, nothing = model(tokens, positions, None, None, skip_lm_head=True)
        assert nothing is None
        return log_probs_from_hidden(hidden, jaxppo_tunix.head_of(model), targets, temperature=0.7).log_probs

    def taken(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits / 0.7), targets[..., None], axis=-1)[..., 0]

    def theirs(state):
        return taken(nnx.merge(graph, state).logits(tokens, positions))

    found, expected = (value_and_gradients(f, [weights], state) for f in (ours, theirs))
    assert_same(found, expected, atol=2e-2 if tied else 5e-6)  # a gradient of the bf16 table is rounded to bf16
    model = nnx.merge(graph, state)
    logits = model.compute_final_logits(model(tokens, positions, None, None, skip_lm_head=True)[0])
    np.testing.assert_allclose(taken(logits), expected[0][1][0], atol=2e-2 if tied else 5e-6)


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
