"""A training step of a Qwen3-shaped model on described arrays, with scanned layers, as a pod
would compile it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from examples.planner.pod_sizes import ModelSizes
from jaxppo import (
    Head,
    Normalizer,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    accumulate_gradients,
    policy_loss_from_hidden,
)
from jaxppo.batch.trees import Paths
from jaxppo.sharding import Audit, audit, known_device

QUERIES = 512  # the number of queries that are compared with all keys at a time
CONFIG = PolicyLossConfig(entropy_coef=0.01)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Gradients of a PPO loss and one AdamW update: bf16 products, f32 parameters and moments,
    every layer recomputed.

    Args:
      sizes: the model.
      tokens: the tokens of a row on each shard of the context axes.
      parallel: the mesh, over real or described devices.
      rows: the rows of each data shard in a micro-batch.
      micro_batches: K, the number of micro-batches that run one after the other. Their gradients
        are summed in f32.
      memory: bytes that the head may take. None: its default.
      trees: whether rows share prefixes. Attention then follows the parents of segments.
    """

    sizes: ModelSizes
    tokens: int
    parallel: ParallelMesh
    rows: int = 1
    micro_batches: int = 1
    memory: int | None = None
    trees: bool = False

    def __post_init__(self) -> None:
        tensor = self.parallel.tensor_size
        for what, size in (("heads", self.sizes.heads), ("kv_heads", self.sizes.kv_heads)):
            if size % tensor:
                raise ValueError(
                    f"mesh: got {tensor} tensor shards, expected a divisor of the {size} {what}"
                )

    def _place(self, x: jax.Array, *roles: str | None) -> jax.Array:
        return lax.with_sharding_constraint(x, self.parallel.sharding(self._spec(roles)))

    def _spec(self, roles: tuple[str | None, ...]) -> P:
        return P(*((getattr(self.parallel, role) or None) if role else None for role in roles))

    def _describe(self, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.parallel.sharding(spec))

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """f32 parameters."""
        shapes = self.sizes.parameters.items()
        return {
            name: self._describe(shape, jnp.float32, self._spec(roles))
            for name, (shape, roles) in shapes
        }

    @property
    def batch(self) -> RolloutBatch:
        """One micro-batch `[R, T]`, or all of them `[K, R, T]`."""
        parallel = self.parallel
        K = self.micro_batches
        lead = (K,) if K > 1 else ()
        R = self.rows * parallel.data_size
        T = self.tokens * parallel.context_size

        def described(dtype: Any, width: int, spec: P) -> jax.ShapeDtypeStruct:
            return self._describe((*lead, R, width), dtype, P(*(None for _ in lead), *spec))

        ids, x = (described(dtype, T, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32))
        one = described(jnp.int32, 2 if self.trees else 1, parallel.rows_spec)
        given: dict[str, Any] = {"advantages": x, "old_log_probs": x}
        if self.trees:
            given["parents"] = one
        if lead:
            given["micro_batches"] = K
        layout = {
            "context_layout": parallel.context_layout,
            "context_shards": parallel.context_size,
        }
        return RolloutBatch(ids, ids, ids, ids, x, one, **given, **layout)

    def hidden(self, params: dict[str, jax.Array], batch: RolloutBatch) -> jax.Array:
        """Final hidden states `[R, T, H]`."""
        sizes = self.sizes
        per_layer = {}
        for name, (_, roles) in sizes.parameters.items():
            if roles[0] is None and len(roles) > 1:
                per_layer[name] = params[name]
        table = self._place(params["embed"].astype(jnp.bfloat16), None, "tensor")
        x = self._place(table[batch.tokens], "data", "context", None)
        angles = _angles(batch.positions, sizes)

        @jax.checkpoint  # a layer's input is all that is kept of it
        def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            p = {name: w.astype(jnp.bfloat16) for name, w in p.items()}
            x = x + self._attention(_norm(x, p["attention_norm"]), p, angles, batch)
            y = _norm(x, p["mlp_norm"])
            gated = self._place(
                jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), "data", "context", "tensor"
            )
            return self._place(x + gated @ p["down"], "data", "context", None), None

        x, _ = lax.scan(layer, x, per_layer)
        return _norm(x, params["norm"].astype(jnp.bfloat16))

    def _attention(
        self, x: jax.Array, p: dict[str, jax.Array], angles: Any, batch: RolloutBatch
    ) -> jax.Array:
        """Causal attention.

        Keys and values are gathered over the context axis, whatever its layout.
        """
        sizes = self.sizes
        shards = self.parallel.context_size
        R, T = x.shape[:2]

        def split(y):
            return self._place(
                y.reshape(R, T, -1, sizes.head_dim), "data", "context", "tensor", None
            )

        q = _rotate(_norm(split(x @ p["q"]), p["q_norm"]), angles)
        k = _rotate(_norm(split(x @ p["k"]), p["k_norm"]), angles)
        k, v = (self._place(y, "data", None, "tensor", None) for y in (k, split(x @ p["v"])))
        each = math.gcd(QUERIES, T // shards)

        def chunks(y: jax.Array, *roles: str | None) -> jax.Array:
            """Reshapes `[R, T, ...]` to `[chunks, R, shards, each, ...]`; no token changes its
            context shard.
            """
            y = y.reshape(R, shards, -1, each, *y.shape[2:])
            return jnp.moveaxis(self._place(y, "data", "context", None, None, *roles), 2, 0)

        paths = batch.paths
        keys = jax.tree.map(lambda y: y[:, None], paths)

        @jax.checkpoint
        def attend(_: None, given: tuple[jax.Array, Paths]) -> tuple[None, jax.Array]:
            q, queries = given
            grouped = q.reshape(*q.shape[:3], sizes.kv_heads, -1, sizes.head_dim)
            scores = jnp.einsum(
                "rcqngd,rtnd->rcngqt", grouped, k, preferred_element_type=jnp.float32
            )
            scores = jnp.where(
                queries.attends(keys)[:, :, None, None], scores * sizes.head_dim**-0.5, -1e30
            )
            weights = jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16)
            return None, jnp.einsum("rcngqt,rtnd->rcqngd", weights, v).reshape(q.shape)

        _, y = lax.scan(attend, None, (chunks(q, "tensor", None), jax.tree.map(chunks, paths)))
        y = jnp.moveaxis(y, 0, 2).reshape(R, T, -1)
        return self._place(y, "data", "context", "tensor") @ p["out"]

    def head(self, params: dict[str, jax.Array]) -> Head:
        """The head, with a bf16 kernel."""
        layout = "vh" if self.sizes.tied else "hv"
        kernel = params["embed" if self.sizes.tied else "head"].astype(jnp.bfloat16)
        return Head(kernel, layout=layout, spec=self.parallel.kernel_spec(layout))

    def loss(
        self, params: dict[str, jax.Array], given: tuple[RolloutBatch, Normalizer | None]
    ) -> tuple[Any, Any]:
        """The loss and the metrics of a batch, or of one micro-batch with the step's
        denominators.
        """
        batch, whole = given
        options: Any = {"parallel": self.parallel, "normalizer": whole, "memory": self.memory}
        return policy_loss_from_hidden(
            self.hidden(params, batch), self.head(params), batch, CONFIG, **options
        )

    def gradients(self, params: dict[str, jax.Array], batch: RolloutBatch) -> tuple[jax.Array, Any]:
        """The step's loss and its gradients."""
        if self.micro_batches == 1:
            (loss, _), found = jax.value_and_grad(self.loss, has_aux=True)(params, (batch, None))
        else:
            whole = Normalizer.of(CONFIG, batch, parallel=self.parallel)
            (loss, _), found = accumulate_gradients(self.loss, (batch, whole))(params)
        return loss, found

    def __call__(self, params: Any, moments: Any, batch: RolloutBatch) -> Any:
        """Returns new parameters, new moments and the loss.

        `moments` is (first, second), each like the parameters.
        """
        loss, gradients = self.gradients(params, batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, moments[1], gradients)

        def adam(w, m, v):
            return w - 1e-6 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w)

        return jax.tree.map(adam, params, first, second), (first, second), loss

    @property
    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters, moments and batch on one device."""
        params, moments, batch = (
            sum(map(_shard_bytes, jax.tree.leaves(x))) for x in self.arguments
        )
        return {"parameters, f32": params, "AdamW's moments, f32": moments, "batch": batch}

    @property
    def jitted(self) -> Callable[..., Any]:
        """The step as a trainer compiles it: the new state is written over the old one."""
        shardings = jax.tree.map(lambda x: x.sharding, self.params)
        return jax.jit(
            self, donate_argnums=(0, 1), out_shardings=(shardings, (shardings, shardings), None)
        )

    @property
    def arguments(self) -> tuple[Any, Any, RolloutBatch]:
        return self.params, (self.params, self.params), self.batch


def _shard_bytes(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a step fits a device.

    Args:
      parts: bytes by what they are for.
      needed: their sum. If the compiler refused the step for lack of memory, it holds the
        compiler's own figure.
      available: bytes of the device; None if unknown.
      step: audit of the whole step; None if the compiler refused it.
      loss: audit of the loss alone, with its gradients.
    """

    parts: dict[str, int]
    needed: int
    available: int | None
    step: Audit | None
    loss: Audit

    @property
    def fits(self) -> bool | None:
        if self.available is None:
            return None
        return self.step is not None and self.needed <= self.available

    def __str__(self) -> str:
        def size(what, n):
            return f"{what:<44}{n / GIB:9.3f} GiB"

        lines = ["per device", *(size(what, n) for what, n in self.parts.items())]
        lines.append(size("  the loss on its own, of these", self.loss.temp_bytes))
        verdict = {None: "memory unknown", True: "it fits", False: "it does not fit"}[self.fits]
        of = "" if self.available is None else f" of {self.available / GIB:.0f} GiB"
        lines += [f"{size('in all', self.needed)}{of}: {verdict}", ""]
        whole = self.step and self.step.time
        part = self.loss.time
        if whole and part:
            for what, time in (("the whole step", whole), ("the loss on its own, of it", part)):
                lines.append(
                    f"{what:<44}{time.compute:9.2f} ms computing, {time.collectives:.2f} ms in"
                    " collectives"
                )
        lines += [f"the loss: {note}" for note in self.loss.notes]
        for c, times in sorted(
            Counter(self.loss.collectives).items(), key=lambda item: -item[0].bytes
        ):
            over = "unknown axes" if c.axes is None else ", ".join(c.axes)
            each = " each turn of a loop" if c.in_loop else ""
            lines.append(f"  {times} x {c.op} over {over}, {c.bytes / 2**20:.3f} MiB{each}")
        return "\n".join(lines)


def refused_bytes(error: jax.errors.JaxRuntimeError) -> int | None:
    """The bytes of temporaries for which the TPU compiler refused a program; None where it had
    another reason.
    """
    found = re.search(r"required for HLO temporaries \(([\d.]+)([GT])\) exceeds", str(error))
    if found is None:
        return None
    return int(float(found[1]) * {"G": GIB, "T": 1024 * GIB}[found[2]])


def held(step: TrainStep) -> tuple[dict[str, int], Audit | None]:
    """Bytes that a device must hold, by what they are for, and the audit of the step, None if it
    does not fit.
    """
    parts = step.bytes_held
    rest = "activations, gradients and other temporaries"
    try:
        found = audit(step.jitted, *step.arguments)
    except jax.errors.JaxRuntimeError as error:
        refused = refused_bytes(error)
        if refused is None:
            raise
        return parts | {rest: refused}, None
    return parts | {rest: found.temp_bytes}, found


def fit(step: TrainStep, loss: Audit) -> Fit:
    """Compiles the step and adds up what a device must hold.

    `loss`: the audit of the loss alone.
    """
    # described ones do not report their memory
    device = known_device(step.parallel.mesh.devices.flat[0].device_kind)
    parts, found = held(step)
    return Fit(parts, sum(parts.values()), device and device.memory, found, loss)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
    return y * lax.broadcast_to_rank(scale, y.ndim)


def _angles(positions: jax.Array, sizes: ModelSizes) -> tuple[jax.Array, jax.Array]:
    half = sizes.head_dim // 2
    rates = sizes.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * rates[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
