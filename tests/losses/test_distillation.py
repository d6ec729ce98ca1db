"""Full-vocabulary divergences from hidden states, against logits written out, on any mesh."""

import dataclasses
import functools
import re
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import tiles_of
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from oracle import other_losses
from plain_head import reference_divergence
from programs import narrow_sums

from jaxppo import Head, LoRA, PolicyLossConfig, RolloutBatch, TokenStats, advantages, policy_loss
from jaxppo.losses.distillation import Divergence, distillation_loss, divergence_from_hidden
from jaxppo.policy_losses import Reinforce
from sharding import ParallelMesh, ShardAxes, make_parallel_mesh
from sharding.audit.program import hang_risks
from sharding.testing import assert_mesh_invariant, assert_trees_close

DIVERGENCES = get_args(Divergence)
R, T, H, TEACHER_H = 4, 8, 8, 12
MESHES = ["dp=2,cp=2,tp=2", "dp=1,cp=1,tp=8"]
MASK = np.zeros((R, T), bool)
MASK[0], MASK[1, 3:5], MASK[3, 7] = True, True, True


def heads(V, seed=0, dtype=jnp.float32):
    """(hidden states, head) of a student and of a teacher."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return rng.normal(size=shape).astype(dtype)

    def states(size):
        found = array(R, T, size)
        found[~MASK] = np.nan
        return jnp.asarray(found)

    hidden, teacher_hidden = states(H), states(TEACHER_H)
    student = Head(jnp.asarray(array(H, V)), bias=jnp.asarray(array(V)))
    teacher = Head(jnp.asarray(array(V, TEACHER_H)), layout="vh", softcap=4.0)
    return (hidden, student), (teacher_hidden, teacher)


def weighted(fn):
    """Values, and the gradients of a weighted sum of them with respect to the student's arrays."""
    weights = np.float32(np.arange(R * T).reshape(R, T) / 32 - 0.3)

    def run(student):
        found = fn(student)
        return (found * weights).sum(), found

    def value_and_grad(student):
        (_, found), grads = jax.value_and_grad(run, has_aux=True)(student)
        return found, grads

    return value_and_grad


@pytest.fixture(autouse=True)
def small_tiles():
    with tiles_of("small"):
        yield


# V: more than one block with a remainder; what tp=2 does not divide
@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("divergence", "V"), [*((d, 1000) for d in DIVERGENCES), ("jensen_shannon", 97)]
)
def test_against_logits_written_out_on_any_mesh(divergence, V):
    student, teacher = heads(V)

    def run(parallel, student, teacher):
        options = {"beta": 0.3, "temperature": 0.7, "where": MASK, "parallel": parallel}
        return weighted(
            lambda s: divergence_from_hidden(*s, *teacher, divergence=divergence, **options)
        )(student)

    got = assert_mesh_invariant(
        run, student, teacher, meshes=MESHES[:1] if V == 97 else MESHES, rtol=1e-5, atol=2e-6
    )
    expected = jax.jit(
        weighted(
            lambda s: reference_divergence(
                s, teacher, divergence, beta=0.3, temperature=0.7, where=MASK
            )
        )
    )(student)
    assert_trees_close(got, expected, rtol=1e-5, atol=2e-6)
    assert (np.asarray(got[0]) >= 0).all()


def in_f32(tree):
    return jax.tree.map(np.float32, tree)


@functools.cache
def written_out_in_f32():
    """Values and gradients of the heads of bf16 with 96 columns, computed in f32."""
    student, teacher = (in_f32(states) for states in heads(96, dtype=jnp.bfloat16))
    exact = weighted(lambda s: reference_divergence(s, teacher, where=MASK))
    return jax.jit(exact)(student)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_kernels_sharded_over_fsdp_and_bf16(sequence_parallel):
    parallel = make_parallel_mesh("fsdp=2,cp=2,tp=2", sequence_parallel=sequence_parallel)
    student, teacher = heads(96, dtype=jnp.bfloat16)
    run = jax.jit(
        weighted(lambda s: divergence_from_hidden(*s, *teacher, where=MASK, parallel=parallel))
    )
    found, gradients = run(student)
    expected, exact = written_out_in_f32()
    assert_trees_close(found, expected, rtol=1e-5, atol=2e-6)
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(gradients))
    # A bf16 model's logit gradient is rounded to bf16 before its products, 2^-9 of each term.
    assert_trees_close(in_f32(gradients), exact, rtol=2**-7, atol=2**-8)


def test_hidden_states_of_which_only_the_students_are_sharded_by_position():
    """They are gathered, and their gradients, which each device holds a part of, are summed in
    f32.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    by_position = dataclasses.replace(parallel, sequence_parallel=True).hidden_spec
    student, teacher = heads(96, dtype=jnp.bfloat16)
    specs = {"hidden_spec": by_position, "teacher_hidden_spec": parallel.hidden_spec}
    loss = weighted(
        lambda s: divergence_from_hidden(*s, *teacher, where=MASK, parallel=parallel, **specs)
    )
    assert narrow_sums(loss, student) == []
    found, gradients = jax.jit(loss)(student)
    expected, exact = written_out_in_f32()
    assert_trees_close(found, expected, rtol=1e-5, atol=2e-6)
    assert_trees_close(in_f32(gradients), exact, rtol=2**-7, atol=2**-8)


@functools.cache
def between_unpadded_heads():
    """The divergences of heads with 1000 columns, and the gradients of the student's head."""
    (hidden, student), (teacher_hidden, teacher) = heads(1000)

    def fn(head):
        return divergence_from_hidden(hidden, head, teacher_hidden, teacher, where=MASK)

    return jax.jit(weighted(fn))(student)


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_heads_of_one_vocabulary_with_other_padding(mesh):
    """Qwen's sizes pad one vocabulary to other numbers of columns: 1000 tokens in 1004 and in
    1024 columns.
    """
    (hidden, student), (teacher_hidden, teacher) = heads(1000)
    parallel = mesh and make_parallel_mesh(mesh)
    kernel = np.pad(student.kernel, ((0, 0), (0, 4)), constant_values=3)
    padded = Head(kernel, np.pad(student.bias, (0, 4)), vocab_size=1000)
    wider_kernel = np.pad(teacher.kernel, ((0, 24), (0, 0)))
    wider = dataclasses.replace(teacher, kernel=wider_kernel, vocab_size=1000)

    def fn(head):
        states = hidden, head, teacher_hidden, wider
        return divergence_from_hidden(*states, where=MASK, parallel=parallel)

    expected, of_head = between_unpadded_heads()
    found, gradient = jax.jit(weighted(fn))(padded)
    assert_trees_close(found, expected, rtol=1e-5, atol=2e-6)
    by_kernel = np.asarray(gradient.kernel)
    assert_trees_close(by_kernel[:, :1000], of_head.kernel, rtol=1e-5, atol=2e-6)
    assert not by_kernel[:, 1000:].any()
    unnamed = dataclasses.replace(wider, vocab_size=None)
    with pytest.raises(
        ValueError, match=r"teacher_head.kernel: got 1024 columns, expected the student's 1000"
    ):
        divergence_from_hidden(hidden, student, teacher_hidden, unnamed, where=MASK)


@pytest.mark.parametrize("is_cut", [False, True])
def test_vocabularies_with_other_padding_inside_a_users_shard_map(is_cut):
    """Whole kernels are padded as outside.

    Of one that is cut, padding would move the columns of the next device.
    """
    (hidden, student), (teacher_hidden, teacher) = heads(96)
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")
    kernel = np.pad(student.kernel, ((0, 0), (0, 4)), constant_values=3)
    teacher_kernel = np.pad(teacher.kernel, ((0, 24), (0, 0)))
    of_kernels = (mesh.kernel_spec(), mesh.kernel_spec("vh")) if is_cut else (P(), P())

    def inside(hidden, kernel, teacher_hidden, teacher_kernel, where):
        mine = Head(kernel, vocab_size=96)
        theirs = dataclasses.replace(teacher, kernel=teacher_kernel, vocab_size=96)
        axes = ShardAxes("dp", "cp", "tp")
        return divergence_from_hidden(
            hidden, mine, teacher_hidden, theirs, where=where, parallel=axes
        )

    specs = (mesh.hidden_spec, of_kernels[0], mesh.hidden_spec, of_kernels[1], mesh.tokens_spec)
    mapped = jax.jit(
        jax.shard_map(inside, mesh=mesh.mesh, in_specs=specs, out_specs=mesh.tokens_spec)
    )
    args = hidden, kernel, teacher_hidden, teacher_kernel, MASK
    if is_cut:
        advice = "pad kernels that a shard_map cuts to one width before it, and give vocab_size"
        with pytest.raises(
            ValueError,
            match=rf"^teacher_head.kernel: got 120 columns, expected the student's 100; {advice}",
        ):
            mapped(*args)
        return
    expected = reference_divergence(
        (hidden, Head(student.kernel)), (teacher_hidden, teacher), where=MASK
    )
    assert_trees_close(mapped(*args), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("of", ["student", "teacher", "both"])
def test_no_loop_over_the_tokens_of_a_device_gathers_a_kernel(of):
    """Devices have 0 to 160 tokens that count, in chunks of 16, and gradients gather the kernels
    by block.
    """
    rng = np.random.default_rng(3)
    parallel = make_parallel_mesh("fsdp=8")
    where = np.arange(160)[None] < np.array([0, 1, 16, 17, 40, 100, 159, 160])[:, None]
    hidden = np.where(where[..., None], rng.normal(size=(8, 160, 16)), np.nan).astype(np.float32)
    kernels = [np.float32(rng.normal(size=(16, 256))) for _ in range(2)]
    specs = [None if of in (name, "both") else P() for name in ("student", "teacher")]
    weights = np.cos(np.arange(160, dtype=np.float32))[None]

    def on_devices(hidden, kernel):
        one, two = (Head(k, spec=spec) for k, spec in zip((kernel, kernels[1]), specs, strict=True))
        return (
            divergence_from_hidden(hidden, one, hidden, two, where=where, parallel=parallel)
            * weights
        ).sum()

    def written_out(hidden, kernel):
        states = (hidden, Head(kernel)), (hidden, Head(kernels[1]))
        return (reference_divergence(*states, where=where) * weights).sum()

    found = jax.jit(jax.value_and_grad(on_devices, (0, 1)))
    assert hang_risks(found.trace(hidden, kernels[0]).jaxpr) == []
    expected = jax.jit(jax.value_and_grad(written_out, (0, 1)))(hidden, kernels[0])
    assert_trees_close(found(hidden, kernels[0]), expected, rtol=1e-5, atol=2e-5)


def test_padded_columns_and_a_frozen_head():
    (hidden, head), (teacher_hidden, teacher) = heads(600)
    kernel, bias = np.array(head.kernel), np.array(head.bias)
    of_teacher = np.asarray(teacher.kernel)
    shorter = (
        Head(kernel[:, :500].copy(), bias[:500]),
        dataclasses.replace(teacher, kernel=of_teacher[:500]),
    )
    kernel[:, 500:] = np.nan
    spoiled = Head(kernel, bias, vocab_size=500)
    padded = dataclasses.replace(teacher, vocab_size=500)

    def gradient(head, teacher):
        def run(hidden):
            return divergence_from_hidden(hidden, head, teacher_hidden, teacher, where=MASK).sum()

        return jax.jit(jax.value_and_grad(run))(hidden)

    assert_trees_close(gradient(spoiled, padded), gradient(*shorter))


def test_lora_of_student_and_teacher():
    (hidden, head), (teacher_hidden, teacher) = heads(97)
    rng = np.random.default_rng(7)

    def adapter(n):
        return LoRA(
            *(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((n, 2), (2, 97))), scale=0.5
        )

    student = hidden, dataclasses.replace(head, lora=adapter(H))
    other = teacher_hidden, dataclasses.replace(teacher, lora=adapter(TEACHER_H))

    def run(parallel, student, other):
        def call(s):
            return divergence_from_hidden(*s, *other, where=MASK, parallel=parallel)

        return weighted(call)(student)

    got = assert_mesh_invariant(run, student, other, meshes=MESHES, rtol=1e-5, atol=2e-6)
    expected = jax.jit(weighted(lambda s: reference_divergence(s, other, where=MASK)))(student)
    assert_trees_close(got, expected, rtol=1e-5, atol=3e-6)


def test_a_temperature_of_a_token_without_a_cotangent():
    (hidden, head), (teacher_hidden, teacher) = heads(97)

    @jax.jit
    def gradients(temperature):
        def run(hidden, kernel):
            student = dataclasses.replace(head, kernel=kernel)
            options = {"where": MASK, "temperature": temperature}
            found = divergence_from_hidden(hidden, student, teacher_hidden, teacher, **options)
            return found.at[3].set(0).sum()

        return jax.grad(run, (0, 1))(hidden, head.kernel)

    temperature = jnp.full((R, T), 0.7)
    assert_trees_close(gradients(temperature.at[3].set(0)), gradients(temperature), 0, 0)


def test_same_distribution_is_zero_and_far_ones_are_finite():
    student, _ = heads(97)
    assert_trees_close(divergence_from_hidden(*student, *student, where=MASK), jnp.zeros((R, T)))
    far = student[0], Head(1e4 * student[1].kernel)
    for divergence in DIVERGENCES:
        run = weighted(
            lambda s, d=divergence: divergence_from_hidden(*s, *far, divergence=d, where=MASK)
        )
        chex.assert_tree_all_finite(jax.jit(run)(student))


def test_inside_a_users_shard_map():
    (hidden, head), (teacher_hidden, teacher) = heads(64)
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")
    specs = [
        mesh.hidden_spec,
        mesh.kernel_spec(),
        mesh.hidden_spec,
        mesh.kernel_spec("vh"),
        mesh.tokens_spec,
    ]

    def inside(hidden, kernel, teacher_hidden, teacher_kernel, where):
        yours = Head(teacher_kernel, layout="vh", softcap=4.0)
        axes = ShardAxes("dp", "cp", "tp")
        return divergence_from_hidden(
            hidden, Head(kernel), teacher_hidden, yours, where=where, parallel=axes
        )

    expected = divergence_from_hidden(hidden, head.kernel, teacher_hidden, teacher, where=MASK)
    mapped = jax.shard_map(
        inside, mesh=mesh.mesh, in_specs=tuple(specs), out_specs=mesh.tokens_spec
    )
    got = jax.jit(mapped)(hidden, head.kernel, teacher_hidden, teacher.kernel, MASK)
    assert_trees_close(got, expected, atol=2e-6)


def test_no_array_has_the_vocabulary_for_each_token():
    student, teacher = heads(4096)
    options = {"where": MASK}
    run = jax.grad(lambda s: divergence_from_hidden(*s, *teacher, **options).sum())
    with tiles_of("five"):
        shapes = set(re.findall(r"f32\[([0-9,]*)\]", str(jax.make_jaxpr(run)(student))))
    assert "5,512" in shapes  # a tile of the second pass
    of_parameters = {f"{H},4096", f"4096,{TEACHER_H}", "4096", "1,4096"}
    assert {s for s in shapes if "4096" in s} == of_parameters | {"5,4096"}  # a chunk's logits


@pytest.mark.nightly
def test_temporaries_on_a_tpu_pod():
    """A Qwen3-8B head learning from a Qwen3-32B head: plain logits of both, in f32, would take
    4.6 GiB each.
    """
    topology = topologies.get_topology_desc("v5p:2x2x4", platform="tpu")
    parallel = ParallelMesh(
        jax.sharding.Mesh(np.array(topology.devices).reshape(4, 4), ("cp", "tp"))
    )
    V = 151936
    tokens = 4 * 8192

    def like(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=parallel.sharding(spec))

    hidden = parallel.hidden_spec
    kernel = parallel.kernel_spec()
    args = [
        like(spec, *shape)
        for h in (4096, 5120)
        for spec, shape in ((hidden, (1, tokens, h)), (kernel, (h, V)))
    ]

    def loss(hidden, kernel, *teacher):
        return divergence_from_hidden(hidden, kernel, *teacher, parallel=parallel).sum()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * 2**30


def test_distillation_loss_is_the_mean_over_loss_tokens():
    student, teacher = heads(97)
    ids = jnp.ones((R, T), int)
    sample = jnp.zeros((R, 1), int)
    batch = RolloutBatch(ids, ids, ids, ids, jnp.asarray(MASK, jnp.float32), sample)
    written_out = jax.jit(lambda s, t: reference_divergence(s, t, "forward_kl", where=MASK))
    expected = np.asarray(written_out(student, teacher))[MASK].mean()
    for mesh in (None, make_parallel_mesh(MESHES[0])):
        run = jax.jit(
            lambda s, t, b, p=mesh: distillation_loss(
                *s, *t, b, divergence="forward_kl", parallel=p
            )
        )
        loss, metrics = run(student, teacher, batch)
        np.testing.assert_allclose([loss, metrics["divergence"].value], expected, rtol=1e-5)


def test_bad_input():
    student, teacher = heads(97)
    for kwargs, message in [
        (
            {"divergence": "kl"},
            "divergence: got 'kl', expected one of 'reverse_kl', 'forward_kl', 'jensen_shannon'",
        ),
        ({"beta": 1.0}, r"beta: got 1.0, expected a number in \(0, 1\)"),
        ({"temperature": 0.0}, "temperature: got 0.0"),
        ({"where": MASK[:2]}, "where: got shape"),
        ({"memory": 0}, "memory: got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            divergence_from_hidden(*student, *teacher, **kwargs)
    with pytest.raises(
        ValueError, match=r"teacher_head.kernel: got 96 columns, expected the student's 97"
    ):
        divergence_from_hidden(*student, *heads(96)[1])
    for own, sizes in ((90, "90 and the student's 97"), (None, "96 and the student's 97")):
        other = dataclasses.replace(heads(96)[1][1], vocab_size=own)
        with pytest.raises(
            ValueError,
            match=rf"^teacher_head.kernel: .* give both heads one vocab_size, here {sizes}",
        ):
            divergence_from_hidden(*student, heads(96)[1][0], other)
    with pytest.raises(
        ValueError, match=r"teacher_head.vocab_size: got 90, expected the student's, 97"
    ):
        divergence_from_hidden(*student, teacher[0], dataclasses.replace(teacher[1], vocab_size=90))
    with pytest.raises(TypeError, match=r"teacher_head: got tuple, expected a jaxppo.Head"):
        divergence_from_hidden(*student, teacher[0], (teacher[1],))
    with pytest.raises(ValueError, match=r"teacher_hidden: got"):
        divergence_from_hidden(*student, teacher[0][:, :4], teacher[1])


@pytest.mark.every(5)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("distance", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
def test_divergences_of_nearly_equal_heads(divergence, distance):
    """At least 0, and right in the first digit.

    An earlier version gave down to -3.4e-7, whatever the distance.
    """
    V = 1000
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4, 64, H)).astype(np.float32)
    kernel = rng.normal(size=(H, V)).astype(np.float32)
    other = (kernel + distance * rng.normal(size=kernel.shape)).astype(np.float32)
    options = {"divergence": divergence, "beta": 0.3}
    found = np.asarray(
        jax.jit(lambda *x: divergence_from_hidden(*x, **options))(hidden, kernel, hidden, other)
    )
    z, other_z = (
        hidden.astype(np.float64).reshape(-1, H) @ k.astype(np.float64) for k in (kernel, other)
    )
    expected, _ = other_losses.divergence(z, other_z, divergence, 0.3)
    assert found.min() >= 0
    # an f32 logit is 2e-6 off, which counts by its square and by its product with the distance
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-5, atol=1e-11 + 4e-6 * distance)


@jax.jit
def between(half, whole):
    """The divergences of one token between heads p and q, by the names of p and q and by kind."""
    hidden = jnp.ones((1, 1, 2))
    heads_by_name = {"half": half, "whole": whole}
    found = {}
    for p, q in (("half", "whole"), ("whole", "half"), ("half", "half")):
        states = hidden, heads_by_name[p], hidden, heads_by_name[q]
        for kind in DIVERGENCES:
            found[p, q, kind] = divergence_from_hidden(*states, divergence=kind)[0, 0]
    return found


def test_a_divergence_where_one_model_excludes_a_column():
    """p log(p / q) is infinite where q is 0, and 0 where p is 0."""
    kernel = np.zeros((2, 4), np.float32)
    bias = np.float32([0.0, 0.0, -np.inf, -np.inf])
    of = between(Head(kernel, bias), Head(kernel))
    assert float(of["half", "whole", "reverse_kl"]) == pytest.approx(np.log(2), rel=1e-6)
    assert float(of["whole", "half", "forward_kl"]) == pytest.approx(np.log(2), rel=1e-6)
    assert of["whole", "half", "reverse_kl"] == of["half", "whole", "forward_kl"] == np.inf
    assert of["half", "half", "reverse_kl"] == of["half", "half", "jensen_shannon"] == 0
    of_half = np.log(0.5 / 0.375)
    of_whole = 0.5 * np.log(0.25 / 0.375) + 0.5 * np.log(0.25 / 0.125)
    mixed = float(of["whole", "half", "jensen_shannon"])
    assert mixed == pytest.approx((of_half + of_whole) / 2, rel=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("of_teacher", [False, True])
def test_a_head_that_excludes_all_columns_has_no_divergence(divergence, of_teacher):
    """As its log-probs it is NaN; a token that does not count has 0."""
    hidden = jnp.ones((1, 2, 2))
    kernel = jnp.eye(2, 4)
    some = Head(kernel)
    none = Head(kernel, jnp.full(4, -jnp.inf))
    first, second = (some, none) if of_teacher else (none, some)
    options = {"divergence": divergence, "where": jnp.array([[True, False]])}
    found = divergence_from_hidden(hidden, first, hidden, second, **options)
    assert np.isnan(found[0, 0])
    assert found[0, 1] == 0


def test_distillation_through_advantages_in_expectation():
    """Weighed by the policy's probabilities, the gradients of all tokens add up to that of
    KL(policy | teacher).

    An advantage of minus the divergence, as recipes once said, is a baseline: its expected gradient
    is 1e-8.
    """
    logits, teacher = np.random.default_rng(0).normal(size=(2, 5))
    p = np.exp(logits) / np.exp(logits).sum()
    log_ratio = np.log(p) - teacher + np.log(np.exp(teacher).sum())
    divergence = p @ log_ratio
    expected = p * (log_ratio - divergence)  # of the divergence by the logits
    ids = jnp.arange(1, 6)[None]
    batch = RolloutBatch(ids, ids, ids, 0 * ids, jnp.ones((1, 5)), ids, real_last_targets=True)
    weights = jnp.asarray(p, jnp.float32)[None]

    @jax.jit
    def gradient(of_tokens):
        step = dataclasses.replace(batch, advantages=of_tokens, loss_weights=weights)
        config = PolicyLossConfig(Reinforce(), aggregation="token_sum", ratio_to="current")

        def loss(x):
            return policy_loss(TokenStats(jax.nn.log_softmax(x)[None]), step, config)[0]

        return jax.grad(loss)(jnp.asarray(logits, jnp.float32))

    given = [jnp.asarray(x, jnp.float32)[None] for x in (np.log(p), np.log(p) - log_ratio)]
    right = advantages.on_policy_distillation(jnp.zeros((1, 5)), *given, batch.loss_mask)
    np.testing.assert_allclose(gradient(right), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        gradient(right + np.float32(divergence)), expected, rtol=1e-5, atol=1e-6
    )
    assert np.abs(expected).max() > 0.1
    assert np.abs(gradient(jnp.full((1, 5), -divergence, jnp.float32))).max() < 1e-6
