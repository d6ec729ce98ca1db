"""Reads a head from modules of Flax, Equinox, Tunix and Qwix.

It imports none of these packages: their objects can exist only if the program has imported them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

_DOT_GENERAL = jax.lax.dot_general  # before Qwix or another package patches it during a call
_EXPECTED = (
    "an array, nnx.Param, nnx.Linear, nnx.LoRALinear, nnx.LoRA, nnx.Embed, nnx.Einsum, a Linen parameter or the "
    "parameters of an nn.Dense or nn.Embed, eqx.nn.Linear, eqx.nn.Embedding, or a Tunix lm_head or embedder"
)
_QWIX_NOTES = ("qwix_path", "qwix_rngs", "disable_quant_stats_update")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a head in a module.

    Args:
      kernel: `[H, V]` or `[V, H]`.
      layout: "hv" or "vh", None where the module does not say.
      bias: `[V]`.
      lora: a `[H, r]` and b `[r, V]`.
      lora_scale: of the adapter, None where the module does not say.
      dtype: the dtype in which the module multiplies, None where it does not say.
    """

    kernel: Any
    layout: str | None = None
    bias: Any = None
    lora: tuple[Any, Any] | None = None
    lora_scale: float | None = None
    dtype: Any = None


def parts_of(module: Any) -> Parts:
    """The parts of a head that a framework's module, variable or dictionary of parameters holds.

    Args:
      module: see `Head.of`.

    Raises:
      TypeError: an unknown object, quantised weights, unknown adapters.
    """
    for found in (_from_wrapped, _from_mapping, _from_nnx, _from_equinox, _from_tunix):
        parts = found(module)
        if parts is not None:
            return parts
    if _is(module, "flax.linen", "Module"):
        _refuse(module, "which holds no parameters, expected those of its variables['params']")
    if _is(module, "equinox.nn", "Shared"):
        _refuse(module, "expected one of the modules that calling it gives")
    return _refuse(module, f"expected {_EXPECTED}")


def narrowed(x: Any, dtype: Any) -> Any:
    """x in the dtype in which a module multiplies, if that is narrower; a wider dtype would not change a product."""
    if x is None or dtype is None or jnp.dtype(dtype).itemsize >= x.dtype.itemsize:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return x.astype(dtype)


def _refuse(module: Any, why: str) -> NoReturn:
    kind = type(module)
    raise TypeError(f"module: got {kind.__module__}.{kind.__qualname__}, {why}")


def _class(package: str, name: str) -> Any:
    """The class of a package that somebody imported."""
    found = getattr(sys.modules.get(package), name, None)
    return found if isinstance(found, type) else None


def _is(x: Any, package: str, name: str) -> bool:
    kind = _class(package, name)
    return kind is not None and isinstance(x, kind)


def _value(where: str, x: Any) -> Any:
    """The array of floats within a variable or box; raises a TypeError that names any other content."""
    while _is(x, "flax.nnx", "Variable") or _is(x, "flax.core.meta", "AxisMetadata"):
        x = x.get_value() if _is(x, "flax.nnx", "Variable") else x.value
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        kind = type(x)
        raise TypeError(
            f"{where}: got {kind.__module__}.{kind.__qualname__}, expected an array of floats; quantised and "
            "wrapped weights must be converted first"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(f"{where}: got {x.dtype}, quantised weights, expected float32, bfloat16 or float16")
    return x


def _adapter(where: str, name: str, holder: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The adapter that Qwix's LoraProvider, which Tunix uses, puts beside a parameter."""
    a, b = (holder.get(f"{name}_lora_{which}") for which in "ab")
    if a is None and b is None:
        return None
    if a is None or b is None:
        raise TypeError(f"{where}: got one of {name}_lora_a and {name}_lora_b, expected both")
    return _value(f"{where}.{name}_lora_a", a), _value(f"{where}.{name}_lora_b", b)


def _check_nothing_else(where: str, names: Collection[str], known: Collection[str]) -> None:
    left = sorted(set(names) - set(known))
    if left:
        raise TypeError(f"{where}: got {', '.join(left)} beside its kernel, expected {', '.join(known)} at most")


def _with_adapters(name: str, *others: str) -> tuple[str, ...]:
    return name, f"{name}_lora_a", f"{name}_lora_b", *others


# The packages, one after the other.


def _from_wrapped(x: Any) -> Parts | None:
    """An array, a variable or a box around one."""
    boxed = _is(x, "flax.nnx", "Variable") or _is(x, "flax.core.meta", "AxisMetadata")
    if not boxed and not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return None
    return Parts(_value("module", x))


def _from_mapping(x: Any) -> Parts | None:
    """The parameters of nn.Dense or nn.Embed, of nnx.Linear or nnx.Embed as an nnx.State, adapters of Qwix included."""
    if not isinstance(x, Mapping):
        return None
    if "kernel" in x:
        _check_nothing_else("module", x, _with_adapters("kernel", "bias"))
        bias = None if x.get("bias") is None else _value("module['bias']", x["bias"])
        return Parts(_value("module['kernel']", x["kernel"]), "hv", bias, _adapter("module", "kernel", x))
    if "embedding" in x:
        _check_nothing_else("module", x, ("embedding",))
        return Parts(_value("module['embedding']", x["embedding"]), "vh")
    keys = ", ".join(map(repr, x)) or "none"
    raise TypeError(f"module: got a {type(x).__name__} with keys {keys}, expected 'kernel' and 'bias', or 'embedding'")


def _from_nnx(x: Any) -> Parts | None:
    if not _is(x, "flax.nnx", "Module"):
        return None
    if _is(x, "flax.nnx", "LoRALinear"):
        return _linear(x, "LoRALinear", _flax_adapter(x.lora), "lora")
    if _is(x, "flax.nnx", "Linear"):
        return _linear(x, "Linear", None)
    if _is(x, "flax.nnx", "LoRA"):
        base = x.base_module
        if not _is(base, "flax.nnx", "Linear") or _is(base, "flax.nnx", "LoRALinear"):
            _refuse(x, f"around {type(base).__name__}, expected one around an nnx.Linear")
        _check_method(x, "LoRA", "__call__")
        return dataclasses.replace(_linear(base, "Linear", None), lora=_flax_adapter(x), lora_scale=1.0)
    if _is(x, "flax.nnx", "Embed"):
        _check_method(x, "Embed", "attend")
        _check_nothing_else("module", _parameters(x), ("embedding",))
        return Parts(_value("module.embedding", x.embedding), "vh", dtype=x.dtype)
    if _is(x, "flax.nnx", "Einsum"):
        _check_method(x, "Einsum", "__call__")
        _check_nothing_else("module", _parameters(x), _with_adapters("kernel", "bias"))
        return _einsum(x, "kernel")
    return None


def _linear(x: Any, kind: str, lora: tuple[Any, Any] | None, *others: str) -> Parts:
    _check_method(x, kind, "__call__")
    if x.dot_general is not _DOT_GENERAL:
        _refuse(
            x, f"with dot_general {x.dot_general!r}, expected jax.lax.dot_general: other products are not taken over"
        )
    _check_nothing_else("module", _parameters(x), _with_adapters("kernel", "bias", *others))
    bias = None if x.bias is None else _value("module.bias", x.bias)
    of_qwix = _adapter("module", "kernel", vars(x))
    if lora is not None and of_qwix is not None:
        _refuse(x, "with adapters of nnx and of Qwix, expected one of them")
    kernel = _value("module.kernel", x.kernel)
    return Parts(kernel, "hv", bias, lora or of_qwix, None if lora is None else 1.0, x.dtype)


def _flax_adapter(lora: Any) -> tuple[Any, Any]:
    a, b = _value("module.lora_a", lora.lora_a), _value("module.lora_b", lora.lora_b)
    return narrowed(a, lora.dtype), narrowed(b, lora.dtype)


def _check_method(x: Any, kind: str, method: str) -> None:
    """Raises where a subclass computes logits in its own way."""
    if getattr(type(x), method) is not getattr(_class("flax.nnx", kind), method):
        _refuse(x, f"a {kind} with a {method} of its own, expected nnx.{kind}; Head(kernel, ...) says what it computes")


def _parameters(x: Any) -> list[str]:
    """The names of a module's attributes that hold parameters, or modules that may hold some."""

    def holds(v: Any) -> bool:
        return _is(v, "flax.nnx", "Variable") or _is(v, "flax.nnx", "Module") or isinstance(v, jax.Array)

    return [name for name, v in vars(x).items() if holds(v) and name not in _QWIX_NOTES]


def _from_equinox(x: Any) -> Parts | None:
    linear, embedding = _class("equinox.nn", "Linear"), _class("equinox.nn", "Embedding")
    if linear is not None and isinstance(x, linear):
        if type(x).__call__ is not linear.__call__:
            _refuse(x, "a Linear with a __call__ of its own, expected eqx.nn.Linear")
        if "scalar" in (x.in_features, x.out_features):
            _refuse(x, "of a scalar, expected one from H features to V tokens")
        return Parts(_value("module.weight", x.weight), "vh", None if x.bias is None else _value("module.bias", x.bias))
    if embedding is not None and isinstance(x, embedding):
        return Parts(_value("module.weight", x.weight), "vh")
    return None


def _from_tunix(x: Any) -> Parts | None:
    """A Tunix model's `lm_head`, an Einsum over `w`, or its embedder, whose `decode` makes logits.

    Every Tunix model defines both classes anew, so they are recognised by their attributes.
    """
    if not _is(x, "flax.nnx", "Module"):
        return None
    if hasattr(x, "einsum_str") and hasattr(x, "w"):
        _check_nothing_else("module", _parameters(x), _with_adapters("w"))
        return _einsum(x, "w")
    if hasattr(x, "input_embedding") and callable(getattr(x, "decode", None)):
        # other parameters of an embedder (for images, for layers) have no part in the logits
        strange = [name for name in vars(x) if name.startswith("input_embedding_") or "lora" in name.lower()]
        _check_nothing_else("module", strange, ("input_embedding",))
        return Parts(_value("module.input_embedding", x.input_embedding), "vh", dtype=getattr(x, "dtype", None))
    return None


def _einsum(x: Any, name: str) -> Parts:
    """An einsum of hidden states and a kernel of two dimensions."""
    text = x.einsum_str if isinstance(x.einsum_str, str) else ""
    operands, _, result = text.replace(" ", "").partition("->")
    hidden, _, kernel = operands.partition(",")
    summed = "".join(sorted(set(hidden) & set(kernel)))
    kept = kernel.replace(summed, "") if len(summed) == 1 else ""
    if len(kernel) != 2 or len(kept) != 1 or not hidden.endswith(summed) or result != hidden[:-1] + kept:
        _refuse(x, f"with einsum {x.einsum_str!r}, expected one like 'BTD,DV->BTV'")
    bias = getattr(x, "bias", None)
    if bias is not None and len(bias.shape) != 1:
        _refuse(x, f"with a bias of shape {bias.shape}, expected [V]")
    return Parts(
        _value(f"module.{name}", getattr(x, name)),
        "hv" if kernel[0] == summed else "vh",
        None if bias is None else _value("module.bias", bias),
        _adapter("module", name, vars(x)),
        dtype=getattr(x, "dtype", None),
    )
