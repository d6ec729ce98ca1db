"""A check of a loss of your own: its numbers are the same whichever way they are computed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxppo.base.arrays import PER_TOKEN_VALUES, check, check_count, check_type, needed
from jaxppo.base.pytree import PyTree
from jaxppo.batch.broken_rules import explain_broken_rules
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.api import log_probs_from_hidden
from jaxppo.head.head import Entropy, LogitStat, TokenStats
from jaxppo.losses.doors import loss_from_hidden, loss_from_stats
from jaxppo.losses.explain import explain_tokens
from jaxppo.losses.hooks import name_of
from jaxppo.losses.parts import OfPolicy, as_token_loss
from jaxppo.losses.token_loss import TokenLoss
from jaxppo.sharding import ParallelMesh, _submodule, make_parallel_mesh

testing = _submodule("testing")  # `jaxppo.sharding.testing` is a door for users, above this module
FEATURES = 8
MOST_MOVED = 64
Leaves = list[Array]
Others = tuple[list[Array | None], jax.tree_util.PyTreeDef]  # a tree without its floats
LossAndGradients = tuple[Array, Sequence[Array]]  # a loss and its gradients
Meshes = Sequence[str | ParallelMesh] | None
States = tuple[Float[Array, "R T H"], Float[Array, "H V"]]  # hidden states and a kernel
Asked = tuple[Entropy, tuple[LogitStat, ...]]  # what a loss asks of the head, beside ids


def assert_token_loss(
    loss: TokenLoss[Any] | OfPolicy,
    batch: RolloutBatch,
    *,
    stats: PyTree = None,
    vocab_size: int | None = None,
    meshes: Sequence[str | ParallelMesh] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    seed: int = 0,
) -> float:
    """Checks a loss of your own: that its numbers are the same whichever way they are computed.

    - It is finite on this batch, and trains some token of it.
    - A token-local loss of a token does not move when the log-prob of another token does. Values
      are compared, since a slope would miss a weight of the sequence under `stop_gradient`.
    - Hidden states, in one pass if it is token-local, give the loss and the gradients that
      statistics give.
    - NaN in all that it reads where the loss mask is 0, and ids that are none, change neither loss
      nor gradient.
    - Meshes give the loss and the gradients of one device.

    Args:
      loss: a `TokenLoss`, a policy loss or a config of one.
      batch: `[R, T]`, on the host and in the contiguous layout, with the arrays that the loss
        reads. A few samples of a few tokens do; some should lie in one row.
      stats: the statistics of a loss that reads no log-probs, such as values `f32[R, T]`; else
        random hidden states and a random head make them.
      vocab_size: V of that head; by default above all targets and ids.
      meshes: ParallelMeshes or descriptions; by default all factorings of the devices that this
        batch fits.
      rtol, atol: tolerances; atol is a share of each array's largest magnitude.
      seed: of the random numbers.

    Returns:
      The loss.

    Raises:
      AssertionError: says what differs, and by how much.
      TypeError, ValueError: what `loss_from_stats` raises; no statistics where they are needed, or
        no mesh that fits.

    Example:
      >>> import dataclasses
      >>> from jaxppo.losses.testing import assert_token_loss
      >>> @dataclasses.dataclass(frozen=True)
      ... class Centred(TokenLoss[TokenStats]):
      ...     token_local: ClassVar[bool] = True                          # it is not
      ...
      ...     def terms(self, stats, batch, constants, segments):
      ...         return {"centred": (stats.log_probs - stats.log_probs.mean()) ** 2}
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)] * 8, row_length=8, rows=8)
      >>> assert_token_loss(SFT(), batch, meshes=[f"dp={jax.device_count()}"]) > 0
      True
      >>> assert_token_loss(Centred(), batch)
      Traceback (most recent call last):
      ...
      AssertionError: Centred.token_local: got True, but the loss of the token at (...
    """
    of = as_token_loss(loss)
    batch = checked(batch, reader="assert_token_loss")
    case = _Case(loss, of, batch, rtol, atol)
    if of.of_head:
        expected = "None for a loss of log-probs, which random hidden states give"
        check("stats", "some", stats is None, expected)
        return _assert_from_hidden(case, _states(case, vocab_size, seed), meshes)
    stats = needed("stats", stats, f"the statistics that {of} reads")
    return _assert_from_stats(case, stats, meshes)


def _assert_from_stats(case: _Case, stats: PyTree, meshes: Meshes) -> float:
    """The checks of a loss of statistics that no head computes, such as a critic's values."""
    from_stats = jax.jit(functools.partial(case.from_stats, None))
    expected = from_stats(case.batch, stats)
    value = _finite(case, stats, expected)
    if case.hidden_by_mask:
        _assert_blind(case, from_stats, (stats,), expected, "statistics")
    _assert_on_meshes(case, case.from_stats, (stats,), expected, meshes)
    return value


def _assert_from_hidden(case: _Case, states: States, meshes: Meshes) -> float:
    """The checks of a loss of log-probs: from a head's statistics, and from hidden states."""
    from_stats = jax.jit(functools.partial(case.from_stats, None))
    head_inputs = *states, *case.tokens_of_head()
    asked = case.of.asks.entropy, tuple(case.of.asks.logit_stats)
    stats = _stats_of_head(asked, *head_inputs)
    of_stats = from_stats(case.batch, stats)
    value = _finite(case, stats, of_stats)
    two_steps = value, _through_head(asked, of_stats[1], *head_inputs)
    if case.of.token_local:
        _assert_local(case, stats)
    from_hidden = jax.jit(functools.partial(case.from_hidden, None))
    expected = from_hidden(case.batch, *states)
    where = f"{name_of(case.of)} from hidden states, against statistics,"
    testing.assert_trees_close(expected, two_steps, case.rtol, case.atol, where)
    _assert_blind(case, from_hidden, states, expected, "hidden states")
    if case.hidden_by_mask:
        _assert_blind(case, from_stats, (stats,), of_stats, "statistics")
    _assert_on_meshes(case, case.from_hidden, states, expected, meshes)
    return value


@dataclasses.dataclass(frozen=True)
class _Case:
    """A loss and its batch."""

    loss: TokenLoss[Any] | OfPolicy
    of: TokenLoss[Any]
    batch: RolloutBatch
    rtol: float
    atol: float

    @property
    def hidden_by_mask(self) -> bool:
        """Whether the loss sees no statistics where its mask is 0, which another `seen` may show."""
        return type(self.of).seen is TokenLoss.seen

    def tokens_of_head(self) -> tuple[Array, Array, Array | None]:
        """The targets, where there is loss, and the ids that the loss asks for."""
        asks = self.of.asks
        ids = None if asks.ids is None else self.batch.extras[asks.ids]
        return self.batch.targets, self.batch.loss_mask > 0, ids

    def from_stats(
        self, parallel: ParallelMesh | None, batch: RolloutBatch, stats: PyTree
    ) -> LossAndGradients:
        """The loss, and its gradients by the statistics that are floats."""
        floats, others = _floats(stats)

        def fn(floats: Leaves) -> Array:
            return loss_from_stats(_joined(floats, others), batch, self.loss, parallel=parallel)[0]

        return jax.value_and_grad(fn)(floats)

    def from_hidden(
        self, parallel: ParallelMesh | None, batch: RolloutBatch, hidden: Array, kernel: Array
    ) -> LossAndGradients:
        def fn(hidden: Array, kernel: Array) -> Array:
            return loss_from_hidden(hidden, kernel, batch, self.loss, parallel=parallel)[0]

        return jax.value_and_grad(fn, (0, 1))(hidden, kernel)


@functools.partial(jax.jit, static_argnums=0)
def _stats_of_head(
    asked: Asked, hidden: Array, kernel: Array, targets: Array, where: Array, ids: Array | None
) -> TokenStats:
    """The statistics that a loss asks for: the same program for all losses that ask for the same."""
    entropy, logit_stats = asked
    return log_probs_from_hidden(
        hidden,
        kernel,
        targets,
        where=where,
        entropy=entropy,
        logit_stats=logit_stats,
        ids=ids,
    )


@functools.partial(jax.jit, static_argnums=0)
def _through_head(
    asked: Asked,
    slopes: Sequence[Array],
    hidden: Array,
    kernel: Array,
    targets: Array,
    where: Array,
    ids: Array | None,
) -> tuple[Array, Array]:
    """The gradients by hidden states and kernel, from those by the statistics that are floats."""

    def fn(hidden: Array, kernel: Array) -> Leaves:
        return _floats(_stats_of_head(asked, hidden, kernel, targets, where, ids))[0]

    _, pullback = jax.vjp(fn, hidden, kernel)
    of_hidden, of_kernel = pullback(slopes)
    return of_hidden, of_kernel


def _floats(tree: PyTree) -> tuple[Leaves, Others]:
    """The leaves that have a gradient, and what `_joined` needs to put them back."""
    leaves, structure = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
    floats = [x for x, yes in zip(leaves, is_float, strict=True) if yes]
    others = [None if yes else x for x, yes in zip(leaves, is_float, strict=True)]
    return floats, (others, structure)


def _joined(floats: Leaves, rest: Others) -> PyTree:
    others, structure = rest
    left = iter(floats)
    return structure.unflatten([next(left) if x is None else x for x in others])


def _states(case: _Case, vocab_size: int | None, seed: int) -> States:
    """Random hidden states and a random head, whose log-probs differ by a few nats."""
    ids = [np.asarray(case.batch.targets)]
    if case.of.asks.ids is not None:
        case.of.check(case.batch)
        ids.append(np.asarray(case.batch.extras[case.of.asks.ids]))
    if vocab_size is None:
        vocab_size = -(-(1 + max(int(x.max(initial=0)) for x in ids)) // 16) * 16
    check_count("vocab_size", vocab_size, least=1)
    draws = np.random.default_rng(seed)
    hidden = draws.normal(size=(*case.batch.loss_mask.shape, FEATURES)).astype(np.float32)
    return jnp.asarray(hidden), jnp.asarray(
        0.4 * draws.normal(size=(FEATURES, vocab_size)), jnp.float32
    )


def _finite(case: _Case, stats: PyTree, of_stats: LossAndGradients) -> float:
    """The loss from statistics; raises where it is not finite, or moves no token: equal numbers
    would show nothing.
    """
    name = name_of(case.of)
    value, slopes = of_stats
    if not np.isfinite(value):
        _, metrics = jax.jit(lambda x: loss_from_stats(x, case.batch, case.loss))(stats)
        why = "; ".join(explain_broken_rules(metrics["broken_rules"].value))
        raise AssertionError(
            f"{name}: got the loss {value} for this batch, expected a finite one. {why}"
        )
    largest = max(float(np.abs(x).max()) for x in slopes)
    if not 0 < largest < np.inf:
        raise AssertionError(
            f"{name}: got gradients of at most {largest}, expected finite ones that train some"
            " token"
        )
    return float(value)


def _assert_local(case: _Case, stats: PyTree) -> None:
    """Moves the statistics of one token after the other."""
    floats, others = _floats(stats)
    places = np.argwhere(np.asarray(case.batch.loss_mask) > 0)
    places = places[:: -(-len(places) // MOST_MOVED)]

    def losses(move: tuple[Array, Array]) -> Float[Array, "R T"]:
        """The contribution of every token, where the statistics of one are moved by an amount."""
        place, amount = move
        moved = [x.at[place[0], place[1]].add(amount) for x in floats]
        return explain_tokens(_joined(moved, others), case.batch, case.loss).arrays["contribution"]

    # the first turn moves nothing
    moved_places = np.concatenate([places[:1], places])
    amounts = np.full(len(moved_places), -0.1, np.float32)
    amounts[0] = 0
    each_turn = jax.jit(functools.partial(jax.lax.map, losses))
    usual, *moved_one = np.asarray(each_turn((moved_places, amounts)))
    differences = np.abs(np.asarray(moved_one) - usual)
    differences[np.arange(len(places)), places[:, 0], places[:, 1]] = 0
    if differences.max() > case.atol * np.abs(usual).max():
        which, *of = (int(i) for i in np.unravel_index(differences.argmax(), differences.shape))
        by = tuple(int(i) for i in places[which])
        raise AssertionError(
            f"{name_of(case.of)}.token_local: got True, but the loss of the token at {tuple(of)}"
            f" moves with the log-prob of the one at {by}, by {differences.max():.3g}; expected"
            " token_local=False"
        )


def _assert_blind(
    case: _Case,
    fn: Callable[..., LossAndGradients],
    given: tuple[PyTree, ...],
    expected: LossAndGradients,
    what: str,
) -> None:
    """The loss with garbage where the loss mask is 0."""
    on = np.asarray(case.batch.loss_mask) > 0
    shape = on.shape

    def spoilt(x: Any) -> Any:
        if x is None or np.shape(x)[:2] != shape:
            return x
        garbage = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else -7
        here = on.reshape(*shape, *(1,) * (x.ndim - 2))
        return np.where(here, np.asarray(x), np.asarray(garbage).astype(x.dtype))

    arrays = {name: spoilt(getattr(case.batch, name)) for name in PER_TOKEN_VALUES}
    extras = {name: spoilt(x) for name, x in case.batch.extras.items()}
    batch = dataclasses.replace(case.batch, **arrays, extras=extras)
    of_tokens, *others = given  # a head has no tokens
    got = fn(batch, jax.tree.map(spoilt, of_tokens), *others)
    where = f"{name_of(case.of)} from {what} with NaN where the loss mask is 0"
    testing.assert_trees_close(got, expected, case.rtol, case.atol, where)


def _assert_on_meshes(
    case: _Case,
    fn: Callable[..., LossAndGradients],
    given: tuple[PyTree, ...],
    expected: LossAndGradients,
    meshes: Meshes,
) -> None:
    """The loss and its gradients on each mesh, against those on one device."""
    for mesh in _meshes(case.batch, meshes):
        parallel = make_parallel_mesh(mesh) if isinstance(mesh, str) else mesh
        on_mesh = jax.jit(functools.partial(fn, parallel))(case.batch, *given)
        testing.assert_trees_close(on_mesh, expected, case.rtol, case.atol, f"mesh {mesh}")


def _meshes(batch: RolloutBatch, meshes: Meshes) -> list[str | ParallelMesh]:
    """The meshes to try: those that divide the rows and the positions of the batch."""
    if meshes is not None:
        check_type(
            "meshes",
            meshes,
            isinstance(meshes, Sequence) and not isinstance(meshes, str),
            "a list of meshes",
        )
        return list(meshes)
    rows, positions = batch.loss_mask.shape
    fitting: list[str | ParallelMesh] = []
    spread = False
    for mesh in testing.factorings(jax.device_count()):
        parallel = make_parallel_mesh(mesh)
        if rows % parallel.data_size == 0 and positions % parallel.context_size == 0:
            fitting.append(mesh)
            spread = spread or parallel.data_size * parallel.context_size > 1
    expected = (
        "several devices, as `emulate_devices(8)` makes of a CPU, and rows and positions that they"
        " divide"
    )
    got = f"{jax.device_count()} devices for {rows} rows of {positions} positions"
    check("meshes", got, spread, f"{expected}; or meshes=[] for none")
    return fitting
