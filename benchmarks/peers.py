"""Other projects' heads, if they can be imported: tokamax, Tunix, PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

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


def torch_seconds(case: Case, data: Any, rounds: int) -> dict[str, float]:
    """The median seconds of PyTorch's versions; afterwards the GPU's memory is JAX's."""
    found = in_turns(torch_peers(case, data), rounds)
    if found and jax.default_backend() == "gpu":
        import torch

        torch.cuda.empty_cache()
    return found


def torch_peers(case: Case, data: Any) -> dict[str, Callable[[], Any]]:
    """Plain PyTorch, eager and compiled, on the same data and kind of device.

    Each call waits until it is done.
    """
    if not installed("torch") or case.sizes.softcap is not None:
        return {}
    import torch

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return {}
    device = "cuda" if on_gpu else "cpu"
    dtype = getattr(torch, case.dtype)

    def to(x):
        return torch.from_numpy(np.array(x[0] if x.ndim == 3 else x, np.float32)).to(device, dtype)

    hidden, kernel = to(data["hidden"]).requires_grad_(), to(data["kernel"]).requires_grad_()
    targets = torch.from_numpy(np.array(data["targets"][0], np.int64)).to(device)
    g, e = (torch.from_numpy(np.array(data[name][0])).to(device) for name in ("g", "e"))

    def loss(hidden: Any, kernel: Any) -> Any:
        z = (hidden @ (kernel.T if case.sizes.tied else kernel)).float()
        log_p = torch.log_softmax(z, dim=-1)
        log_probs = log_p.gather(1, targets[:, None])[:, 0]
        return (g * log_probs - e * (log_p.exp() * log_p).sum(-1)).sum()

    def runner(loss: Any) -> Callable[[], Any]:
        def run() -> Any:
            gradients = torch.autograd.grad(loss(hidden, kernel), (hidden, kernel))
            if on_gpu:
                torch.cuda.synchronize()
            return gradients

        return run

    found = {"torch, eager": runner(loss), "torch.compile": runner(torch.compile(loss))}
    return {name: run for name, run in found.items() if _runs(run)} if on_gpu else found


def _runs(run: Callable[[], Any]) -> bool:
    """Runs it once; False if the GPU's memory is too small."""
    import torch

    try:
        run()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True
