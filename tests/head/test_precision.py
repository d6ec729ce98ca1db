"""Every matrix product of a head's programs, lowered and compiled for TPUs and GPUs: operand
dtypes and passes.
"""

import itertools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_products import products
from head_cases import tiles_of
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.planner.described_gpu import NO_SEARCH, described_gpus
from jaxppo import (
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    log_probs_from_hidden,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.losses.distillation import divergence_from_hidden
from jaxppo.mismatch import token_mismatch
from sharding import ParallelMesh
from sharding.audit import audit
from sharding.audit.hlo import parse
from sharding.notes import is_rare

# Tokens of a device, features and columns. A TPU's compiler takes longer for larger arrays; two
# blocks of a second pass are left to each device.
SIZES = {"tpu": (256, 128, 8192), "gpu": (2048, 512, 16384)}


@cache
def mesh_of(platform):
    if platform == "tpu":
        devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
        return ParallelMesh(Mesh(np.array(devices).reshape(2, 2), ("cp", "tp")))
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    return ParallelMesh(Mesh(np.array(described_gpus(8)).reshape(2, 4), ("cp", "tp")))


def compiled(platform, way, dtypes, sizes, **options):
    """The text of the gradients of a policy loss on described devices, and their bytes of
    temporaries.
    """
    parallel, (tokens, hidden_size, columns) = mesh_of(platform), sizes

    def put(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(parallel.mesh, spec))

    shape = 1, tokens * parallel.context_size
    ids, x = (put(shape, dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32))
    batch = RolloutBatch(*[ids] * 4, x, put((1, 1), jnp.int32, P()), advantages=x, old_log_probs=x)
    hidden = put((*shape, hidden_size), dtypes[0], parallel.hidden_spec)
    kernel = put((hidden_size, columns), dtypes[1], parallel.kernel_spec())
    config = PolicyLossConfig(entropy_coef=0.01)

    def loss(hidden, kernel, batch):
        if way == "one pass":
            return policy_loss_from_hidden(
                hidden, kernel, batch, config, parallel=parallel, **options
            )[0]
        given = {"parallel": parallel, "entropy": "bonus", "where": batch.loss_mask > 0, **options}
        stats: TokenStats = log_probs_from_hidden(hidden, kernel, batch.targets, **given)
        return policy_loss(stats, batch, config, parallel=parallel)[0]

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    if platform == "tpu":
        found = audit(gradients, hidden, kernel, batch)
        return found.text, found.temp_bytes
    found = gradients.lower(hidden, kernel, batch).compile(compiler_options=NO_SEARCH)
    return found.as_text(), found.memory_analysis().temp_size_in_bytes


BF16 = jnp.bfloat16
F32 = jnp.float32
# the compiler may move the cast of one operand into the product, which has the passes of f32
MIXED_EXACT = {
    (a, b, "f32", "highest") for a, b in (("bf16", "f32"), ("f32", "bf16"), ("f32", "f32"))
}
ANY_FAST = {(a, b, "f32", "default") for a in ("bf16", "f32") for b in ("bf16", "f32")}
ROUNDED = ("bf16", "bf16", "bf16", "default")
CASES = {
    "bf16": ((BF16, BF16), {}, {("bf16", "bf16", "f32", "default")}),
    "f32": ((F32, F32), {}, {("f32", "f32", "f32", "highest")}),
    "bf16 hidden states before an f32 kernel": ((BF16, F32), {}, MIXED_EXACT),
    "f32 asked to be fast": ((F32, F32), {"precision": "default"}, ANY_FAST),
    "f32 in three passes": ((F32, F32), {"precision": "high"}, {("f32", "f32", "f32", "high")}),
}


SOME = {("bf16", "tpu", "one pass"), ("f32", "tpu", "two passes")}
ALL = itertools.product(CASES, ("tpu", "gpu"), ("one pass", "two passes"))


@pytest.mark.parametrize(
    ("case", "platform", "way"),
    [x if x in SOME else pytest.param(*x, marks=pytest.mark.nightly) for x in ALL],
)
def test_operands_and_passes(case, platform, way):
    """bf16 operands in one pass with f32 sums, which GPUs may round; f32 operands never silently
    in bf16.
    """
    dtypes, options, expected = CASES[case]
    expected = expected | {ROUNDED} if (case, platform) == ("bf16", "gpu") else expected
    found = products(compiled(platform, way, dtypes, SIZES[platform], **options)[0])
    assert found
    assert found <= expected


# Parameters of a head beside its kernel, by name: their shapes.
RANK = 16
ADAPTERS = 3
SMALL = (256, 128, 1024)
PLAIN = {}
LORA = {"a": (SMALL[1], RANK), "b": (RANK, SMALL[2])}
BY_ROW = {"a": (ADAPTERS, SMALL[1], RANK), "b": (ADAPTERS, RANK, SMALL[2])}
BIAS = {"bias": (SMALL[2],)}
HEADS = {  # (dtypes of hidden states, kernel and the rest, further parameters)
    "f32": (F32, F32, F32, BIAS),
    "bf16": (BF16, BF16, BF16, BIAS | LORA),
    "lora": (F32, F32, F32, BIAS | LORA),
    "adapters by row": (F32, F32, F32, BY_ROW),
    "f32 adapters of bf16 hidden states": (BF16, BF16, F32, LORA),
    "f32 adapters by row of bf16 hidden states": (BF16, BF16, F32, BY_ROW),
    "bf16 adapters of f32 hidden states": (F32, F32, BF16, LORA),
    "bf16 hidden states, f32 kernel": (BF16, F32, F32, LORA),
}
ONE_HEAD = ("statistics", "policy loss")
WAYS = (*ONE_HEAD, "divergence", "mismatch")


def head_program(way, name, parallel=None, **options):
    """A program with the gradients of a head of that name where it has some, and the shapes of
    its arguments.
    """
    *dtypes, further = HEADS[name]
    tokens, hidden_size, columns = SMALL
    rows = 4 if parallel is None else parallel.data_size
    shape = rows, tokens // rows * (1 if parallel is None else parallel.context_size)
    place = (lambda spec: None) if parallel is None else parallel.sharding
    of_tokens = P() if parallel is None else parallel.tokens_spec
    of_rows = P() if parallel is None else parallel.rows_spec

    def like(shape, dtype, spec=None):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(spec or P()))

    ids, x = (like(shape, dtype, of_tokens) for dtype in (jnp.int32, jnp.float32))
    batch = RolloutBatch(
        *[ids] * 4, x, like((rows, 1), jnp.int32, of_rows), advantages=x, old_log_probs=x
    )
    head = {
        "hidden": like(
            (*shape, hidden_size), dtypes[0], None if parallel is None else parallel.hidden_spec
        )
    }
    head["kernel"] = like(
        (hidden_size, columns), dtypes[1], None if parallel is None else parallel.kernel_spec()
    )
    head |= {k: like(size, dtypes[2]) for k, size in further.items()}

    def program(head, batch):
        def head_of(given):
            lora = LoRA(given["a"], given["b"], 0.5) if "a" in given else None
            return given["hidden"], Head(given["kernel"], bias=given.get("bias"), lora=lora)

        def loss(given, ids):
            hidden, here = head_of(given)
            more = {"parallel": parallel, **options}
            if way == "divergence":
                return divergence_from_hidden(hidden, here, hidden, here, **more).sum()
            if further is BY_ROW:
                more["adapter_ids"] = ids
            if way == "policy loss":
                return policy_loss_from_hidden(
                    hidden, here, batch, PolicyLossConfig(entropy_coef=0.01), **more
                )[0]
            stats = log_probs_from_hidden(hidden, here, batch.targets, entropy="bonus", **more)
            return (stats.log_probs + stats.entropy).sum()

        if way == "mismatch":
            return token_mismatch(
                *head_of(head), *head_of(head), batch.targets, parallel=parallel, **options
            )
        return jax.value_and_grad(loss)(head, batch.segment_ids[:, 0])

    return jax.jit(program), (head, batch)


def lowered_products(text):
    """(lhs, rhs, result, precision) of each product of a lowered program.

    An f32 operand of a fast product that is a converted bf16 array counts as that: nothing is
    rounded. JAX makes such products when it transposes one of bf16 operands with an f32 result.
    """
    # names of f32 arrays that hold bf16 values; a name is defined before its use
    found = set()
    narrow = set()
    for line in text.splitlines():
        if defined := re.match(r"\s*(%\w+)(?::\d+)? = (?:stablehlo.convert (\S+) : (.*))?", line):
            name, source, types = defined.groups("")
            exact = "xbf16>) -> " in types or ("->" not in types and source in narrow)
            (narrow.add if exact else narrow.discard)(name)
        if "stablehlo.dot_general" in line:
            dtypes = re.findall(r"[x<]([a-z]\w*)>", line.rsplit(" : ", 1)[1])
            precision = re.search(r"precision = \[(\w+), (\w+)\]", line)
            assert precision is None or precision[1] == precision[2]
            precision = precision[1].lower() if precision else "default"
            if precision == "default":
                operands = re.search(r"dot_general (\S+), (\S+),", line).groups()
                dtypes[:2] = [
                    "bf16" if x in narrow else d for x, d in zip(operands, dtypes[:2], strict=True)
                ]
            found.add((*dtypes, precision))
    return found


def check_precision(found, asked, exact=()):
    """A product takes the precision that was asked for; else "highest" if one of its operands is
    f32.
    """
    assert found
    for product in found - set(exact):
        lhs, rhs, _, precision = product
        assert precision == (asked or ("default" if lhs == rhs == "bf16" else "highest")), product


def has_way(way, name):
    """Whether a head of that name can be used so: two heads are compared with one adapter at
    most.
    """
    return HEADS[name][3] is not BY_ROW or way in ONE_HEAD


DAILY = {
    ("statistics", "lora"),
    ("policy loss", "f32 adapters by row of bf16 hidden states"),
    ("divergence", "f32 adapters of bf16 hidden states"),
}
PROGRAMS = pytest.mark.parametrize(
    ("way", "name"),
    [
        x if x in DAILY else pytest.param(*x, marks=pytest.mark.nightly)
        for x in itertools.product(WAYS, HEADS)
        if has_way(*x)
    ],
)


@PROGRAMS
def test_every_product_has_the_precision(way, name):
    """As lowered, for each schedule without a mesh.

    On GPUs a product of bf16 may round its f32 sums itself.
    """
    cases = [(device, {}) for device in ("small", "wide", "like a GPU")]
    cases += [("small", {"precision": "high"}), ("small", {"deterministic": True})]
    for device, options in cases:
        with tiles_of(device):
            program, arguments = head_program(way, name, **options)
            found = lowered_products(program.lower(*arguments).as_text())
        check_precision(found, options.get("precision"))
        rounded = {product for product in found if product[2] != "f32"}
        assert rounded <= ({ROUNDED} if device == "like a GPU" else set())


@PROGRAMS
def test_every_product_has_the_precision_on_a_tpu(way, name):
    """As lowered and as compiled, with rings and gathers."""
    program, arguments = head_program(way, name, mesh_of("tpu"))
    check_precision(lowered_products(program.lower(*arguments).as_text()), None)
    exact = set()
    if name == "bf16":
        # the lowered program has shown that f32 operands of fast products hold bf16 values
        exact = {(a, b, "f32", "default") for a, b in (("bf16", "f32"), ("f32", "bf16"))}
    if name == "bf16 adapters of f32 hidden states":
        # the compiler multiplies bf16 values as they are where the lowered program widens them
        exact = {("bf16", "bf16", "f32", "highest")}
    check_precision(products(audit(program, *arguments).text), None, exact)


def tile_turns(module, name):
    """How often the innermost loops turn, all in all; a loop whose turns depend on data counts
    once.

    As in an audit's time, a `cond` under a note that it is rare takes its shorter branch.
    """
    total = 0
    for x in module.computations[name].values():
        called = [tile_turns(module, called) for names in x.calls.values() for called in names]
        inner = min(called) if x.op == "conditional" and is_rare(x.op_name) else sum(called)
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', x.attributes)
        total += (int(known[1]) if known else 1) * max(inner, 1) if x.op == "while" else inner
    return total


@pytest.mark.nightly
def test_a_real_head_on_a_gpu_host():
    """Qwen3-8B's, 8192 tokens per device: temporaries, and all turns of its loops, which are
    starts of kernels.
    """
    for way, options, gib, turns in (
        ("two passes", {"where": None}, 0.36, 30),
        (
            "two passes",
            {},
            0.5,
            8,
        ),  # 0.11 of it are the gradients of a block's logits, 0.12 dhidden, 0.06 a mask's order
        (
            "one pass",
            {},
            1.4,
            8,
        ),  # 0.58 of it are dlogits, kept for the products behind the loop, 0.29 a chunk's logits
    ):
        text, temporaries = compiled("gpu", way, (BF16, BF16), (8192, 4096, 151936), **options)
        assert temporaries <= gib * 2**30
        module = parse(text)
        assert tile_turns(module, module.entry) <= turns
        assert products(text) <= {("bf16", "bf16", "f32", "default"), ROUNDED}
