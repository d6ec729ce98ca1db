"""Other projects' heads, if they can be imported: tokamax, Tunix, PyTorch, Liger, cut-cross-entropy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.cases import Case
from benchmarks.measure import in_turns
from examples.planner.pod_head import plain_logits

Step = Callable[[Any], Any]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def jax_peers(case: Case) -> dict[str, Step]:
    """Steps of the group "log-probs": neither peer has an entropy."""
    found: dict[str, Step] = {}
    if installed("tokamax") and not case.sizes.tied and case.sizes.softcap is None:
        import tokamax
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # otherwise tokamax would parse this command's arguments
        backend = "mosaic_tpu" if jax.default_backend() == "tpu" else "xla"

        def loss(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
            mean_loss = tokamax.linear_softmax_cross_entropy_loss
            return -mean_loss(
                hidden[0], targets[0], kernel, reduction="mean", implementation=backend
            )

        found["tokamax"] = _gradients(loss)
    if installed("tunix"):
        from tunix.rl import common

        found["Tunix selective_log_softmax"] = _gradients(
            lambda hidden, kernel, targets: common.selective_log_softmax(
                plain_logits(hidden, kernel, case.sizes), targets
            ).mean()
        )
    return found


def _gradients(loss: Callable[..., jax.Array]) -> Step:
    return lambda data: jax.value_and_grad(loss, (0, 1))(
        data["hidden"], data["kernel"], data["targets"]
    )


Run = Callable[[], Any]


class Measured(NamedTuple):
    """What a version of another framework takes."""

    seconds: float  # the median
    temporary_bytes: int | None  # beside results, on a GPU


def torch_seconds(
    case: Case, data: Any, rounds: int, groups: Sequence[str]
) -> dict[tuple[str, str], Measured]:
    """What PyTorch's versions of these groups take, by (group, name); afterwards the GPU's memory
    is JAX's.
    """
    runs = {key: run for key, run in torch_peers(case, data).items() if key[0] in groups}
    found = {}
    peak_bytes = {}
    if runs and jax.default_backend() == "gpu":
        runs, peak_bytes = _that_fit(runs)
    for key, seconds in in_turns(runs, rounds).items():
        found[key] = Measured(seconds, peak_bytes.get(key))
    if found and jax.default_backend() == "gpu":
        import torch

        torch.cuda.empty_cache()
    return found


def torch_peers(case: Case, data: Any) -> dict[tuple[str, str], Run]:
    """PyTorch's versions by (group, name), on the same data and kind of device.

    Each call waits until it is done.
    """
    if not installed("torch") or case.sizes.softcap is not None:
        return {}
    import torch

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return {}
    tensors = _tensors(case, data, "cuda" if on_gpu else "cpu")
    losses = _plain_losses(tensors)
    if on_gpu:
        losses |= _kernels(tensors)

    def runner(loss: Callable[[], Any]) -> Run:
        def run() -> Any:
            gradients = torch.autograd.grad(loss(), (tensors.hidden, tensors.kernel))
            if on_gpu:
                torch.cuda.synchronize()
            return gradients

        return run

    return {key: runner(loss) for key, loss in losses.items()}


class Tensors(NamedTuple):
    """The data of a case as PyTorch's tensors."""

    hidden: Any  # [T, H]
    kernel: Any  # [V, H]
    targets: Any  # [T]
    g: Any  # f32[T], the cotangents of log-probs
    e: Any  # f32[T], those of entropies


def _tensors(case: Case, data: Any, device: str) -> Tensors:
    import torch

    dtype = getattr(torch, case.dtype)

    def factor(array: jax.Array) -> Any:
        on_device = torch.from_numpy(np.array(array, np.float32)).to(device, dtype)
        return on_device.contiguous().requires_grad_()

    def per_token(array: jax.Array) -> Any:
        return torch.from_numpy(np.array(array[0])).to(device)

    kernel = data["kernel"]
    if not case.sizes.tied:
        kernel = kernel.T
    targets = per_token(data["targets"]).long()
    return Tensors(
        factor(data["hidden"][0]),
        factor(kernel),
        targets,
        per_token(data["g"]),
        per_token(data["e"]),
    )


def _plain_losses(t: Tensors) -> dict[tuple[str, str], Callable[[], Any]]:
    """Losses of f32 logits, eager and compiled."""
    import torch

    def log_softmax() -> Any:
        return torch.log_softmax((t.hidden @ t.kernel.T).float(), dim=-1)

    def with_entropy() -> Any:
        log_p = log_softmax()
        log_probs = log_p.gather(1, t.targets[:, None])[:, 0]
        return (t.g * log_probs - t.e * (log_p.exp() * log_p).sum(-1)).sum()

    def mean_log_prob() -> Any:
        return torch.nn.functional.nll_loss(log_softmax(), t.targets)

    return {
        ("entropy", "torch, eager"): with_entropy,
        ("entropy", "torch.compile"): torch.compile(with_entropy),
        ("log-probs", "torch.compile"): torch.compile(mean_log_prob),
    }


def _kernels(t: Tensors) -> dict[tuple[str, str], Callable[[], Any]]:
    """Mean log-probs by the kernels of Liger and of cut-cross-entropy, neither of which has an
    entropy.
    """
    losses: dict[tuple[str, str], Callable[[], Any]] = {}
    if installed("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        losses["log-probs", "Liger"] = lambda: liger(t.kernel, t.hidden, t.targets)
    if installed("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        def cut(**options: Any) -> Callable[[], Any]:
            return lambda: linear_cross_entropy(t.hidden, t.kernel, t.targets, **options)

        losses["log-probs", "cut-cross-entropy"] = cut(filter_eps=None)
        losses["log-probs", "cut-cross-entropy, small gradients left out"] = cut()
    return losses


def _that_fit(
    runs: dict[tuple[str, str], Run],
) -> tuple[dict[tuple[str, str], Run], dict[tuple[str, str], int]]:
    """The versions that run on this GPU, and the bytes that each takes beside its results.

    What does not run is said.
    """
    import torch

    fitting = {}
    peak_bytes = {}
    for key, run in runs.items():
        try:
            run()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            results = run()
            peak = torch.cuda.max_memory_allocated() - before
            peak_bytes[key] = peak - sum(array.nbytes for array in results)
            fitting[key] = run
        except Exception as error:  # compilers of kernels raise many kinds
            print(f"{key[1]} does not run here: {str(error).splitlines()[0]}")
        results = None
        torch.cuda.empty_cache()
    return fitting, peak_bytes
