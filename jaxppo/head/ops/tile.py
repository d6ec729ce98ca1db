"""One tile of the work: some tokens against some columns of the vocabulary, and what a gradient rule knows of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.softmax import Cotangents, Residuals, Sums
from jaxppo.head.transform import Transform
from jaxppo.sharding import wider_dtype

if TYPE_CHECKING:
    from jaxppo.head.schedules.walk import Inputs
    from jaxppo.head.tiles import Budget


class Features(NamedTuple):
    """What tokens multiply parameters with, or something for each of them: hidden states, and hidden @ lora.a."""

    hidden: Any
    low: Any


class Parameters(NamedTuple):
    """A head's parameters of the vocabulary, or something for each of them; None where there is none.

    `lora_b` lies as the kernel does: `[r, V]` beside `[H, V]`, `[V, r]` beside `[V, H]`.
    """

    kernel: Any
    bias: Any
    lora_b: Any

    def each(self, fn: Callable[..., Any], *others: Parameters) -> Parameters:
        """fn(is_kernel, parameter, ...) for each one that is there."""
        values = zip(self, *others, strict=True)
        return Parameters(*(None if x[0] is None else fn(i == 0, *x) for i, x in enumerate(values)))


def as_row(x: Any) -> Any:
    """`[1, B]` of `[B]`, to stand beside `[C, B]`; kernels hold it so already, and True stays what it is."""
    return x[None] if getattr(x, "ndim", 0) == 1 else x


class Block(NamedTuple):
    """Some columns of the vocabulary."""

    parameters: Parameters  # [H, B] or [B, H]; f32[B]; [r, B] or [B, r]
    columns: jax.Array  # i32[B], their vocabulary ids
    valid: Any  # bool[B], False for duplicates of other blocks and for padding; True where there are none of either
    teacher: Any = None  # the same columns of another head's


class Tile(NamedTuple):
    """Some tokens before a block."""

    rows: Features  # [C, H] and [C, r]
    block: Block
    targets: jax.Array  # i32[C]
    place: Any  # (i32[C], bool[C]), the target's column, and whether the block holds it
    temperature: Any  # a scalar, or [C]; None for 1
    nucleus: Any  # bool[C, B], the columns that the sampler could draw, the target's included; or None
    fresh: Any = None  # bool[C], the tokens whose sums are asked for; None for all

    @property
    def is_target(self) -> jax.Array:
        """One-hot, `[C, B]`."""
        return (self.targets[:, None] == as_row(self.block.columns)) & as_row(self.block.valid)

    def after(self, count: int) -> Tile:
        """The tokens after the first `count`."""
        part = lambda x: x[count:] if getattr(x, "ndim", 0) else x  # noqa: E731
        fields: Any = (x if x is self.block else jax.tree.map(part, x) for x in self)
        return Tile(*fields)

    def tempered(self, x: jax.Array) -> jax.Array:
        """x `[C, B]` over the temperature."""
        if self.temperature is None:
            return x
        return x / (self.temperature[:, None] if self.temperature.ndim else self.temperature)


@dataclasses.dataclass(frozen=True)
class Form:
    """How logits come of products; static.

    Args:
      layout: "hv" or "vh".
      transform: of products, before the temperature.
      lora_scale: of the adapter.
      precision: of products, as in `jnp.dot`; of f32 operands "highest" by default.
      vocab_size: columns of the whole vocabulary that exist.
    """

    layout: str
    transform: Transform
    lora_scale: float
    precision: str | None
    vocab_size: int

    @property
    def v_dim(self) -> int:
        """The kernel's dimension of the vocabulary."""
        return 1 if self.layout == "hv" else 0

    def dot(self, a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
        """A product with an f32 result, contracting dimension dims[0] of a with dims[1] of b."""
        dtype = wider_dtype(a.dtype, b.dtype)
        # accelerators multiply f32 in one bf16 or TF32 pass where nothing is said
        precision = self.precision or ("highest" if dtype == jnp.float32 else None)
        contract = (((dims[0],), (dims[1],)), ((), ()))
        return lax.dot_general(
            a.astype(dtype), b.astype(dtype), contract, precision=precision, preferred_element_type=jnp.float32
        )


class Op:
    """The arithmetic of a tile that an implementation may replace; the products of the backward are XLA's."""

    leaves_logits: ClassVar[bool] = True  # of a forward, in memory; an op that does not is given all columns at once

    def unsupported(self, budget: Budget, form: Form, inputs: Inputs) -> str | None:
        """What of a call it does not support, in words; None where it supports all."""
        return None

    def forward(self, form: Form, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, Any]:
        """The softmax sums of the tile, those that `like` has, and its f32 products hidden @ kernel + bias + LoRA.

        The products may be None where `keep` does not ask for them.
        """
        raise NotImplementedError

    def dlogits(
        self,
        form: Form,
        tile: Tile,
        residuals: Residuals,
        cotangents: Cotangents,
        x: jax.Array | None,
        dtype: Any,
        of_bias: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """d loss / d (hidden @ kernel), `[C, B]` of the dtype, and its f32 sum over the tokens where `of_bias`.

        It is 0 where nothing counts, and where the product is -inf: such a column is masked. x holds the products of
        the first tokens, or of all; the others are computed again.
        """
        raise NotImplementedError


def feature_gradients(form: Form, dz: jax.Array, block: Block, needs: Features) -> Features:
    """f32 `[C, H]` and `[C, r]`, where `needs` is not None."""
    kernel, _, lora_b = block.parameters
    hidden = None if needs.hidden is None else form.dot(dz, kernel, (1, form.v_dim))
    low = None if needs.low is None else form.lora_scale * form.dot(dz, lora_b, (1, form.v_dim))
    return Features(hidden, low)


def parameter_gradients(form: Form, dz: jax.Array, factor: Features, needs: Parameters) -> Parameters:
    """f32 gradients of the block's kernel and lora_b, in their layout, where `needs` is not None."""
    return Parameters(
        None if needs.kernel is None else _outer(form, dz, factor.hidden),
        None,
        None if needs.lora_b is None else form.lora_scale * _outer(form, dz, factor.low),
    )


def _outer(form: Form, dz: jax.Array, factor: jax.Array) -> jax.Array:
    if form.layout == "vh":
        return form.dot(dz, factor, (0, 0))
    return form.dot(factor, dz, (1 if _transposes(form, factor) else 0, 0))


def as_factor(form: Form, rows: Features) -> Features:
    """Features as `parameter_gradients` takes them, to be made outside a loop over the vocabulary.

    For "hv" in f32 transposed: XLA for CPUs takes a tenth to a third longer for a product whose left factor is
    contracted along its rows. Of bf16 it cannot run the product if it transposes by layout.
    """
    return jax.tree.map(lambda x: x.T if _transposes(form, x) else x, rows)


def _transposes(form: Form, rows: jax.Array) -> bool:
    return form.layout == "hv" and rows.dtype == jnp.float32
