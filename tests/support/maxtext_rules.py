"""MaxText's logical axis rules, and the roles that they give to mesh axes.

`MAXTEXT` restates the rules of src/maxtext/configs/base.yml in August 2026 (commit e591f30): those
for logits and head kernels, and some others.
"""

import jax
import numpy as np

AXES = [
    *(
        "diloco",
        "data",
        "stage",
        "fsdp",
        "fsdp_transpose",
        "context",
        "context_usp_ulysses",
        "context_autoregressive",
    ),
    *("tensor", "tensor_sequence", "expert", "autoregressive"),
]
MAXTEXT = [
    ["circular_repeats", []],
    ["activation_embed_and_logits_batch", ["data", "stage", "fsdp", "fsdp_transpose", "expert"]],
    [
        "activation_embed_and_logits_batch_sequence",
        ["data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"],
    ],
    ["activation_vocab", ["tensor", "tensor_sequence"]],
    ["activation_vocab", ["tensor"]],
    ["activation_vocab", "tensor_sequence"],
    ["vocab", ["tensor", "tensor_sequence", "autoregressive"]],
    ["embed_vocab", ["fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"]],
    ["activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_length", ["context", "context_usp_ulysses"]],
    ["activation_norm_length", ["tensor_sequence", "context", "context_usp_ulysses"]],
    ["activation_embed", ["tensor"]],
    ["activation_stage", "stage"],
    ["embed", ["fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"]],
    ["embed", ["fsdp", "context", "context_usp_ulysses", "expert"]],
    ["layers", "stage"],
    ["diloco", "diloco"],
]
ROLE = {
    "data": "data", "stage": "data", "fsdp": "data", "fsdp_transpose": "data", "expert": "data",
    "context": "context", "context_usp_ulysses": "context",
    "tensor": "tensor", "tensor_sequence": "tensor", "autoregressive": "tensor",
}  # fmt: skip
OF_KERNEL = {"fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"}


def mesh_of(axes, **sizes):
    """A mesh of those axes. Axes without a given size have size 1."""
    shape = tuple(sizes.get(name, 1) for name in axes)
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, tuple(axes), kinds, devices=jax.devices()[: int(np.prod(shape))])


def roles(parallel):
    return {role: getattr(parallel, role) for role in ("data", "context", "tensor", "fsdp")}
