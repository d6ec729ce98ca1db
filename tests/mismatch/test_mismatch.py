"""How far sampler and trainer are apart: token by token over the vocabulary, and the report with
its command line.
"""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import tiles_of
from oracle import OracleHead, mismatch
from oracle import head as oracle_head
from programs import without_gpu_plugin

from jaxppo import Head, LoRA, ShardAxes, log_probs_from_hidden, make_parallel_mesh
from jaxppo.mismatch import TokenMismatch, mismatch_report, token_mismatch
from jaxppo.mismatch.__main__ import compare, main, read
from sharding.testing import assert_mesh_invariant, assert_trees_close

R, T, H = 4, 8, 8
MESHES = ["dp=2,cp=2,tp=2", "dp=1,cp=1,tp=8"]
WHERE = np.zeros((R, T), bool)
WHERE[0], WHERE[1, 3:5], WHERE[3, 7] = True, True, True
EXACT = ("kl", "reverse_kl", "total_variation", "same_top")


def models(V, seed=0, distance=0.3, dtype=jnp.float32):
    """(hidden states, head) of a trainer, and of a sampler near it whose head lies the other way
    and has an adapter.
    """
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    hidden = array(R, T, H)
    kernel = array(H, V)
    bias = array(V)

    def near(x):
        return x + jnp.asarray(distance, dtype) * array(*x.shape)

    def spoilt(x):
        return jnp.where(WHERE[..., None], x, jnp.nan)

    lora = LoRA(distance * array(H, 2), array(2, V), scale=0.5)
    other = Head(near(kernel).T, bias, lora, layout="vh", softcap=30.0)
    return (spoilt(hidden), Head(kernel, bias)), (spoilt(near(hidden)), other)


def truth(model, temperature=1.0):
    """Logits in float64 at the tokens that count."""
    hidden, head = model

    def as_f64(x):
        return None if x is None else np.asarray(x, np.float64)

    lora = (
        (None, None, 1.0)
        if head.lora is None
        else (as_f64(head.lora.a), as_f64(head.lora.b), head.lora.scale)
    )
    kernel = as_f64(head.kernel) if head.layout == "hv" else as_f64(head.kernel).T
    plain = OracleHead(kernel, as_f64(head.bias), *lora, head.softcap, head.scale, head.vocab_size)
    return oracle_head.logits(as_f64(hidden)[WHERE], plain, temperature)


@pytest.fixture
def small_tiles():
    with tiles_of("small"):
        yield


# V: more than one block with a remainder; what tp=2 does not divide
@pytest.mark.every(2)
@pytest.mark.parametrize("V", [1000, 97])
def test_against_logits_written_out_on_any_mesh(small_tiles, V):
    trainer, sampler = models(V)
    targets = jnp.asarray(np.random.default_rng(1).integers(0, V, (R, T)))

    def run(parallel, trainer, sampler):
        return token_mismatch(
            *trainer, *sampler, targets, temperature=0.7, where=WHERE, parallel=parallel
        )

    got = assert_mesh_invariant(
        run, trainer, sampler, meshes=MESHES[:1] if V == 97 else MESHES, rtol=2e-5, atol=2e-6
    )
    expected = mismatch.comparison(truth(trainer, 0.7), truth(sampler, 0.7))
    for name in EXACT:
        np.testing.assert_allclose(
            np.asarray(getattr(got, name))[WHERE], expected[name], rtol=1e-5, atol=1e-6
        )
        assert (np.asarray(getattr(got, name))[~WHERE] == 0).all()
    stats = log_probs_from_hidden(*trainer, targets, temperature=0.7, where=WHERE, entropy="metric")
    np.testing.assert_allclose(got.log_probs, stats.log_probs, rtol=1e-6)
    np.testing.assert_allclose(got.entropy, stats.entropy, rtol=1e-6)
    np.testing.assert_allclose(
        got.rollout_log_probs,
        log_probs_from_hidden(*sampler, targets, temperature=0.7, where=WHERE).log_probs,
        rtol=1e-6,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fsdp_and_bf16(small_tiles, sequence_parallel):
    parallel = make_parallel_mesh("fsdp=2,cp=2,tp=2", sequence_parallel=sequence_parallel)
    trainer, sampler = models(96, dtype=jnp.bfloat16)
    targets = jnp.zeros((R, T), jnp.int32)
    run = jax.jit(lambda a, b, p=parallel: token_mismatch(*a, *b, targets, where=WHERE, parallel=p))
    got = run(trainer, sampler)
    alone = jax.jit(lambda a, b: token_mismatch(*a, *b, targets, where=WHERE))(trainer, sampler)
    assert_trees_close(got, alone, rtol=2e-5, atol=2e-6)
    expected = mismatch.comparison(truth(trainer), truth(sampler))
    # the adapter's features are rounded to bf16, which the truth does not know: 2^-9 of a tenth of
    # a logit
    np.testing.assert_allclose(np.asarray(got.kl)[WHERE], expected["kl"], rtol=5e-3, atol=1e-3)


def test_inside_a_users_shard_map():
    (hidden, head), (other_hidden, other) = models(64)
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")
    targets = jnp.zeros((R, T), jnp.int32)

    def inside(hidden, kernel, other_hidden, other_kernel, targets, where):
        axes = ShardAxes("dp", "cp", "tp")
        yours = Head(other_kernel, layout="vh")
        return token_mismatch(
            hidden, kernel, other_hidden, yours, targets, where=where, parallel=axes
        )

    tokens = mesh.tokens_spec
    states = mesh.hidden_spec
    specs = (states, mesh.kernel_spec(), states, mesh.kernel_spec("vh"), tokens, tokens)
    got = jax.jit(jax.shard_map(inside, mesh=mesh.mesh, in_specs=specs, out_specs=tokens))(
        hidden, head.kernel, other_hidden, other.kernel, targets, WHERE
    )
    yours = Head(other.kernel, layout="vh")
    assert_trees_close(
        got,
        token_mismatch(hidden, head.kernel, other_hidden, yours, targets, where=WHERE),
        atol=2e-6,
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", [None, "tp=8"])
def test_of_equally_likely_tokens_the_first_counts(small_tiles, mesh):
    """In many blocks on many shards; -inf and padded columns are never likeliest."""
    V = 4096
    parallel = mesh and make_parallel_mesh(mesh)
    hidden = np.ones((1, 8, 2), np.float32)
    targets = np.zeros((1, 8), np.int32)
    kernel = np.zeros((2, V), np.float32)

    def first(*likeliest):
        bias = np.zeros(V, np.float32)
        bias[list(likeliest)] = 1.0
        return Head(kernel, bias, vocab_size=V - 1)

    @jax.jit
    def of(trainer, sampler):
        return token_mismatch(hidden, trainer, hidden, sampler, targets, parallel=parallel)

    assert (np.asarray(of(first(700, 3000), first(700)).same_top) == 1).all()
    assert (np.asarray(of(first(700, 3000), first(3000)).same_top) == 0).all()
    spoilt = first(700)
    spoilt.bias[[5, V - 1]] = -np.inf, np.nan
    found = jax.tree.map(np.asarray, of(spoilt, first(700)))
    assert (found.same_top == 1).all()
    # the trainer finds a token impossible that the sampler draws
    assert np.isfinite(found.kl).sum() == 0
    assert np.isfinite(found.reverse_kl).all()
    assert np.isfinite(found.rounding).all()


# What rounding explains, and what it does not

N, WIDE, V_WIDE = 512, 256, 1024


@functools.cache
@jax.jit
def wide_model():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, N, WIDE))
    kernel = jax.random.normal(keys[1], (WIDE, V_WIDE)) / WIDE**0.5 * 2
    return hidden, kernel, jax.random.categorical(keys[2], hidden @ kernel)


def rounded(x, dtype):
    return x.astype(dtype).astype(jnp.float32)


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_rounding_is_within_its_bound_and_the_bound_is_near(dtype, logits_dtype):
    hidden, kernel, targets = wide_model()
    other = Head(rounded(kernel, dtype), logits_dtype=logits_dtype)
    found = mismatch_report(
        token_mismatch(hidden, kernel, rounded(hidden, dtype), other, targets, rounded_to=dtype)
    )
    assert found.figures["beyond_rounding"] == 0
    ratio = found.figures["rounding_rms"] / found.figures["rms"]
    assert 2 < ratio < 20, ratio


def test_the_order_of_sums_is_within_the_bound_of_f32():
    hidden, kernel, targets = wide_model()
    parallel = make_parallel_mesh("tp=8")
    near = token_mismatch(hidden, kernel, hidden, kernel, targets, rounded_to="float32")
    apart = log_probs_from_hidden(
        hidden[..., ::-1], kernel[::-1], targets, parallel=parallel
    ).log_probs
    report = mismatch_report(dataclasses.replace(near, rollout_log_probs=apart))
    assert report.figures["abs_max"] > 0
    assert report.figures["beyond_rounding"] == 0


@pytest.mark.parametrize(
    ("bug", "share"),
    [
        (lambda hidden, head: (hidden, dataclasses.replace(head, scale=1 / 0.8)), 0.2),
        (lambda hidden, head: (hidden, dataclasses.replace(head, softcap=5.0)), 0.2),
        (lambda hidden, head: (jnp.roll(hidden, 1, axis=1), head), 0.9),
    ],
    ids=["temperature", "softcap", "one position off"],
)
def test_a_bug_is_beyond_what_rounding_explains(bug, share):
    hidden, kernel, targets = wide_model()
    found = token_mismatch(hidden, kernel, *bug(hidden, Head(kernel)), targets)
    report = mismatch_report(found)
    assert report.figures["beyond_rounding"] > share, report
    assert "share beyond 6 times what rounding explains" in str(report)


# The report


def random_arrays(seed=0, shape=(3, 40)):
    rng = np.random.default_rng(seed)
    # so that the trainer's are below 0 too
    sampler = -1 - np.abs(rng.normal(size=shape)).astype(np.float32)
    trainer = sampler + 0.1 * rng.normal(size=shape).astype(np.float32)
    return trainer, sampler, rng


def test_the_figures_of_two_arrays():
    trainer, sampler, rng = random_arrays()
    where = rng.random(trainer.shape) < 0.6
    spoilt = np.where(where, trainer, np.nan)
    report = mismatch_report(
        TokenMismatch(jnp.asarray(spoilt), jnp.asarray(sampler)), where=jnp.asarray(where)
    )
    d = (trainer.astype(np.float64) - sampler)[where]
    expected = mismatch.figures(list(d)) | mismatch.estimates(trainer[where], sampler[where])
    assert set(report.figures) == set(expected)
    for name, x in expected.items():
        assert report.figures[name] == pytest.approx(x, rel=1e-6, abs=1e-12), name
    assert (report.tokens, report.not_finite, report.exact, report.by_entropy) == (
        where.sum(),
        0,
        False,
        (),
    )


def test_estimates_are_those_of_the_whole_distribution_where_each_token_was_drawn_once():
    """A uniform sampler over 50 tokens that drew each of them: means over tokens are
    expectations.
    """
    z = np.random.default_rng(0).normal(size=(1, 50))
    log_p = oracle_head.log_softmax(z)
    exact = mismatch.comparison(z, np.zeros((1, 50)))
    found = mismatch_report(TokenMismatch(log_p, np.full((1, 50), -np.log(50)))).figures
    for name in ("kl", "reverse_kl", "total_variation"):
        assert found[name] == pytest.approx(exact[name][0], rel=1e-6), name


def test_ranges_of_positions_and_entropies():
    trainer, sampler, rng = random_arrays()
    entropy = rng.random(trainer.shape)
    positions = np.tile(np.arange(40) % 10, (3, 1))
    tokens = TokenMismatch(trainer, sampler, entropy)
    report = mismatch_report(tokens, positions=positions, bins=5)
    d = trainer.astype(np.float64) - sampler
    assert [(part["low"], part["high"], part["tokens"]) for part in report.by_position] == [
        (low, low + 1, 24) for low in (0, 2, 4, 6, 8)
    ]
    for part in report.by_position:
        inside = (positions >= part["low"]) & (positions <= part["high"])
        assert part["abs_mean"] == pytest.approx(np.abs(d[inside]).mean())
    assert [part["tokens"] for part in report.by_entropy] == [24] * 5
    for part in report.by_entropy:
        inside = (entropy >= part["low"]) & (entropy <= part["high"])
        assert inside.sum() == 24
        assert part["abs_max"] == pytest.approx(np.abs(d[inside]).max())
    assert len(mismatch_report(tokens, bins=100).by_position) == 40  # never more than there are
    constant = dataclasses.replace(tokens, entropy=np.ones_like(entropy))
    assert len(mismatch_report(constant).by_entropy) == 1


def test_log_probs_that_are_not_finite_are_counted_and_left_out():
    trainer, sampler, _ = random_arrays()
    clean = mismatch_report(TokenMismatch(trainer[1:], sampler[1:]))
    trainer[0, :30], sampler[0, 20:] = np.nan, -np.inf
    report = mismatch_report(TokenMismatch(trainer, sampler))
    assert (report.tokens, report.not_finite, report.figures) == (80, 40, clean.figures)


def test_arrays_on_a_mesh():
    trainer, sampler, _ = random_arrays(shape=(4, 8))
    parallel = make_parallel_mesh("dp=2,cp=4")

    def put(x):
        return jax.device_put(x, parallel.sharding(parallel.tokens_spec))

    on_mesh = mismatch_report(TokenMismatch(put(trainer), put(sampler)))
    assert on_mesh == mismatch_report(TokenMismatch(trainer, sampler))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": np.ones(3, bool)}, "where: got shape (3,), expected that of log_probs, (3, 40)"),
        ({"positions": np.ones((3, 39), int)}, "positions: got shape (3, 39)"),
        ({"where": np.zeros((3, 40), bool)}, "log_probs: got 0 that count and none that is finite"),
        ({"bins": 0}, "bins: got 0, expected a whole number of at least 1"),
        ({"bins": 10**9}, "bins: got 1000000000, expected a finite number of at most 1000"),
    ],
)
def test_what_a_report_refuses(change, message):
    trainer, sampler, _ = random_arrays()
    with pytest.raises(ValueError, match=re.escape(message)):
        mismatch_report(TokenMismatch(trainer, sampler), **change)


def test_what_the_comparison_refuses():
    trainer, sampler = models(97)
    targets = jnp.zeros((R, T), jnp.int32)
    for change, message in [
        (
            {"rounded_to": "int8"},
            "rounded_to: got 'int8', expected one of 'bfloat16', 'float16', 'float32'",
        ),
        ({"temperature": 0.0}, "temperature: got 0.0"),
        ({"where": WHERE[:2]}, "where: got shape"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            token_mismatch(*trainer, *sampler, targets, **change)
    with pytest.raises(
        ValueError, match=r"rollout_head.kernel: got 96 columns, expected the trainer's 97"
    ):
        token_mismatch(*trainer, *models(96)[1], targets)
    with pytest.raises(ValueError, match="rollout_hidden: got"):
        token_mismatch(*trainer, sampler[0][:, :4], sampler[1], targets)


# The command line


def test_two_npy_files(tmp_path, capsys):
    trainer, sampler, _ = random_arrays()
    np.save(tmp_path / "a.npy", trainer)
    np.save(tmp_path / "b.npy", sampler)
    main([str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "--json"])
    found = json.loads(capsys.readouterr().out)
    expected = mismatch_report(TokenMismatch(trainer, sampler))
    assert found["figures"] == expected.figures
    main([str(tmp_path / "a.npy"), str(tmp_path / "b.npy")])
    assert capsys.readouterr().out == f"{expected}\n"
    assert "estimates from the sampled tokens" in str(expected)


@pytest.mark.parametrize("shape", [(2, 16), (32,)])
def test_two_files_of_hidden_states(tmp_path, capsys, shape):
    """In bf16, which numpy stores as bytes."""
    hidden, kernel, targets = wide_model()
    hidden = hidden[0, :32].reshape(*shape, WIDE)
    targets = np.asarray(targets[0, :32]).reshape(shape)
    where = np.arange(32).reshape(shape) % 3 > 0
    np.savez(
        tmp_path / "a.npz",
        hidden=hidden,
        kernel=kernel,
        targets=targets,
        where=where,
        temperature=0.9,
    )
    low = {
        name: np.asarray(x.astype(jnp.bfloat16))
        for name, x in (("hidden", hidden), ("kernel", kernel))
    }
    np.savez(tmp_path / "b.npz", **low)
    main([str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--json", "--bins", "2"])
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["exact"], len(found["by_entropy"])) == (where.sum(), True, 2)
    assert 0 < found["figures"]["abs_max"] < 0.1
    assert found["figures"]["beyond_rounding"] == 0

    def rows(x):
        return jnp.asarray(x).reshape(1, 32, *x.shape[len(shape) :])

    states = rows(hidden), kernel, rows(low["hidden"]), jnp.asarray(low["kernel"])
    same = token_mismatch(*states, rows(targets), temperature=0.9, where=rows(where))
    assert found["figures"]["kl"] == pytest.approx(
        mismatch_report(same, where=rows(where)).figures["kl"], rel=1e-4
    )


def promise(path):
    """An .npy whose header promises 16 TiB."""
    with path.open("wb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": (2**42,)}
        np.lib.format.write_array_header_1_0(file, described)


def bomb(path):
    """An .npz of a few bytes whose array is said to have 16 TiB."""
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("log_probs.npy", b"")
        parts.filelist[0].file_size = 2**44


LOG_PROBS = -np.ones((2, 3), np.float32)
HIDDEN = {"hidden": np.ones((2, 3, 4), np.float32), "kernel": np.ones((4, 5), np.float32)}
TRAINER = {**HIDDEN, "targets": np.zeros((2, 3), np.int32)}
TURNED = {**HIDDEN, "hidden": np.ones((3, 2, 4), np.float32)}
SQUARE = {"kernel": np.ones((4, 4), np.float32)}
# by name: what makes each of the two files, further arguments, what the line says
BAD_FILES = {
    "none": (None, LOG_PROBS, [], "a.npy: got no file, expected an .npy or .npz file of numbers"),
    "a folder": (Path.mkdir, LOG_PROBS, [], "a.npy: got no file"),
    "a pipe": (os.mkfifo, LOG_PROBS, [], "a.npy: got no file"),
    "empty": (
        lambda path: path.write_bytes(b""),
        LOG_PROBS,
        [],
        "a.npy: got a file that numpy cannot read (EOFError",
    ),
    "text": (
        lambda path: path.write_text("a, b\n1, 2\n"),
        LOG_PROBS,
        [],
        "cannot read (it holds no array of numbers)",
    ),
    "a pickle": (
        lambda path: np.save(path, np.array([{}], object)),
        LOG_PROBS,
        [],
        "a.npy: got a file that numpy can",
    ),
    "an .npy cut": (
        lambda path: _cut(path, np.save, LOG_PROBS),
        LOG_PROBS,
        [],
        "a.npy: got a file that numpy cannot",
    ),
    "an .npz cut": (
        lambda path: _cut(path, _savez, LOG_PROBS),
        LOG_PROBS,
        [],
        "a.npy: got a file that numpy cannot",
    ),
    "terabytes": (promise, LOG_PROBS, [], "a.npy: got a file that numpy cannot read"),
    "a bomb": (bomb, LOG_PROBS, [], "cannot read (MemoryError: 17592186044416 bytes of arrays"),
    "no array": (
        lambda path: _zip(path, "log_probs.txt"),
        LOG_PROBS,
        [],
        "a.npy: got a file that numpy cannot read",
    ),
    "text in it": (
        {"log_probs": np.array(["a"])},
        LOG_PROBS,
        [],
        "a.npz: log_probs: got dtype <U1",
    ),
    "a typo": (
        {"log_probs": LOG_PROBS, "position": LOG_PROBS},
        LOG_PROBS,
        [],
        "trainer: got position, expected log_pr",
    ),
    "another name": (
        {"logprobs": LOG_PROBS},
        LOG_PROBS,
        [],
        "trainer: got no log_probs among logprobs, expected log_",
    ),
    "both kinds": (
        TRAINER | {"log_probs": LOG_PROBS},
        HIDDEN,
        [],
        "trainer: got log_probs, expected hidden, kernel, ta",
    ),
    "one of each": (
        TRAINER,
        {"log_probs": LOG_PROBS},
        [],
        "sampler: got no hidden among log_probs, expected hidden, ke",
    ),
    "the sampler's mask": (
        {"log_probs": LOG_PROBS},
        {"log_probs": LOG_PROBS, "where": LOG_PROBS < 0},
        [],
        "sampler: got where, expected log_probs alone",
    ),
    "no targets": (
        HIDDEN,
        HIDDEN,
        [],
        "trainer: got no targets among hidden, kernel, expected hidden, kernel, targets",
    ),
    "turned": (
        TRAINER,
        TURNED,
        [],
        "sampler: hidden: got shape (3, 2, 4), expected (2, 3) of targets, and H",
    ),
    "a flat mask": (
        TRAINER | {"where": np.ones(6)},
        HIDDEN,
        [],
        "trainer: where: got shape (6,), expected that of targ",
    ),
    "a mask of 2": (
        TRAINER | {"where": np.full((2, 3), 2)},
        HIDDEN,
        [],
        "where: got other numbers than 0 and 1",
    ),
    "two temperatures": (
        TRAINER | {"temperature": np.ones(2)},
        HIDDEN,
        [],
        "temperature: got shape (2,), expected that",
    ),
    "a square kernel": (
        TRAINER | SQUARE,
        HIDDEN | SQUARE,
        [],
        "layout: got None for a kernel (4, 4)",
    ),
    "another shape": (LOG_PROBS, LOG_PROBS.T, [], "got shape (3, 2)"),
    "bins": (LOG_PROBS, LOG_PROBS, ["--bins", "1000000000"], "bins: got 1000000000"),
    "no bins": (LOG_PROBS, LOG_PROBS, ["--bins", "many"], "--bins: invalid int value: 'many'"),
    "layout": (LOG_PROBS, LOG_PROBS, ["--layout", "vv"], "--layout: invalid choice: 'vv'"),
}


def _savez(path, x):
    with path.open("wb") as file:
        np.savez(file, log_probs=x)


def _zip(path, name):
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr(name, "-1")


def _cut(path, save, x):
    save(path, x)
    os.truncate(path, path.stat().st_size * 2 // 3)


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_in_one_line(tmp_path, capsys, case):
    *makes, options, message = BAD_FILES[case]
    paths = []
    for name, make in zip("ab", makes, strict=True):
        paths.append(tmp_path / f"{name}{'.npz' if isinstance(make, dict) else '.npy'}")
        if isinstance(make, dict):
            np.savez(paths[-1], **make)
        elif isinstance(make, np.ndarray):
            np.save(paths[-1], make)
        elif make:
            make(paths[-1])
    with pytest.raises(SystemExit) as ended:
        main([*map(str, paths), *options])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("python -m jaxppo.mismatch: error: ")
    assert message in said.err


def test_a_square_kernel_with_its_layout(tmp_path, capsys):
    turned = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    states = {"hidden": np.ones((2, 3, 4), np.float32), "kernel": turned}
    np.savez(tmp_path / "a.npz", **states, targets=np.full((2, 3), 3))
    np.savez(tmp_path / "b.npz", **states)
    log_probs = {}
    for layout, kernel in (("hv", turned), ("vh", turned.T)):
        main([str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--layout", layout, "--json"])
        assert json.loads(capsys.readouterr().out)["figures"]["abs_max"] == 0
        logits = np.ones(4) @ kernel
        found = compare(read(tmp_path / "a.npz"), read(tmp_path / "b.npz"), layout=layout)
        log_probs[layout] = np.asarray(found.log_probs)
        np.testing.assert_allclose(
            log_probs[layout], logits[3] - np.log(np.exp(logits).sum()), rtol=1e-5
        )
    assert not np.allclose(log_probs["hv"], log_probs["vh"])


def test_the_command_itself(tmp_path):
    """Without a warning: the module is not one that `import jaxppo` has loaded already."""
    np.save(tmp_path / "a.npy", random_arrays()[0])
    command = [sys.executable, "-m", "jaxppo.mismatch", *[str(tmp_path / "a.npy")] * 2]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, without_gpu_plugin(done.stderr)) == (0, "")
    assert re.search(r"max of \|d\| +0\n", done.stdout)
