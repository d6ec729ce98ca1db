"""One process of several: it packs its own samples, computes loss and gradients of the global
batch, and prints them.

python processes.py RANK COUNT PORT MESH LAYOUT

With a last argument "refusals", it prints too how batches are refused that are bad on one process,
or that do not fit those of the other processes.
"""

import dataclasses
import json
import os
import sys
import time

import jax
import numpy as np

TABLE, KERNEL = (
    np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((16, 8), (8, 16))
)
EMPTY = 2  # an empty response
VALUES = ("old_log_probs", "ref_log_probs", "advantages")


def own_samples(rank):
    """`samples` with ids that no other process has."""
    return [dataclasses.replace(s, sample_id=s.sample_id + 10 * rank) for s in samples()]


def samples():
    """Six short rollouts: in rows of 64 positions, most context shards hold nothing but padding."""
    from jaxppo import Sample

    rng = np.random.default_rng(1)
    found = []
    for i in range(6):
        response = 0 if i == EMPTY else int(rng.integers(2, 6))
        values = {name: rng.normal(size=response) for name in VALUES}
        values |= {name: -np.abs(values[name]) for name in ("old_log_probs", "ref_log_probs")}
        tokens = rng.integers(0, 16, size=3 + response)
        found.append(
            Sample(tokens, response_start=3, sample_id=i, rollout_id=i // 2, reward=1.0, **values)
        )
    return found


def step(parallel, table, kernel, batch):
    """Loss, gradients and metrics of a policy that reads one token before, and of one that reads
    two.
    """
    from jaxppo import KL, PolicyLossConfig, finalize_metrics, log_probs_from_hidden, policy_loss
    from jaxppo.losses.mtp import mtp_loss

    def loss(table, kernel):
        hidden = table[batch.tokens]
        counted = batch.loss_mask > 0
        stats = log_probs_from_hidden(
            hidden, kernel, batch.targets, entropy="bonus", where=counted, parallel=parallel
        )
        config = PolicyLossConfig(kl=KL(0.1), entropy_coef=0.01, aggregation="rollout_mean")
        value, found = policy_loss(stats, batch, config, parallel=parallel)
        further, more = mtp_loss([hidden], kernel, batch, parallel=parallel)
        return value + further, finalize_metrics(found | more)

    (value, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(table, kernel)
    return value, found, gradients


def branches():
    """`samples` whose first four tokens are equal: their prompt, and a token of the response."""
    found = []
    for sample in samples():
        tokens = sample.tokens.copy()
        tokens[:4] = [5, 6, 7, 8][: len(tokens)]
        found.append(dataclasses.replace(sample, tokens=tokens))
    return found


def step_of_branches(parallel, table, kernel, given):
    """Loss and gradients of a policy that reads one token, on a batch or on trees."""
    from jaxppo import KL, PolicyLossConfig, log_probs_from_hidden, policy_loss
    from jaxppo.batch.token_trees import TokenTrees

    trees = isinstance(given, TokenTrees)
    rows, batch = (given.rows, given.batch) if trees else (given, given)

    def loss(table, kernel):
        states = table[rows.tokens], kernel, rows.targets
        stats = log_probs_from_hidden(
            *states, entropy="bonus", where=rows.loss_mask > 0, parallel=parallel
        )
        if trees:
            stats = given.to_batch(stats, parallel=parallel)
        config = PolicyLossConfig(kl=KL(0.1), entropy_coef=0.01, aggregation="rollout_mean")
        return policy_loss(stats, batch, config, parallel=parallel)[0]

    return jax.value_and_grad(loss, (0, 1))(table, kernel)


def refusals(rank):
    """By name, the error that each bad batch raises on this process.

    Process 1 is the one with the bad data.
    """
    from jaxppo import RolloutBatch
    from sharding import make_parallel_mesh, multihost

    own = make_parallel_mesh("dp=2,cp=4")
    shared = make_parallel_mesh("cp=4,tp=2")
    good = own_samples(rank)

    def change(i, **values):
        return [dataclasses.replace(s, **values) if s is good[i] else s for s in good]

    def mine(wrong):
        return wrong if rank == 1 else good

    def different(offset):
        return [dataclasses.replace(s, group_id=g + offset) for g, s in enumerate(good)]

    long = {"tokens": np.zeros(70, int), "response_start": 70, **dict.fromkeys(VALUES)}
    cases = {
        "rows": (own, good, {"rows": 1 + rank}),
        "buckets": (own, good, {"buckets": (2, 4) if rank else (2,)}),
        "none": (own, mine([]), {}),
        "kind": (own, mine([*good, "a sample"]), {}),
        "long": (own, mine(change(0, **long)), {}),
        "same id": (own, mine(change(0, sample_id=11)), {}),
        "ids of hosts": (own, samples(), {}),
        "value": (own, mine(change(0, advantages=None)), {}),
        "values": (own, mine([dataclasses.replace(s, advantages=None) for s in good]), {}),
        "group": (own, mine(different(2)) if rank else different(0), {}),
        "twin": (own, good, {"twin": mine(change(0, **long))}),
        "no twin": (own, good, {"twin": good} if rank else {}),
        "other rows": (shared, [dataclasses.replace(s, reward=1.0 + rank) for s in samples()], {}),
    }
    found = {}
    for name, (parallel, given, options) in cases.items():
        try:
            RolloutBatch.from_samples(given, row_length=64, parallel=parallel, **options).put(
                parallel
            )
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    try:
        with multihost.together(own):
            if rank == 1:
                raise ValueError(f"file: got {os.fsdecode(b'no' + bytes([255]))}")
    except ValueError as error:
        found["bytes"] = f"{type(error).__name__}: {error}"
    return found


def packed_with_a_twin(rank, parallel):
    """The shapes of a batch and of its twin, and whether their loss masks are equal on this
    process.
    """
    from jaxppo import RolloutBatch

    own = own_samples(rank)
    hint = np.zeros(3 + 9 * rank, int)  # with which six samples fill one row, or two
    hinted = [
        dataclasses.replace(
            s, tokens=np.concatenate([hint, s.tokens]), response_start=3 + len(hint)
        )
        for s in own
    ]
    batches = RolloutBatch.from_samples(own, row_length=64, parallel=parallel, twin=hinted)
    masks = [
        [np.asarray(shard.data) for shard in x.put(parallel).loss_mask.addressable_shards]
        for x in batches
    ]
    same = all((a == b).all() for a, b in zip(*masks, strict=True))
    return [*batches[0].tokens.shape, *batches[1].tokens.shape, same]


def packed_while_devices_work(rank, parallel):
    """Packs and places a batch; returns its shape, and whether devices were still busy with an
    earlier program.
    """
    from jaxppo import RolloutBatch

    long = jax.jit(lambda x: jax.lax.fori_loop(0, 2**31 - 1, lambda _, y: jax.numpy.sin(y) + 1, x))
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(jax.local_devices()), "x"), jax.P("x"))
    # a program of all devices: on CPUs, the host would wait for that of one device
    running = long(jax.device_put(np.zeros(8), sharding))
    batch = RolloutBatch.from_samples(own_samples(rank), row_length=64, parallel=parallel).put(
        parallel
    )
    return [*batch.tokens.shape, not running.is_ready()]


def check_packing(table, parallel):
    """What the check says of a model that follows `batch.paths`, and of one that is blind to
    segments.
    """
    from jaxppo import assert_packing_invariant

    def right(table, batch):
        seen = batch.paths.attends(batch.paths).astype(np.float32)
        return seen / seen.sum(-1, keepdims=True) @ table[batch.tokens]

    def blind(table, batch):
        seen = np.tri(batch.tokens.shape[1], dtype=np.float32)
        return seen / seen.sum(-1, keepdims=True) @ table[batch.tokens]

    options = {"vocab_size": len(TABLE), "parallel": parallel}
    found = assert_packing_invariant(jax.jit(right), table, **options)
    try:
        assert_packing_invariant(jax.jit(blind), table, **options)
    except AssertionError as error:
        return [max(found.values()), str(error)]
    return [max(found.values()), "passed"]


def numbers(rank, parallel):
    """Loss, gradients and metrics of the global batch and of its trees, and what the check of
    packing says.
    """
    from jaxppo import RolloutBatch
    from jaxppo.batch.token_trees import TokenTrees
    from sharding import multihost

    mine = slice(None)
    # each feeds rows of its own, 4 samples and 2
    if len(multihost.local_data_shards(parallel)) < parallel.data_size:
        mine = slice(4) if rank == 0 else slice(4, None)
    packed = {"row_length": 64, "parallel": parallel}
    batch = RolloutBatch.from_samples(samples()[mine], **packed).put(parallel)
    trees = TokenTrees.from_samples(branches()[mine], **packed).put(parallel)
    kernel = multihost.to_global(KERNEL, parallel.kernel_spec(), parallel)
    table = multihost.to_global(TABLE, jax.P(), parallel)
    value, found, gradients = jax.jit(lambda *args: step(parallel, *args))(table, kernel, batch)
    of_branches, slopes = jax.jit(lambda *args: step_of_branches(parallel, *args))(
        table, kernel, trees
    )
    # for every process to read
    whole = jax.jit(lambda x: x, out_shardings=parallel.sharding(jax.P()))

    def as_lists(arrays):
        return [np.asarray(whole(x).addressable_data(0)).tolist() for x in arrays]

    return {
        "loss": float(value),
        "metrics": {name: float(x) for name, x in found.items()},
        "gradients": as_lists(gradients),
        "branches": [float(of_branches), *as_lists(slopes)],
        "rows": batch.tokens.shape[0],
        "packing": check_packing(table, parallel),
    }


def main(rank, count, port, mesh, layout, event=None):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // count)
    from sharding import make_parallel_mesh, multihost

    multihost.start(f"127.0.0.1:{port}", count, rank)
    assert jax.device_count() == 8
    printed = {"numbers": numbers(rank, make_parallel_mesh(mesh, context_layout=layout))}
    if event == "refusals":
        parallel = make_parallel_mesh("dp=2,cp=4")
        printed["refusals"] = refusals(rank)
        printed["with a twin"] = packed_with_a_twin(rank, parallel)
        printed["while devices work"] = packed_while_devices_work(rank, parallel)
    print(json.dumps(printed), flush=True)
    if event == "refusals":
        if rank == 0:
            # the coordinator is in this process, and the other process may still read from it
            time.sleep(2)
        os._exit(0)  # without waiting for the devices


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
