"""The figures that are curves and bars: each number in them is what the package computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

BLUE, RED, GREY, INK = "#3b6fb6", "#c2453c", "#b9bec7", "#24292f"
SHARDS = ("#cfe0f5", "#fbdcc4", "#d3ecd0", "#ead4ee")
OLD_PROBABILITY = 0.1
LOSSES = (
    *(
        "ppo",
        "gspo",
        "cispo",
        "sapo",
        "aspo",
        "gmpo",
        "vespo",
        "probability_mask",
        "reinforce",
        "by_sign",
    ),
    *("dppo", "dro", "clip_cov", "kl_cov"),
)


def plots(
    columns: int, rows: int = 1, width: float = 8.0, height: float = 2.7, **options: Any
) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)
    inches = {
        "left": 0.65 / width,
        "right": 1 - 0.2 / width,
        "bottom": 0.5 / height,
        "top": 1 - 0.35 / height,
    }
    figure.subplots_adjust(**inches, wspace=0.35, hspace=0.55)
    return figure, axes


def per_token(loss: Any, ratio: Any, advantage: float, selected: float) -> tuple[Any, Any]:
    """The loss of tokens with these ratios, each a sequence of its own, and what it pulls: -d
    loss / d log_prob.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxppo import ShardAxes
    from jaxppo.sharding import Segments

    rows = jnp.asarray(ratio, jnp.float32)[:, None]
    old = jnp.full_like(rows, jnp.log(OLD_PROBABILITY))
    segments = Segments(jnp.ones(rows.shape, jnp.int32), 1, ShardAxes())
    given = (old, jnp.full_like(rows, advantage))
    extra = {
        "mask": jnp.ones_like(rows),
        "segments": segments,
        "selected": jnp.full_like(rows, selected),
    }

    def values(x):
        return loss(x, *given, **extra)[0]

    log_probs = old + jnp.log(rows)
    pull = -jax.grad(lambda x: values(x).sum())(log_probs)
    return np.round(values(log_probs)[:, 0], 4), np.round(pull[:, 0], 4)


def breaks(y: Any) -> Any:
    """With a gap where the curve jumps, so that no line is drawn up the step."""
    import numpy as np

    y = np.asarray(y, float).copy()
    (jumps,) = np.nonzero(np.abs(np.diff(y)) > 0.2)
    y[jumps] = np.nan
    return y


def draw_curves(axes: Any, name: str, which: int) -> None:
    import numpy as np

    from jaxppo import policy_losses

    # the clip of GSPO is some 1000 times as narrow as that of the others
    reach = 1.5e-3 if name == "gspo" else None
    ratio = np.linspace(1 - reach, 1 + reach, 401) if reach else np.linspace(0.005, 3.0, 600)
    loss = policy_losses.by_name(name)
    for advantage, colour in ((1.0, BLUE), (-1.0, RED)):
        y = per_token(loss, ratio, advantage, 0.0)[which]
        axes.plot(
            ratio,
            breaks(y) if which else y,
            color=colour,
            linewidth=1.6,
            label=f"A = {advantage:+.0f}",
        )
        if loss.selects:
            y = per_token(loss, ratio, advantage, 1.0)[which]
            axes.plot(ratio, breaks(y) if which else y, color=colour, linewidth=1.6, linestyle=":")
    axes.axvline(1, color=GREY, linewidth=0.7, zorder=0)
    axes.axhline(0, color=GREY, linewidth=0.7, zorder=0)
    if reach:
        axes.set_xticks([0.999, 1, 1.001])


def one_loss(name: str) -> Any:
    figure, axes = plots(2, width=7.2, height=2.5)
    for which, title in enumerate(
        ("loss of the token", "pull on its log-prob: -d loss / d log_prob")
    ):
        draw_curves(axes[0][which], name, which)
        axes[0][which].set_title(title, fontsize=9)
        axes[0][which].set_xlabel("ratio")
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


def all_gradients() -> Any:
    from jaxppo import policy_losses

    figure, axes = plots(5, 3, width=9.6, height=6.4)
    for name, each in zip(LOSSES, axes.flat, strict=False):
        draw_curves(each, name, 1)
        each.set_title(policy_losses.BY_NAME[name].__name__, fontsize=9.5, weight="bold")
        each.set_ylim(-3.3, 3.3)
        each.tick_params(labelsize=7)
    for empty in axes.flat[len(LOSSES) :]:
        empty.axis("off")
    last = axes.flat[len(LOSSES)]
    key = ((0.8, BLUE, "-", "A = +1"), (0.6, RED, "-", "A = -1"), (0.4, INK, ":", "selected token"))
    for y, colour, style, text in key:
        last.plot([0.0, 0.2], [y, y], color=colour, linestyle=style, transform=last.transAxes)
        last.text(0.26, y, text, va="center", transform=last.transAxes)
    figure.supxlabel("ratio of the token's probability to the old one", fontsize=9, y=0.01)
    figure.supylabel("-d loss / d log_prob", fontsize=9, x=0.008)
    return figure


def weights() -> Any:
    """What a token's loss counts for: the gradient of the loss by the log-probs, all advantages
    -1.
    """
    import jax
    import numpy as np

    from jaxppo import PolicyLossConfig, RolloutBatch, Sample, TokenStats, policy_loss
    from jaxppo.policy_losses import Reinforce

    counts, rollouts = (6, 3, 1), (0, 1, 1)
    samples = [
        Sample([1] * (n + 1), response_start=1, advantages=[-1.0] * n, rollout_id=r)
        for n, r in zip(counts, rollouts, strict=True)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=16, rows=1)
    names = [f"sequence_mean_token_{x}" for x in ("sum", "mean", "sum_norm")]
    names = ["token_mean", "token_sum", *names, "rollout_mean"]
    figure, axes = plots(3, 2, width=9.4, height=4.2)
    for name, each in zip(names, axes.flat, strict=True):
        norm = 6.0 if name.endswith("norm") else None
        config = PolicyLossConfig(
            Reinforce(), ratio_to="current", aggregation=name, aggregation_norm=norm
        )
        gradient = jax.grad(lambda x, c=config: policy_loss(TokenStats(x), batch, c)[0])(
            0.0 * batch.loss_mask - 1
        )
        ids = np.asarray(batch.segment_ids)[np.asarray(batch.loss_mask) > 0]
        heights = np.round(np.asarray(gradient)[np.asarray(batch.loss_mask) > 0], 4)
        each.bar(
            range(len(heights)),
            heights,
            color=[SHARDS[i - 1] for i in ids],
            edgecolor=GREY,
            linewidth=0.7,
        )
        each.set_title(name + (" = 6" if norm else ""), fontsize=9, family="monospace")
        each.set_xticks([2.5, 7, 9], ["a", "b", "c"])
        each.set_ylim(0, max(heights) * 1.15)
        each.tick_params(axis="x", length=0)
    return figure


def entropy() -> Any:
    """What the entropy's modes do to the logits of one token."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxppo import log_probs_from_logits

    logits, targets = jnp.array([[[2.2, 1.4, 0.7, 0.0, -0.8, -1.6]]]), jnp.array([[1]])

    def loss(logits: Any, mode: Any, coef: float) -> Any:
        stats = log_probs_from_logits(logits, targets, entropy=mode)
        return -(stats.log_probs + (0 if stats.entropy is None else coef * stats.entropy)).sum()

    figure, axes = plots(3, width=9.4, height=2.6)
    x = np.arange(logits.shape[-1])
    axes[0][0].bar(x, np.round(jax.nn.softmax(logits)[0, 0], 4), color=SHARDS[0], edgecolor=GREY)
    axes[0][0].set_title("probabilities of six tokens", fontsize=9)
    push = {mode: -jax.grad(loss)(logits, mode, 0.5)[0, 0] for mode in ("metric", "bonus")}
    shown = {'push on the logits, "none" or "metric"': push["metric"]}
    shown['what "bonus" adds, coefficient 0.5'] = push["bonus"] - push["metric"]
    for each, (title, heights) in zip(axes[0][1:], shown.items(), strict=True):
        heights = np.round(heights, 4)
        each.bar(x, heights, color=[BLUE if h > 0 else RED for h in heights], alpha=0.75)
        each.axhline(0, color=GREY, linewidth=0.7)
        each.set_title(title, fontsize=9)
    for each in axes[0]:
        each.set_xticks(x, ["0", "1: target", "2", "3", "4", "5"], fontsize=8)
    return figure


def kl() -> Any:
    """The estimators of the divergence, and their gradients, over the log-ratio."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxppo.base.kl import kl_divergence

    d = jnp.linspace(-3, 3, 401)
    figure, axes = plots(2, width=8.0, height=2.9)
    colours = dict(
        zip(
            ("k1", "abs", "k2", "k3", "k3+"),
            (BLUE, "#6b4fa0", "#2f8f4e", RED, "#d98a2b"),
            strict=True,
        )
    )
    for name, colour in colours.items():
        value = partial(kl_divergence, ref_log_probs=jnp.full_like(d, -3), estimator=name)
        gradient = jax.grad(lambda x, f=value: f(x).sum())(d - 3)  # log-probs are at most 0
        dash = {"k3+": "--"}.get(name, "-")
        axes[0][0].plot(d, np.round(value(d - 3), 4), color=colour, linestyle=dash, label=name)
        axes[0][1].plot(d, np.round(gradient, 4), color=colour, linestyle=dash)
    for each, title in zip(axes[0], ("value", "gradient by log_prob"), strict=True):
        each.set(ylim=(-3, 5), xlabel="d = log_prob - ref_log_prob")
        each.set_title(title, fontsize=9)
        each.axhline(0, color=GREY, linewidth=0.7, zorder=0)
        each.axvline(0, color=GREY, linewidth=0.7, zorder=0)
    axes[0][0].legend(frameon=False, fontsize=8, ncols=2)
    return figure


def memory() -> Any:
    """Temporaries of a loss and its gradients over the number of tokens, as the compiler laid
    them out for a CPU.
    """
    import jax
    import jax.numpy as jnp

    from jaxppo import GSPO, PolicyLossConfig, RolloutBatch, policy_loss_from_hidden
    from jaxppo.sharding import audit

    H, V, mib = 256, 16384, 2**20

    def batch_of(tokens: int) -> RolloutBatch:
        def x(dtype, *shape):
            return jax.ShapeDtypeStruct((1, *shape), dtype)

        ids, numbers = [x(jnp.int32, tokens)] * 4, x(jnp.float32, tokens)
        return RolloutBatch(
            *ids, numbers, x(jnp.int32, 1), advantages=numbers, old_log_probs=numbers
        )

    def ours(hidden: Any, kernel: Any, batch: Any) -> Any:
        return policy_loss_from_hidden(hidden, kernel, batch, PolicyLossConfig(GSPO()))[0]

    def plain(hidden: Any, kernel: Any, batch: Any) -> Any:
        log_p = jax.nn.log_softmax(hidden @ kernel)
        log_probs = jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(log_probs - batch.old_log_probs)
        loss = jnp.maximum(-batch.advantages * ratio, -batch.advantages * jnp.clip(ratio, 0.8, 1.2))
        return jnp.sum(loss * batch.loss_mask) / jnp.sum(batch.loss_mask)

    versions: dict[str, tuple[Callable[..., Any], str]] = {
        "plain JAX": (plain, GREY),
        "jaxppo, two passes": (ours, BLUE),
    }
    counts = (512, 1024, 2048, 4096, 8192)
    figure, axes = plots(1, width=6.0, height=3.2)
    for name, (fn, colour) in versions.items():
        kernel = jax.ShapeDtypeStruct((H, V), jnp.float32)

        def hidden(n):
            return jax.ShapeDtypeStruct((1, n, H), jnp.float32)

        costs = [audit(jax.grad(fn, (0, 1)), hidden(n), kernel, batch_of(n)) for n in counts]
        # the figure stays if a few kB come or go
        temporaries = [round(cost.temp_bytes / mib, 1) for cost in costs]
        axes[0][0].plot(counts, temporaries, color=colour, marker="o", markersize=4, label=name)
    axes[0][0].set(xscale="log", yscale="log", xlabel="tokens", ylabel="temporaries, MiB")
    axes[0][0].set_xticks(counts, [str(n) for n in counts])
    axes[0][0].minorticks_off()
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


def large_logits() -> Any:
    """The error of a log-prob whose logits are large: m and log s apart, and folded into one
    log-sum-exp.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxppo import log_probs_from_logits

    sizes = 10.0 ** np.arange(0, 6.01, 0.25)
    small = np.random.default_rng(0).normal(size=(1, 64, 500)).astype(np.float32)
    targets = jnp.arange(64)[None]
    errors: list[list[float]] = [[], []]
    for size in sizes:
        z = (small + np.float32(size)).astype(np.float32)
        wide = z.astype(np.float64)
        shifted = wide - wide.max(axis=-1, keepdims=True)
        truth = np.diagonal((shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[0, :, :64])
        apart = log_probs_from_logits(jnp.asarray(z), targets).log_probs[0]
        folded = jnp.diagonal(z[0, :, :64]) - jax.nn.logsumexp(jnp.asarray(z), axis=-1)[0]
        for error, found in zip(errors, (apart, folded), strict=True):
            error.append(float(f"{np.abs(np.asarray(found, np.float64) - truth).max():.2g}"))
    figure, axes = plots(1, width=6.0, height=2.9)
    for error, name, colour in zip(
        errors, ("m and log s apart: jaxppo", "z - logsumexp(z)"), (BLUE, RED), strict=True
    ):
        axes[0][0].plot(sizes, error, color=colour, label=name)
    axes[0][0].set(
        xscale="log",
        yscale="log",
        xlabel="size of the logits",
        ylabel="largest error of a log-prob, nats",
    )
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "gradients": all_gradients,
    "weights": weights,
    "entropy": entropy,
    "kl": kl,
    "memory": memory,
    "large_logits": large_logits,
} | {f"loss_{name}": partial(one_loss, name) for name in LOSSES}
