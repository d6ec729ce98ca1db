"""The functions of docs/pull_requests/maxtext.md in MaxText's adapter beside the adapter as it is, and its memory.

MaxText and Tunix come from checkouts on the path, as the page says. MaxText is not installed at night: there the
functions run in a stand-in for its adapter.
"""

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pull_request_cases import GIB, assert_same, value_and_gradients
from pull_requests import defined

from jaxppo import ParallelMesh, log_probs_from_hidden
from jaxppo.integrations import tunix as jaxppo_tunix
from sharding.audit import audit

pytestmark = pytest.mark.nightly


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
