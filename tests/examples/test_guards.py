"""What the example's steps do to numbers that are not finite, to gradients that are large, and
to the host.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_runs

from examples.trainer import grpo_run
from examples.trainer.arguments import parse
from examples.trainer.grpo_run import grpo_step, set_up, supervised
from examples.trainer.rollouts import Packer, answers
from examples.trainer.spikes import Spikes, load_batch
from examples.trainer.train_grpo import main
from jaxppo import PolicyLossConfig, RolloutBatch, Sample, policy_loss
from jaxppo.head.head import TokenStats
from sharding import make_parallel_mesh

pytestmark = pytest.mark.usefixtures("kept_programs")
ArrayImpl = type(jnp.zeros(()))
TINY = [*tiny_runs.USUAL, "--sft-steps", "2"]


def started(folder, *options):
    args = parse([*TINY, "--out", str(folder), *options])
    run = set_up(args)
    supervised(run, args)
    return run, args


@pytest.fixture
def compiled():
    """Names of the programs compiled so far, whether or not a cache had them."""
    found = []

    def listener(name, *_, **__):
        return found.append(name) if "backend_compile" in name else None

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield found
    jax.monitoring.unregister_event_duration_listener(listener)


def test_a_run_compiles_nothing_after_its_first_step(tmp_path, compiled):
    jax.clear_caches()  # another test may have compiled what later steps need
    run, args = started(tmp_path)
    grpo_step(run, args)
    compiled.clear()
    lengths = set()
    pack = run.pack
    run.pack = lambda samples: (lengths.add(sum(len(s.tokens) for s in samples)), pack(samples))[1]
    for _ in range(3):
        grpo_step(run, args)
    assert len(lengths) > 1
    assert compiled == []


def test_runs_of_one_process_share_their_programs(tmp_path, compiled):
    run, args = started(tmp_path / "first")
    grpo_step(run, args)
    compiled.clear()
    again, args = started(tmp_path / "second")
    grpo_step(again, args)
    assert again.learner == run.learner
    assert compiled == []
    other = parse([*TINY, "--out", str(tmp_path / "third"), "--learning-rate", "0.02"])
    assert set_up(other).learner != run.learner


def spoil(batch):
    """The batch with one infinite reward."""
    rewards = np.array(batch.rewards)
    rewards[0, 0] = np.inf
    return dataclasses.replace(batch, rewards=jax.device_put(rewards, batch.rewards.sharding))


def copy(tree):
    return jax.tree.map(lambda x: [np.array(s.data) for s in x.addressable_shards], tree)


def test_a_step_that_is_not_finite_changes_nothing_on_any_device(tmp_path):
    run, args = started(tmp_path)
    before = copy((run.state.params, run.state.optimizer))
    pack = run.pack
    run.pack = lambda samples: spoil(pack(samples))
    numbers = grpo_step(run, args)
    assert numbers["skipped"] == args.updates
    assert run.skipped_in_a_row == 1
    assert not np.isfinite(numbers["loss"])
    jax.tree.map(
        np.testing.assert_array_equal, copy((run.state.params, run.state.optimizer)), before
    )
    run.pack = pack
    assert grpo_step(run, args)["skipped"] == 0
    assert (run.skipped_in_a_row, run.step, int(run.state.step)) == (0, 2, 2)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.state.params))


@pytest.mark.nightly
def test_steps_in_a_row_that_are_not_finite_end_the_run(tmp_path, monkeypatch, capsys):
    pack = Packer.__call__
    calls = []

    def spoilt(self, samples):
        calls.append(samples)
        return spoil(pack(self, samples)) if len(calls) in (3, 5, 6) else pack(self, samples)

    # calls 1 and 2 are of supervised steps
    monkeypatch.setattr(grpo_run.Packer, "__call__", spoilt)
    assert main([*TINY, "--out", str(tmp_path), "--steps", "9", "--max-skipped", "2"]) == 1
    assert (
        "error: step 4: loss or gradient not finite in 2 steps in a row, expected fewer"
        in capsys.readouterr().err
    )
    lines = tiny_runs.records(tmp_path)
    assert [line["loss"] is None for line in lines] == [True, False, True, True]
    assert [line["skipped"] for line in lines] == [2, 0, 2, 2]


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "dp=1,cp=1,tp=8"])
def test_gradients_are_clipped_by_their_norm_over_all_shards(tmp_path, mesh):
    run = set_up(parse([*TINY, "--out", str(tmp_path), "--mesh", mesh]))
    clip = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    learner = dataclasses.replace(run.learner, optimizer=clip)
    before = jax.device_get(run.state.params)
    state = learner.start(run.state.params, 0)
    questions, _ = run.task.take(0, run.rollouts.batch_size)
    state, metrics = learner.sft_step(state, run.pack(answers(questions)))
    moved = jax.tree.map(
        lambda x, y: np.asarray(x, np.float64) - y, jax.device_get(state.params), before
    )
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved)))
    assert metrics["gradient_norm"] > 1e-2
    assert norm == pytest.approx(1e-3, rel=1e-3)  # parameters near 1 round at 6e-8


@pytest.mark.nightly
def test_a_spike_is_kept_with_its_ids_and_replayed(tmp_path):
    # so that all steps after the first few stand out
    run, args = started(tmp_path, "--spike-deviations", "1e-9")
    for _ in range(4):
        grpo_step(run, args)
    assert not (tmp_path / "spikes").exists()
    before = jax.tree.map(jnp.copy, run.state)
    numbers = grpo_step(run, args)
    batch = load_batch(tmp_path / "spikes" / "step_5.npz", run.learner.parallel)
    assert set(np.unique(batch.sample_ids)) - {-1} == set(range(16))
    assert set(np.unique(batch.group_ids)) - {-1} == set(range(4))
    _, metrics, _ = run.learner.grpo_step(before, batch)
    assert {name: float(x) for name, x in metrics.items()} == {
        name: numbers[name] for name in metrics
    }


def test_what_stands_out(tmp_path):
    batch = RolloutBatch.from_samples(
        [Sample([1, 2, 3], response_start=1, sample_id=7)], row_length=4
    )
    spikes = Spikes(tmp_path / "spikes", 3.0)
    losses = [1.0, 1.2, 0.8, 1.0, 1.4, 1.8, np.nan, 1.1, -5.0]
    found = [spikes.look(i, loss, batch) for i, loss in enumerate(losses)]
    assert [path is not None for path in found] == [False] * 5 + [True, True, False, True]
    kept = load_batch(found[-1], make_parallel_mesh("dp=1", devices=jax.devices()[:1]))
    for name, x in vars(batch).items():
        np.testing.assert_array_equal(getattr(kept, name), x, err_msg=name)


# No transfer or compilation that was not asked for


def test_as_many_programs_as_buckets(compiled):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    rng = np.random.default_rng(0)

    @jax.jit
    def step(batch):
        stats = TokenStats(batch.old_log_probs, None)
        return policy_loss(stats, batch, PolicyLossConfig(), parallel=parallel)[0]

    rows = set()
    for _ in range(40):
        samples = [
            Sample(
                np.arange(3 + n), response_start=3, old_log_probs=-np.ones(n), advantages=np.ones(n)
            )
            for n in rng.integers(1, 12, rng.integers(1, 60))
        ]
        batch = RolloutBatch.from_samples(
            samples, row_length=32, parallel=parallel, buckets=(4, 8, 16, 32), num_segments=8
        ).put(parallel)
        rows.add(batch.tokens.shape[0])
        jax.block_until_ready(step(batch))
    assert len(rows) > 2
    assert step._cache_size() == len(rows) <= 4
    assert len(compiled) <= len(rows)


def test_a_step_moves_only_what_it_asks_for_by_name(tmp_path, monkeypatch):
    run, args = started(tmp_path)
    grpo_step(run, args)
    read = []
    asked = []
    value = ArrayImpl._value
    device_get = jax.device_get

    def get(tree):
        asked.append(len(jax.tree.leaves(tree)))
        with monkeypatch.context() as inside:
            inside.setattr(ArrayImpl, "_value", value)
            return device_get(tree)

    monkeypatch.setattr(
        ArrayImpl, "_value", property(lambda x: (read.append(x.shape), value.__get__(x))[1])
    )
    monkeypatch.setattr(jax, "device_get", get)
    numbers = grpo_step(run, args)
    assert read == []
    # responses; metrics, beside which there are four numbers of the host
    assert asked == [3, len(numbers) - 4]


@pytest.mark.nightly
def test_a_transfer_that_nobody_asked_for_is_refused(tmp_path):
    run, args = started(tmp_path)
    pack = run.pack
    run.pack = lambda samples: jax.device_get(pack(samples))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        grpo_step(run, args)


def test_the_persistent_cache_is_on(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert main([*TINY, "--out", str(tmp_path), "--mesh", "dp=3"]) == 2
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
