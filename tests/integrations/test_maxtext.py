"""MaxText's rules, batches and head, and the shape of its issue 4409.

Where MaxText is installed (0.2.5, Python 3.12 or newer; `pip install --no-deps maxtext` is enough)
its own configs/base.yml and configs/custom_mesh_and_rule are read. Otherwise this file restates
them: the rules in `test_axis_rules`, from those two; the keys of a batch, from
input_pipeline/input_pipeline_utils.py and trainers/pre_train/train.py; and the head, in
`maxtext_model`.
"""

import importlib.util
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from maxtext_model import Transformer
from maxtext_rules import AXES, MAXTEXT, OF_KERNEL, ROLE, mesh_of, roles
from plain_head import reference_from_logits

from jaxppo import PolicyLossConfig, RolloutBatch, log_probs_from_hidden, policy_loss_from_hidden
from jaxppo.integrations.maxtext import batch_of, hidden_and_head
from sharding import ParallelMesh
from sharding.audit import audit

GIB = 2**30


def configs():
    found = importlib.util.find_spec("maxtext")
    if found is None:
        pytest.skip("MaxText is not installed: it wants Python 3.12")
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    folder = Path(found.submodule_search_locations[0]) / "configs"
    return lambda name: yaml.safe_load((folder / name).read_text())


def test_the_rules_that_maxtext_ships():
    base = configs()("base.yml")
    rules = base["logical_axis_rules"]
    assert base["mesh_axes"] == AXES
    assert [rule for rule in rules if rule[0] in {name for name, _ in MAXTEXT}] == MAXTEXT
    for axis in AXES:
        mesh = mesh_of(AXES, **{axis: 2})
        if axis not in ROLE:
            with pytest.raises(ValueError, match=rf"mesh: got axes .*'{axis}' has none"):
                ParallelMesh.from_rules(mesh, rules)
            continue
        found = roles(ParallelMesh.from_rules(mesh, rules))
        assert found == dict.fromkeys(found, ()) | {ROLE[axis]: (axis,)} | (
            {"fsdp": (axis,)} if axis in OF_KERNEL else {}
        )


def test_the_custom_meshes_that_maxtext_ships():
    read = configs()
    names = [
        "cp-as-ep",
        "ep-as-cp",
        "ep-as-dp",
        "fsdp-as-dp-for-attn",
        "pipeline-large-moe",
        "pure-fsdp",
    ]
    for name in [*names, "shard-exp-on-fsdp"]:
        config = read(f"custom_mesh_and_rule/{name}.yml")
        axes = config["mesh_axes"]
        for i in range(0, len(axes), 3):
            parallel = ParallelMesh.from_rules(
                mesh_of(axes, **dict.fromkeys(axes[i : i + 3], 2)), config["logical_axis_rules"]
            )
            assert {*parallel.data, *parallel.context, *parallel.tensor} == {*axes[i : i + 3]}, name


def test_batches_by_their_keys():
    """Batches as MaxText packs them: two sequences, targets shifted already, no loss at padding."""
    data = {
        "inputs": jnp.array([[5, 6, 7, 8, 9, 0]]),
        "targets": jnp.array([[6, 7, 3, 9, 3, 0]]),
        "inputs_segmentation": jnp.array([[1, 1, 1, 2, 2, 0]]),
        "inputs_position": jnp.array([[0, 1, 2, 0, 1, 0]]),
        "targets_segmentation": jnp.array([[0, 1, 1, 2, 2, 0]]),
    }
    batch = batch_of(data, advantages=jnp.ones((1, 6)), old_log_probs=jnp.full((1, 6), -2.0))
    batch.validate(vocab_size=10)
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 1, 0]]
    assert batch.targets.tolist()[0][:5] == [6, 7, 3, 9, 3]  # each sequence's last target is real
    masked = batch_of(data | {"targets_loss_mask": jnp.array([[1, 1, 0, 1, 1, 1]])})
    assert masked.loss_mask.tolist() == [[0, 1, 0, 1, 1, 0]]
    with pytest.raises(
        ValueError, match=r"data: got keys inputs, expected targets, inputs_segmentation"
    ):
        batch_of({"inputs": data["inputs"]})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"logits_via_embedding": True},
        {
            "logits_via_embedding": True,
            "normalize_embedding_logits": True,
            "final_logits_soft_cap": 2.0,
        },
        {"final_logits_soft_cap": 2.0},  # of tied heads alone
    ],
    ids=["logits_dense", "tied", "tied, scaled, capped", "cap without effect"],
)
def test_hidden_states_to_head(config):
    graph, params = nnx.split(Transformer(**config))
    y = jax.random.normal(jax.random.key(2), (2, 4, 8))
    targets = jnp.arange(8).reshape(2, 4)

    def ours(params):
        return log_probs_from_hidden(
            *hidden_and_head(nnx.merge(graph, params), y), targets
        ).log_probs.sum()

    def theirs(params):
        return reference_from_logits(nnx.merge(graph, params).logits(y), targets).log_probs.sum()

    found, expected = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, theirs))
    # their gradient of an embedding is rounded to bf16
    tolerance = (
        {"rtol": 1e-2, "atol": 2e-2}
        if config.get("logits_via_embedding")
        else {"rtol": 1e-4, "atol": 1e-5}
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), found[1], expected[1])


class Calls(Transformer):
    """Notes its hidden states as MaxText's decoder does."""

    def __call__(self, decoder_input_tokens, decoder_positions, decoder_segment_ids):
        self.decoder.sow(
            nnx.Intermediate, "hidden_states", self.token_embedder(decoder_input_tokens)
        )


def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [block] = [block for block in blocks if "hidden_and_head(model, output)" in block]
    mesh = mesh_of(AXES, fsdp=2, tensor=2)
    ids = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 8)), jnp.int32)
    ones = jnp.ones_like(ids)
    x = jnp.full(ids.shape, -1.0)
    data = {
        "inputs": ids,
        "targets": jnp.roll(ids, -1, axis=1),
        "inputs_position": jnp.cumsum(ones, 1) - 1,
    }
    data |= {"inputs_segmentation": ones, "targets_segmentation": ones}
    names = {
        "config": SimpleNamespace(logical_axis_rules=MAXTEXT),
        "mesh": mesh,
        "model": Calls(),
        "data": data,
    }
    names |= {"advantages": -x, "old": x, "ParallelMesh": ParallelMesh, "nnx": nnx}
    names |= {
        "policy_loss_from_hidden": policy_loss_from_hidden,
        "PolicyLossConfig": PolicyLossConfig,
    }
    exec(block, names)
    logits = names["model"].logits(names["output"])
    ratio = jnp.exp(reference_from_logits(logits, data["targets"]).log_probs + 1)
    np.testing.assert_allclose(
        names["loss"], jnp.maximum(-ratio, -jnp.clip(ratio, 0.8, 1.2)).mean(), rtol=1e-5
    )


SHAPE = {"S": 32768, "V": 151936, "H": 4096}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 16}, {"fsdp": 4, "tensor": 4}, {"fsdp": 4, "context": 4}], ids=str
)
def test_issue_4409(sizes):
    """One row of 32768 tokens for each of the chips that hold rows, a vocabulary of 151936: logits
    of up to 20 GB a chip in f32. Under MaxText's rules for its twelve axes, on a described
    v5p:2x2x4. Beside what a step with FSDP holds of the kernel and of hidden states, tiles take at
    most half of `memory`.
    """
    devices = np.array(topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices)
    mesh = jax.sharding.Mesh(devices.reshape([sizes.get(axis, 1) for axis in AXES]), AXES)
    parallel = ParallelMesh.from_rules(mesh, MAXTEXT)
    S, V, H = SHAPE.values()
    R = parallel.data_size

    def described(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    ids, floats = (
        described((R, S), dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32)
    )
    one = described((R, 1), jnp.int32, parallel.rows_spec)
    batch = RolloutBatch(*[ids] * 4, floats, one, advantages=floats, old_log_probs=floats)
    hidden = described((R, S, H), jnp.bfloat16, parallel.hidden_spec)
    kernel = described((H, V), jnp.bfloat16, parallel.kernel_spec())

    def loss(hidden, kernel, batch):
        config = PolicyLossConfig(entropy_coef=0.01)
        memory = 1 * GIB
        return policy_loss_from_hidden(
            hidden, kernel, batch, config, parallel=parallel, memory=memory
        )[0]

    found = audit(jax.value_and_grad(loss, (0, 1)), hidden, kernel, batch)
    tokens = R * S // parallel.data_size // parallel.context_size
    gathered = 2 * H * V // parallel.tensor_size
    in_order = 2 * 2 * tokens * H  # hidden states, those with loss first, and their gradients
    dhidden = 4 * tokens * H
    assert found.temp_bytes < gathered + in_order + dhidden + 0.5 * GIB, found.temp_bytes / GIB


def test_a_quantised_product_is_refused():
    """Since pull request 5313 MaxText multiplies such a head in fp8 or int8, while its kernel
    stays float.
    """
    hidden = jnp.ones((1, 2, 8))
    with pytest.raises(TypeError, match="quantize_logits_proj with quantization 'fp8_full'"):
        hidden_and_head(Transformer(quantize_logits_proj=True, quantization="fp8_full"), hidden)
    for config in ({"quantize_logits_proj": True, "quantization": ""}, {"quantization": "int8"}):
        assert hidden_and_head(Transformer(**config), hidden)[1].layout == "hv"
