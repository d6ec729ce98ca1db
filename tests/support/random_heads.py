"""Random heads and hidden states for the search, and all ways to compute jaxppo's loss from
them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from oracle import OracleHead, OracleSample
from oracle.head import logits
from oracle.step import with_stats
from policy_steps import with_selected
from random_losses import between
from random_steps import Step, f32, step_samples

from jaxppo import (
    Head,
    LoRA,
    log_probs_from_hidden,
    log_probs_from_logits,
    policy_loss,
    policy_loss_from_hidden,
)

H, RANK, NUCLEUS, TEMPERATURE = 8, 2, 3, 0.75
# "one call" is policy_loss_from_hidden, which takes one pass or two as the loss allows.
WAYS = ("one call", "statistics first", "logits")


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """The static description of a head and of a call."""

    way: str
    columns: int
    padding: int
    layout: str
    dtype: str
    bias: bool
    lora: bool
    frozen: bool
    softcap: float | None
    scale: float
    temperature: str
    nucleus: bool

    @property
    def vocab_size(self) -> int:
        return self.columns - self.padding


heads = st.builds(
    HeadShape,
    st.sampled_from(WAYS),
    st.sampled_from([24, 29, 530]),
    st.sampled_from([0, 5]),
    st.sampled_from(["hv", "vh"]),
    st.sampled_from(["float32", "bfloat16"]),
    *(st.booleans() for _ in range(3)),
    st.none() | between(2, 20),
    st.just(1.0) | between(0.25, 2),
    st.sampled_from(["none", "number", "traced", "by token"]),
    st.booleans(),
)


@dataclasses.dataclass
class HeadStep:
    """A step with its hidden states (or logits instead), and the head for the oracle.

    `arrays` are jaxppo's: kernel, bias, a and b where the head has them, with garbage in columns
    that do not exist.
    """

    samples: list[OracleSample]
    head: OracleHead
    arrays: dict[str, Any]


def held(x: Any, dtype: str) -> np.ndarray:
    """The numbers rounded to the dtype, in float64."""
    return np.asarray(x, jnp.dtype(dtype)).astype(np.float64)


def head_step(step: Step, shape: HeadShape, unusable: bool = False) -> HeadStep:
    """The numbers of a step and its head.

    Logits are hidden states with a kernel that changes nothing.

    With `unusable`, some log-probs of the old policy and the sampler are not finite.
    """
    rng = step.rng(2)
    v = shape.vocab_size
    columns = shape.columns
    sizes: dict[str, tuple[int, ...]] = {"kernel": (H, columns)}
    sizes |= ({"bias": (columns,)} if shape.bias else {}) | (
        {"a": (H, RANK), "b": (RANK, columns)} if shape.lora else {}
    )
    # adapters are trained in f32
    dtypes = dict.fromkeys(sizes, "float32") | {"kernel": shape.dtype}
    arrays = {k: held(rng.normal(size=size), dtypes[k]) for k, size in sizes.items()}
    scales = {"lora_scale": 0.5, "softcap": shape.softcap, "scale": shape.scale}
    head = OracleHead(**arrays, **scales, vocab_size=v)
    hidden = [held(rng.normal(size=(s.prompt + len(s.mask), H)), shape.dtype) for s in step.samples]
    if shape.way == "logits":
        hidden = [held(logits(h, head), shape.dtype) for h in hidden]
        head = OracleHead(np.eye(v))
        arrays = {}
    found = []
    for h, sample in zip(hidden, step_samples(step), strict=True):
        n = len(h)
        temperature = {"none": 1.0, "by token": f32(rng.uniform(0.5, 2, n))}.get(
            shape.temperature, TEMPERATURE
        )
        ids = rng.integers(-1, v, (n, NUCLEUS)) if shape.nucleus else None
        of_head = {
            "hidden": h,
            "targets": rng.integers(0, v, n),
            "temperature": temperature,
            "nucleus_ids": ids,
        }
        found.append(dataclasses.replace(sample, **of_head))
    of_loss = step_samples(step, [s.log_probs for s in with_stats(found, head)], unusable=unusable)
    names = ("hidden", "targets", "temperature", "nucleus_ids")
    of_head = [{name: getattr(s, name) for name in names} for s in found]
    samples = [dataclasses.replace(s, **more) for s, more in zip(of_loss, of_head, strict=True)]
    for k, x in arrays.items():
        if k != "a":
            x[..., v:] = step.garbage
    given = {k: x.astype(jnp.dtype(dtypes[k])) for k, x in arrays.items()}
    if shape.layout == "vh" and given:
        given["kernel"] = given["kernel"].T
    return HeadStep(with_stats(samples, head), head, given)


def head_of(shape: HeadShape, arrays: dict[str, Any]) -> Head:
    """jaxppo's head; its kernel and bias are constants where the shape says so."""
    kernel, bias = (
        lax.stop_gradient(arrays.get(k)) if shape.frozen else arrays.get(k)
        for k in ("kernel", "bias")
    )
    lora = LoRA(arrays["a"], arrays["b"], 0.5) if shape.lora else None
    options = {"softcap": shape.softcap, "scale": shape.scale, "vocab_size": shape.vocab_size}
    return Head(kernel, bias=bias, lora=lora, layout=shape.layout, **options)


def loss_from(
    hidden: Any, arrays: Any, batch: Any, mine: Any, shape: HeadShape, parallel: Any, given: dict
) -> Any:
    """Loss and metrics, in the shape's way; `given` are temperature, nucleus_ids, normalizer and
    selection.
    """
    temperature = given["temperature"]
    ids = given["nucleus_ids"]
    of_loss = {"parallel": parallel, "normalizer": given["normalizer"]}
    batch = with_selected(batch, given["selected"])
    if shape.way == "one call":
        options = {"temperature": temperature, "nucleus_ids": ids, **of_loss}
        return policy_loss_from_hidden(hidden, head_of(shape, arrays), batch, mine, **options)
    return policy_loss(
        stats_from(hidden, arrays, batch, mine, shape, parallel, given), batch, mine, **of_loss
    )


def stats_from(
    hidden: Any, arrays: Any, batch: Any, mine: Any, shape: HeadShape, parallel: Any, given: dict
) -> Any:
    """The statistics of the loss tokens, from hidden states or logits."""
    options = {
        "parallel": parallel,
        "temperature": given["temperature"],
        "entropy": mine.entropy_mode,
    }
    options |= {"where": batch.loss_mask.astype(jnp.float32) > 0}
    ids = given["nucleus_ids"]
    if shape.way != "logits":
        return log_probs_from_hidden(
            hidden, head_of(shape, arrays), batch.targets, nucleus_ids=ids, **options
        )
    return log_probs_from_logits(
        hidden, batch.targets, nucleus_ids=ids, vocab_size=shape.vocab_size, **options
    )
