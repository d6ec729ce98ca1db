"""What a user says of a head and gets from it: parameters, how logits are computed from them, statistics of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import check, check_choice, check_count, check_floating, check_number, check_type, dtype_name
from jaxppo.base.modules import narrowed, parts_of
from jaxppo.base.pytree import register

Layout = Literal["hv", "vh"]
LogitsDtype = Literal["float32", "bfloat16"]
Entropy = Literal["none", "metric", "bonus"]
LogitStat = Literal["log_z", "mean_logit", "accuracy", "sum_p2"]
# The default of statistics that were not asked for. To type checkers they are there, as the arrays of a batch are.
_ABSENT: Any = None


@register(static=["entropy_mode"])
@dataclasses.dataclass(frozen=True)
class TokenStats:
    """The statistics of a head's distribution at each token; f32 `[R, T]` each, None if not asked for.

    Args:
      log_probs: the log-probs of the targets.
      entropy: the entropy of the distribution, in nats.
      log_z: the log-sum-exp of the logits.
      mean_logit: the mean of the finite logits; columns masked by -inf are left out.
      accuracy: 1 if no token is likelier than the target, else 0.
      sum_p2: the sum of p^2 over the vocabulary, which is how often two draws agree; see `optimal_token_baseline`.
      id_log_probs: `f32[R, T, K]`, the log-probs of the ids that were given; see `log_probs_from_hidden`.
      top_ids: `i32[R, T, K]`, the likeliest ids. Among equally likely ids the lowest comes first. If the vocabulary has
        fewer than K tokens, the slots left over hold -1.
      top_log_probs: `f32[R, T, K]`, the log-probs of `top_ids`, without gradients; -inf in slots left over.
      ids: `i32[R, T, K]`, the ids of `id_log_probs`; a loss of ids refuses others.
      entropy_mode: how the entropy was computed; static. By default "bonus" if there is an entropy, else "none".

    Example:
      >>> TokenStats(jnp.zeros((1, 2))).entropy_mode
      'none'
    """

    log_probs: Float[Array, "R T"]
    entropy: Float[Array, "R T"] = _ABSENT
    log_z: Float[Array, "R T"] = _ABSENT
    mean_logit: Float[Array, "R T"] = _ABSENT
    accuracy: Float[Array, "R T"] = _ABSENT
    sum_p2: Float[Array, "R T"] = _ABSENT
    id_log_probs: Float[Array, "R T K"] = _ABSENT
    top_ids: Int[Array, "R T K"] = _ABSENT
    top_log_probs: Float[Array, "R T K"] = _ABSENT
    ids: Int[Array, "R T K"] = _ABSENT
    entropy_mode: Entropy | None = None

    def __post_init__(self) -> None:
        if self.entropy_mode is None:
            object.__setattr__(self, "entropy_mode", "none" if self.entropy is None else "bonus")


@dataclasses.dataclass(frozen=True)
class Transform:
    """z = softcap * tanh(scale * x / softcap) of x = hidden @ kernel + bias + LoRA; static."""

    dtype: LogitsDtype = "float32"  # to which x is rounded first; the gradient ignores the rounding
    softcap: float | None = None
    scale: float = 1.0


@register(static=["scale"])
@dataclasses.dataclass(frozen=True)
class LoRA:
    """A low-rank addition to a head: logits += scale * (hidden @ a) @ b. The merged kernel never exists.

    hidden @ a is summed in f32 and rounded to the dtype of a, as a layer's output is. With bf16 adapters log-probs
    therefore differ slightly from those with f32 adapters.

    Several adapters are stacked, `[A, H, r]` and `[A, r, V]`, and `adapter_ids` tells which one each row uses. One
    product serves all of them. It costs A r / H of the product with the kernel. If this is more than an eighth, sort
    the rows by adapter and make one call for each adapter.

    Args:
      a: `[H, r]`, f32 or bf16, or `[A, H, r]`; on a mesh every device has all of it.
      b: `[r, V]`, or `[A, r, V]`, sharded over V as the kernel is.
      scale: alpha / r in most libraries; it has no default, so that nobody forgets it.

    Example:
      >>> import jax.numpy as jnp
      >>> LoRA(jnp.ones((8, 2)), jnp.zeros((2, 16)), scale=0.5).scale
      0.5

    Hu et al. 2021, https://arxiv.org/abs/2106.09685
    """

    a: Float[Array, "*A H r"]
    b: Float[Array, "*A r V"]
    scale: float

    def __post_init__(self) -> None:
        check_number("lora.scale", self.scale)


@register(static=["layout", "logits_dtype", "softcap", "scale", "vocab_size", "spec"])
@dataclasses.dataclass(frozen=True)
class Head:
    """A model's head: logits = softcap(scale * (hidden @ kernel + bias + LoRA)).

    A Head is a pytree of its parameters, and the gradient with respect to a Head is a Head. A parameter without a
    gradient, such as the kernel beneath a LoRA, costs no product and no memory in the backward.

    Args:
      kernel: `[H, V]`, f32 or bf16, or `[V, H]` with layout "vh"; sharded by `parallel.kernel_spec(layout)`, or
        replicated if the tensor axis does not divide V. Its gradient has its dtype and sharding. Padding columns
        count as tokens unless `vocab_size` says where they begin.
      bias: `[V]`, sharded like the kernel's V.
      lora: an adapter of the kernel.
      layout: "hv", or "vh" for tied embeddings; must be given if H == V, else "hv" by default.
      logits_dtype: bfloat16 (a name or a dtype) rounds the product before anything else, as a sampler whose head
        multiplies in bf16 does, so that both see the same logits. The gradient ignores the rounding.
      softcap: logits become softcap * tanh(logits / softcap), before temperature.
      scale: a number that multiplies the logits before the soft-cap.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0, whatever they hold.
      spec: how the kernel is sharded, if not as `parallel.kernel_spec(layout)`.

    Raises:
      TypeError: a parameter is no array of floats.
      ValueError: shapes do not fit, a square kernel has no layout, or a number is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> Head(jnp.ones((8, 100)), vocab_size=97).layout
      'hv'
    """

    kernel: Float[Array, "H V"]
    bias: Float[Array, " V"] | None = None
    lora: LoRA | None = None
    layout: Layout | None = None
    logits_dtype: DTypeLike = "float32"
    softcap: float | None = None
    scale: float = 1.0
    vocab_size: int | None = None
    spec: P | None = None

    def __post_init__(self) -> None:
        if self.layout is None:
            shape: tuple[int, ...] = getattr(self.kernel, "shape", ())
            if len(shape) == 2 and shape[0] == shape[1]:
                raise ValueError(f"layout: got None for a kernel {shape}, expected 'hv' ([H, V]) or 'vh' ([V, H])")
            object.__setattr__(self, "layout", "hv")
        check_type("bias", self.bias, not isinstance(self.bias, str), "[V] or None; a layout is given as layout=")
        check_choice("layout", self.layout, Layout)
        object.__setattr__(self, "logits_dtype", dtype_name(self.logits_dtype))
        check_choice("logits_dtype", self.logits_dtype, LogitsDtype)
        check_number("scale", self.scale, above=0)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)
        check_type("spec", self.spec, isinstance(self.spec, P | None), "a PartitionSpec or None")
        if self.vocab_size is not None:
            check_count("vocab_size", self.vocab_size, least=1)

    @staticmethod
    def of(
        module: Any,
        *,
        layout: Layout | None = None,
        lora_scale: float | None = None,
        dtype: Any = None,
        logits_dtype: DTypeLike = "float32",
        softcap: float | None = None,
        scale: float = 1.0,
        vocab_size: int | None = None,
        spec: P | None = None,
    ) -> Head:
        """The Head of another library's module, with its layout, its bias and its adapter.

        Call it inside the loss, on the module that is differentiated. Gradients then flow to the module's parameters. A
        module does not know what its model does with the logits (a soft-cap, a scale), so give that here.

        Args:
          module: an array, nnx.Param, nnx.Linear, nnx.LoRALinear, nnx.LoRA around a Linear, nnx.Embed (tied) or
            nnx.Einsum; a parameter of Linen, boxed or not, or the parameters {"kernel", "bias"} or {"embedding"} of
            its layers, also as nnx.State; eqx.nn.Linear or eqx.nn.Embedding; the `lm_head` or `embedder` of a Tunix
            model. Each of them may have an adapter of Qwix. A Head is returned as it is.
          layout: "hv" or "vh", for an array or a parameter; other modules have their own.
          lora_scale: alpha / rank of a Qwix adapter, since no module holds it; not used for other modules.
          dtype: the dtype in which the kernel is multiplied; by default the module's, if it has one. A parameter of a
            wider dtype is rounded, as the module does, and its gradient has the parameter's own dtype.
          logits_dtype: see `Head` for this and the other options.

        Raises:
          TypeError: the module is unknown or computes logits in a way of its own, its weights are quantised, or its
            adapter is unknown.
          ValueError: the layout is not the module's, an adapter has no scale, or a Head is given with options.

        Example:
          >>> from flax import nnx
          >>> head = Head.of(nnx.Embed(100, 8, rngs=nnx.Rngs(0)), vocab_size=97)
          >>> head.kernel.shape, head.layout
          ((100, 8), 'vh')
        """
        options = logits_dtype, softcap, scale, vocab_size, spec
        if isinstance(module, Head):
            given = layout, lora_scale, dtype, dtype_name(logits_dtype), *options[1:]
            if given != (None, None, None, "float32", None, 1.0, None, None):
                raise ValueError("module: got a Head and options, expected one of them; dataclasses.replace changes it")
            return module
        parts = parts_of(module)
        if None not in (layout, parts.layout) and layout != parts.layout:
            raise ValueError(f"layout: got {layout!r} for {type(module).__name__}, expected {parts.layout!r}")
        if dtype is not None and dtype_name(dtype) not in ("float16", "bfloat16", "float32", "float64"):
            raise TypeError(f"dtype: got {dtype!r}, expected a dtype of floats such as 'bfloat16', or None")
        if lora_scale is not None:
            check_number("lora_scale", lora_scale)
        dtype = parts.dtype if dtype is None else dtype
        lora = None
        if parts.lora is not None:
            known = [scale for scale in (lora_scale, parts.lora_scale) if scale is not None]
            if len(known) != 1:
                expected = "alpha / rank of its rule" if lora_scale is None else "None, since it says its own"
                raise ValueError(f"lora_scale: got {lora_scale} for the adapter of the module, expected {expected}")
            lora = LoRA(*parts.lora, scale=known[0])
        kernel, bias = (narrowed(x, dtype) for x in (parts.kernel, parts.bias))
        return Head(kernel, bias, lora, parts.layout or layout, *options)  # type: ignore[arg-type]

    @property
    def v_dim(self) -> int:
        """The kernel's dimension of the vocabulary."""
        return 1 if self.layout == "hv" else 0

    def check(self, name: str, features: int) -> None:
        """Raises if the parameters do not fit each other, or hidden states with this many features."""
        check_floating(f"{name}.kernel", self.kernel, 2, "[H, V] or [V, H]")
        columns = self.kernel.shape[self.v_dim]
        if self.bias is not None:
            check_floating(f"{name}.bias", self.bias, 1, "[V]")
            check(f"{name}.bias", f"shape {self.bias.shape}", self.bias.shape == (columns,), f"{(columns,)}, one each")
        if self.lora is not None:
            check_type(f"{name}.lora", self.lora, isinstance(self.lora, LoRA), "LoRA or None")
            stacked = getattr(self.lora.a, "ndim", 2) == 3
            of_a, of_b, rank = ("[A, H, r]", "[A, r, V]", 3) if stacked else ("[H, r]", "[r, V]", 2)
            check_floating(f"{name}.lora.a", self.lora.a, rank, of_a)
            check_floating(f"{name}.lora.b", self.lora.b, rank, of_b)
            a, b = self.lora.a.shape, self.lora.b.shape
            check(f"{name}.lora.a", f"shape {a}", a[-2] == features, f"{of_a} with H = {features}")
            shape = (*a[:-2], a[-1], columns)
            check(f"{name}.lora.b", f"shape {b}", b == shape, f"{shape}, {of_b}")


def as_head(name: str, head: Any) -> Head:
    """The head itself, or a Head made from a bare `[H, V]` kernel."""
    if isinstance(head, Head):
        return head
    if isinstance(head, (jax.Array, np.ndarray)):
        return Head(head)  # type: ignore[arg-type]
    raise TypeError(
        f"{name}: got {type(head).__name__}, expected a jaxppo.Head or a bare [H, V] array; what a module holds beside "
        "its kernel (a bias, adapters) is given as Head.of(module) or Head(kernel, bias=..., lora=LoRA(a, b, scale))"
    )
