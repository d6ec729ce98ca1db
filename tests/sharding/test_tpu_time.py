"""Estimated times against programs whose cycles, bytes and turns can be counted by hand."""

import dataclasses
import importlib.metadata
import math

import pytest

from sharding.audit.clock import estimate_time
from sharding.audit.links import Torus
from sharding.devices import known_device

# Modules written by hand, for a chip of round figures: in a ms 1e6 cycles, 1e12 flops, 1e9 bytes of
# memory or a link.
ROUND = dataclasses.replace(
    known_device("TPU v5"), flops=1e15, hertz=1e9, bandwidth=1e12, link=1e12, wraps=0
)
LATENCY = 0.002  # ms


def estimated(name, operation, ms):
    return (
        f"  {name} = {operation},"
        f' backend_config={{"window_config":{{"estimated_cycles":"{round(ms * 1e6)}"}}}}\n'
    )


def module(body, computations="", devices=4):
    header = f"HloModule m, num_partitions={devices}\n\n{computations}\n"
    inputs = "  %x = f32[1000,1000]{1,0} parameter(0)\n  %n = s32[] parameter(1)\n"
    return (
        f"{header}ENTRY %main (x: f32[1000,1000], n: s32[]) -> f32[1000,1000]"
        f" {{\n{inputs}{body}}}\n"
    )


def time_of(body, computations="", devices=4, chip=ROUND):
    """On a line of chips, or on a ring where the chip has any."""
    places = [(x, 0, 0, 0) for x in range(devices)]
    links = Torus(places, (devices, 4, 4, 1) if chip.wraps else (devices, 1, 1, 1), chip)
    return estimate_time(module(body, computations, devices), chip, links)


RING = dataclasses.replace(ROUND, wraps=4)


def spent(time):
    """The kinds of time that are not 0, in ms, without rounding errors and the time of scalars."""
    return {
        k: round(v, 8)
        for k, v in dataclasses.asdict(time).items()
        if isinstance(v, float) and v > 1e-8
    }


A = "f32[1000,1000]{1,0}"  # 4e6 bytes
FUSED = f"""%product (p: f32[1000,1000]) -> f32[1000,1000] {{
  %p = {A} parameter(0)
  ROOT %dot = {A} convolution(%p, %p), dim_labels=bf_io->bf
}}

%arithmetic (p: f32[1000,1000]) -> f32[1000,1000] {{
  %p = {A} parameter(0)
  ROOT %sum = {A} add(%p, %p)
}}

%move (p: f32[1000,1000]) -> f32[1000,1000] {{
  %p = {A} parameter(0)
  ROOT %t = {A} transpose(%p), dimensions={{1,0}}
}}

%rows (p: f32[1000,1000], n: s32[]) -> f32[10,1000] {{
  %p = {A} parameter(0)
  %n = s32[] parameter(1)
  %ten = s32[] constant(10)
  %at = s32[] multiply(%n, %ten)
  ROOT %t = f32[10,1000] dynamic-slice(%p, %at, %ten)
}}

%around (p: f32[1000,1000]) -> f32[1000,1000] {{
  %p = {A} parameter(0)
  %f = {A} fusion(%p), kind=kOutput, calls=%product
  ROOT %sum = {A} add(%p, %f)
}}
"""


def test_instructions_are_added_up_by_kind():
    time = time_of(
        estimated("%a", f"{A} fusion(%x), kind=kOutput, calls=%product", 1)
        + estimated("%b", f"{A} fusion(%a), kind=kLoop, calls=%arithmetic", 2)
        + estimated("%c", f"{A} fusion(%b), kind=kLoop, calls=%move", 4)
        + estimated("%d", f"{A} fusion(%c), kind=kOutput, calls=%around", 8)
        + estimated("%e", f"{A} copy(%d)", 16)
        + estimated("%f", "f32[] reduce(%e), to_apply=%arithmetic", 32)
        + estimated("%g", f"{A} fusion(%e, %n), kind=kLoop, calls=%rows", 64),
        FUSED,
    )
    assert spent(time) == {"products": 9, "elementwise": 34, "copies": 84}
    assert time.compute == pytest.approx(127)
    assert time.unknown == ()
    assert spent(time.least) == spent(time)


STATE = f"(s32[], s32[], {A})"


def loop(bound, ms=2, step="add(%i, %one)", relation="LT", body=None):
    """A `while` that counts from 0, with `ms` of arithmetic a turn, and a quarter of that in the
    condition.
    """
    state = STATE
    computations = (
        f"%cond (s: {state}) -> pred[] {{\n  %s = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n  %n = s32[] get-tuple-element(%s), index=1\n"
        f"  %x = {A} get-tuple-element(%s), index=2\n  %bound = s32[] constant(9)\n"
        + estimated("%m", "f32[] reduce(%x), to_apply=%arithmetic", ms / 4)
        + f"  %less = pred[] compare(%i, %bound), direction={relation}\n  %less.1 = pred[]"
        f" compare(%i, %n), direction=LT\n  ROOT %r = pred[] {bound}\n}}\n\n%body (s: {state}) ->"
        f" {state} {{\n  %s = {state} parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n"
        f"  %n = s32[] get-tuple-element(%s), index=1\n  %x = {A} get-tuple-element(%s),"
        f" index=2\n  %one = s32[] constant(1)\n  %next = s32[] {step}\n"
        + estimated("%y", f"{A} fusion(%x), kind=kLoop, calls=%arithmetic", ms)
        + f"  ROOT %t = {state} tuple(%next, %n, %y)\n}}\n"
    )
    begin = f"  %zero = s32[] constant(0)\n  %t = {state} tuple(%zero, %n, %x)\n"
    return time_of(begin + (body or f"  {WHILE}\n"), FUSED + computations)


WHILE = f'%w = {STATE} while(%t), condition=%cond, body=%body, metadata={{op_name="jit(f)/while"}}'


def test_loops_turn_as_often_as_their_text_says():
    constant = loop("copy(%less)")
    assert spent(constant) == {"elementwise": 9 * 2 + 10 * 0.5} == spent(constant.least)
    assert constant.unknown == ()
    assert spent(loop("copy(%less)", relation="LE")) == {"elementwise": 10 * 2 + 11 * 0.5}
    assert spent(loop("copy(%less)", step="add(%one, %i)")) == {"elementwise": 9 * 2 + 10 * 0.5}


def test_a_loop_that_data_may_end_is_a_range():
    early = loop("and(%less, %less.1)")
    assert spent(early) == {"elementwise": 9 * 2 + 10 * 0.5}
    assert spent(early.least) == {"elementwise": 0.5}
    assert early.unknown == ()


@pytest.mark.parametrize(
    ("bound", "step", "least"),
    [
        ("copy(%less.1)", "add(%i, %one)", 0),
        ("or(%less, %less.1)", "add(%i, %one)", 9),
        ("copy(%less)", "custom-call(%i)", 0),
        ("custom-call(%less)", "add(%i, %one)", 0),
    ],
)
def test_a_loop_that_cannot_be_read_is_unknown_and_never_one(bound, step, least):
    found = loop(bound, step=step)
    assert found.elementwise == math.inf
    assert found.least.elementwise == pytest.approx(least * 2 + (least + 1) * 0.5)
    assert found.products == 0  # time outside of the loop stays known
    assert found.unknown == (
        f"how often w turns (jit(f)/while): {least} times or more, 2 ms of compute each",
    )
    assert "unknown: how often w turns" in str(found)


def test_a_branch_is_a_range():
    branches = "".join(
        f"%{name} (p: f32[1000,1000]) -> f32[1000,1000] {{\n  %p = {A} parameter(0)\n"
        + estimated("ROOT %y", f"{A} fusion(%p), kind=kLoop, calls=%{kind}", ms)
        + "}\n\n"
        for name, kind, ms in (("yes", "product", 3), ("no", "arithmetic", 5), ("other", "move", 4))
    )
    three = (
        "  ROOT %c = f32[1000,1000] conditional(%n, %x, %x, %x), branch_computations={%yes, %no,"
        " %other}\n"
    )
    time = time_of(three, FUSED + branches)
    assert (spent(time), spent(time.least)) == ({"elementwise": 5}, {"products": 3})
    two = (
        "  ROOT %c = f32[1000,1000] conditional(%n, %x, %x), true_computation=%other,"
        " false_computation=%yes\n"
    )
    time = time_of(two, FUSED + branches)
    assert (spent(time), spent(time.least)) == ({"copies": 4}, {"products": 3})
    rare = two.rstrip() + ', metadata={op_name="jit(f)/<forward>/<rarely: again>/cond"}\n'
    assert spent(time_of(rare, FUSED + branches)) == {"products": 3}


def test_a_loop_in_a_branch_starts_where_its_operand_does():
    # a computation of its own, so that the loop's start is a parameter
    branch = f"  %y = {STATE} conditional(%n, %t, %t), branch_computations={{%run, %run}}\n}}\n\n"
    run = f"%run (t: {STATE}) -> {STATE} {{\n  %t = {STATE} parameter(0)\n  ROOT {WHILE}\n"
    assert spent(loop("copy(%less)", body=branch + run)) == {"elementwise": 9 * 2 + 10 * 0.5}


FILLS = f"""%fill (v: f32[]) -> f32[1000,1000] {{
  %v = f32[] parameter(0)
  ROOT %b = {A} broadcast(%v), dimensions={{}}
}}

%spread (v: f32[1000]) -> f32[1000,1000] {{
  %v = f32[1000] parameter(0)
  ROOT %b = {A} broadcast(%v), dimensions={{0}}
}}
"""


def test_a_constant_takes_its_bytes():
    bytes_ms = 4e6 / 1e9
    constant = "  %v = f32[] constant(0)\n"
    assert spent(time_of(constant + estimated("%f", f"{A} broadcast(%v)", 3))) == {
        "copies": bytes_ms
    }
    filled = estimated("%f", f"{A} fusion(%v), kind=kLoop, calls=%fill", 3)
    assert spent(time_of(constant + filled, FILLS)) == {"copies": bytes_ms}
    row = (
        "  %r = f32[1000]"
        f" custom-call(%x)\n{estimated('%f', f'{A} fusion(%r), kind=kLoop, calls=%spread', 3)}"
    )
    assert spent(time_of(row, FILLS)) == {"copies": 3}


CUT = f"""%rows (table: f32[1000,1000], at: s32[10]) -> f32[10,1000] {{
  %table = {A} parameter(0)
  %at = s32[10] parameter(1)
  ROOT %g = f32[10,1000] gather(%table, %at), offset_dims={{1}}
}}

%write (table: f32[1000,1000], row: f32[1,1000], at: s32[]) -> f32[1000,1000] {{
  %table = {A} parameter(0)
  %row = f32[1,1000] parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = {A} dynamic-update-slice(%table, %row, %at, %zero)
}}
"""


@pytest.mark.parametrize(
    ("lines", "kind", "size"),
    [
        (f"  %s = {A} sort(%x), dimensions={{0}}\n", "elementwise", 8e6),
        ("  %s = f32[1000,1000]{1,0:T(8,128)S(1)} sort(%x), dimensions={0}\n", "elementwise", 4e6),
        ("  %s = f32[2,1000] dynamic-slice(%x, %n, %n)\n", "copies", 16e3),
        ("  %r = f32[10,1000] fusion(%x, %n), kind=kCustom, calls=%rows\n", "elementwise", 80e3),
        (
            (
                "  %b = f32[1,1000] bitcast(%n)\n  %u = f32[1000,1000] fusion(%x, %b, %n),"
                " calls=%write\n"
            ),
            "copies",
            8e3,
        ),
    ],
)
def test_what_has_no_estimate_takes_the_bytes_that_it_moves(lines, kind, size):
    assert spent(time_of(lines, CUT)) == pytest.approx(
        {kind: size / 1e9, "unestimated": size / 1e9}
    )


@pytest.mark.parametrize(
    "line",
    [
        "fusion(%x), kind=kOutput, calls=%product",
        "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "convolution(%x, %x), dim_labels=bf_oi->bf",
    ],
)
def test_a_product_without_an_estimate_takes_its_flops(line):
    found = time_of(f"  %p = {A} {line}\n", FUSED, chip=dataclasses.replace(ROUND, flops=1e11))
    assert spent(found) == {"products": 2e9 / 1e8, "unestimated": 2e9 / 1e8}


def kernel(declared, more=""):
    config = f'backend_config={{"custom_call_config":{{"body":"ABc=="{declared}}}}}'
    attributes = (
        f'custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/attention"}}, {config}'
    )
    return time_of(f"  %k = {A} custom-call(%x), {attributes}\n{more}")


def test_a_kernel_takes_what_it_declares():
    flops = kernel(
        ',"cost_estimate":{"bytes_accessed":"8000000","flops":"93000000000","transcendentals":"5"}'
    )
    assert spent(flops) == pytest.approx({"kernels": 93e9 / (0.93 * 1e12)})
    assert flops.unknown == ()
    moved = kernel(',"cost_estimate":{"bytes_accessed":"500000000","flops":"93000000000"}')
    assert spent(moved) == {"kernels": 0.5}
    silent = kernel("")
    assert spent(silent) == {"kernels": 8e6 / 1e9}
    assert silent.unknown == (
        "what the kernel k takes (jit(f)/attention): it declares nothing, charged its bytes",
    )
    assert spent(
        kernel(',"cost_estimate":{"flops":"93000000000"},"estimated_cycles":"7000000"')
    ) == {"kernels": 7}
    assert spent(
        kernel("", '  %a = f32[1000,1000] custom-call(), custom_call_target="AllocateBuffer"\n')
    ) == spent(silent)


SIZE = 4e6
AROUND = {
    "all-reduce": 2 * 3 / 4 * SIZE,
    "all-gather": 3 / 4 * SIZE,
    "reduce-scatter": 3 / 4 * 4 * SIZE,  # its result is a fourth of what goes in
    # to neighbours a fourth each over one link, to the one opposite a fourth over two
    "all-to-all": SIZE,
}


@pytest.mark.parametrize("op", AROUND)
@pytest.mark.parametrize("groups", ["{{0,1,2,3}}", "[1,4]<=[4]", "mesh['a'=4] {'a'}", "{}"])
def test_a_collective_takes_what_a_ring_does(op, groups):
    line = f"  %c = {A} {op}(%x), replica_groups={groups}, dimensions={{0}}\n"
    assert spent(time_of(line)) == {"collectives": pytest.approx(AROUND[op] / 1e9 + LATENCY)}
    both_ways = time_of(line, chip=RING)
    assert spent(both_ways) == {"collectives": pytest.approx(AROUND[op] / 2e9 + LATENCY)}


def test_collectives_of_other_sizes():
    alone = time_of(f"  %c = {A} all-reduce(%x), replica_groups={{{{0}},{{1}},{{2}},{{3}}}}\n")
    assert spent(alone) == {}
    sixteen = time_of(f"  %c = {A} all-reduce(%x), replica_groups=[1,16]<=[16]\n", devices=16)
    assert spent(sixteen) == {"collectives": pytest.approx(2 * 15 / 16 * SIZE / 1e9 + LATENCY)}
    unread = time_of(f"  %c = {A} all-gather(%x), replica_groups=of_tomorrow\n", devices=16)
    assert spent(unread) == {"collectives": pytest.approx(15 / 16 * SIZE / 1e9 + LATENCY)}
    assert unread.unknown == ("what c joins (): charged for all 16 devices",)


SENT = "replica_groups={{0,1,2,3}}"
START = f"  %s = (f32[1000,1000], f32[1000,1000]) all-gather-start(%x), {SENT}, dimensions={{0}}\n"
DONE = f"  %d = {A} all-gather-done(%s)\n"
WORK = estimated("%work", f"{A} fusion(%x), kind=kLoop, calls=%arithmetic", 1)
GATHERED = 3 / 4 * SIZE / 1e9 + LATENCY


def test_what_runs_beside_other_work_is_apart():
    copied = (
        "  %c = (f32[1000,1000], f32[1000,1000], u32[]) copy-start(%x)\n  %e = f32[1000,1000]"
        " copy-done(%c)\n"
    )
    assert spent(time_of(START + copied + DONE)) == {"collectives": pytest.approx(GATHERED)}
    assert spent(time_of(START + WORK + DONE, FUSED)) == {
        "elementwise": 1,
        "overlapped": pytest.approx(GATHERED),
    }
    assert spent(time_of(WORK + START + DONE, FUSED)) == {
        "elementwise": 1,
        "collectives": pytest.approx(GATHERED),
    }
    short = WORK.replace("1000000", "1000")
    assert spent(time_of(START + short + DONE, FUSED)) == {
        "elementwise": 0.001,
        "overlapped": pytest.approx(0.001),
        "collectives": pytest.approx(GATHERED - 0.001),
    }


def permuted(name, pairs):
    shapes = "(f32[1000,1000], f32[1000,1000])"
    start = f"  %{name} = {shapes} collective-permute-start(%x), source_target_pairs={{{pairs}}}\n"
    return start, f"  %{name}.done = {A} collective-permute-done(%{name})\n"


def test_permutations_at_the_same_time():
    """Over the same link one waits for the other, whatever they join; over others both are sent
    at once.
    """
    one = SIZE / 1e9 + LATENCY
    two = 2 * SIZE / 1e9 + LATENCY
    up, up_done = permuted("up", "{0,1}")
    again, again_done = permuted("again", "{0,1},{2,3}")
    down, down_done = permuted("down", "{1,0},{2,1}")
    same = up + again + up_done + again_done
    other = up + down + up_done + down_done
    assert spent(time_of(same)) == {
        "collectives": pytest.approx(two),
        "overlapped": pytest.approx(LATENCY),
    }
    assert spent(time_of(other)) == {
        "collectives": pytest.approx(one),
        "overlapped": pytest.approx(one),
    }
    short = WORK.replace("1000000", "1000")
    assert spent(time_of(up + again + short + up_done + again_done, FUSED)) == {
        "elementwise": 0.001,
        "overlapped": pytest.approx(0.001 + LATENCY),
        "collectives": pytest.approx(two - 0.001),
    }


def test_a_sum_waits_for_a_permutation_over_its_links():
    up, up_done = permuted("up", "{0,1}")
    summed = f"  %c = {A} all-reduce(%x), {SENT}\n"
    apart = f"  %c = {A} all-reduce(%x), replica_groups={{{{0}},{{1}},{{2,3}}}}\n"
    both = (1 + 2 * 3 / 4) * SIZE / 1e9 + LATENCY
    assert spent(time_of(up + summed + up_done)) == {
        "collectives": pytest.approx(both),
        "overlapped": LATENCY,
    }
    found = time_of(up + apart + up_done)
    assert found.collectives == pytest.approx(SIZE / 1e9 + LATENCY)


def test_what_runs_beside_other_work_behind_a_loop_that_is_unknown():
    found = loop("copy(%less.1)", body=f"  {WHILE}\n" + START + WORK + DONE)
    assert found.elementwise == math.inf
    assert found.overlapped + found.collectives == pytest.approx(GATHERED)


def test_collectives_that_are_wrapped():
    wrapped = (
        f"%wrapped (p: f32[1000,1000]) -> f32[1000,1000] {{\n  %p = {A} parameter(0)\n"
        f"  ROOT %c = {A} all-reduce(%p), {SENT}\n}}\n"
    )
    begin = "  %s = ((f32[1000,1000]), f32[1000,1000], u32[]) async-start(%x), calls=%wrapped\n"
    update = "  %u = ((f32[1000,1000]), f32[1000,1000], u32[]) async-update(%s)\n"
    reduced = pytest.approx(AROUND["all-reduce"] / 1e9 + LATENCY)
    done = f"  %d = {A} async-done(%u)\n"
    assert spent(time_of(begin + WORK + update + done, FUSED + wrapped)) == {
        "elementwise": 1,
        "overlapped": reduced,
    }
    assert spent(time_of(begin + update + done, FUSED + wrapped)) == {"collectives": reduced}
    assert spent(time_of(f"  %f = {A} call(%x), to_apply=%wrapped\n", wrapped)) == {
        "collectives": reduced
    }
    beside = wrapped.replace("  ROOT %c", WORK.replace("(%x)", "(%p)") + "  ROOT %c")
    both = {"elementwise": 1, "collectives": reduced}
    assert spent(time_of(f"  %f = {A} call(%x), to_apply=%wrapped\n", FUSED + beside)) == both
    fused = estimated("%f", f"{A} fusion(%x), kind=kOutput, calls=%wrapped", 1)
    assert spent(time_of(fused, wrapped)) == both
    scattered = wrapped.replace("%wrapped", "%all-reduce-scatter.1")
    fused = "  %f = f32[250,1000] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1\n"
    assert spent(time_of(fused, scattered)) == {
        "collectives": pytest.approx(3 / 4 * SIZE / 1e9 + LATENCY)
    }


V6E = dataclasses.replace(ROUND, wraps=16)
AROUND_FOUR, BACK = "{0,1},{1,2},{2,3},{3,0}", "{1,0},{2,1},{3,2},{0,3}"
# the chip, the size of its slice, the places in the order of the mesh, permutations, messages on
# the busiest link
LINE = [(x, 0) for x in range(4)]
PLANE = [(0, 0), (1, 0), (0, 1), (1, 1)]
SQUARE = [(x, y) for y in range(4) for x in range(4)]
PERMUTED = {
    "to the neighbour": (V6E, (4, 1, 1), LINE, "{0,1}", 1),
    "to all neighbours": (V6E, (4, 1, 1), LINE, "{0,1},{1,2},{2,3}", 1),
    "two over one link": (V6E, (4, 4, 1), SQUARE, "{0,2},{1,3}", 2),
    "two over one link, of two rows": (V6E, (4, 4, 1), SQUARE, "{0,10},{1,6}", 2),
    "both ways at once": (V6E, (4, 1, 1), LINE, "{0,1},{1,0}", 1),
    "both ways at once, apart": (V6E, (4, 1, 1), LINE, "{0,1} {1,0}", 1),
    # the last message goes back where no other does
    "a ring on a line": (V6E, (4, 1, 1), LINE, AROUND_FOUR, 1),
    "a ring on a line, both ways": (V6E, (4, 1, 1), LINE, f"{AROUND_FOUR} {BACK}", 2),
    "a ring of a cube, both ways": (RING, (4, 4, 4), LINE, f"{AROUND_FOUR} {BACK}", 1),
    "a ring on a line, every other chip first": (
        V6E,
        (4, 1, 1),
        [LINE[i] for i in (0, 2, 1, 3)],
        AROUND_FOUR,
        2,
    ),
    "a ring on a plane, in mesh order": (V6E, (2, 2, 1), PLANE, AROUND_FOUR, 1),
    "a ring on a plane, in mesh order, both ways": (
        V6E,
        (2, 2, 1),
        PLANE,
        f"{AROUND_FOUR} {BACK}",
        2,
    ),
    "a ring on a plane, from neighbour to neighbour, both ways": (
        V6E,
        (2, 2, 1),
        [PLANE[i] for i in (0, 1, 3, 2)],
        f"{AROUND_FOUR} {BACK}",
        1,
    ),
    "across a line": (V6E, (4, 1, 1), LINE, "{0,3},{1,2}", 2),
    "around four of a cube": (RING, (4, 4, 4), LINE, "{0,3},{1,2}", 1),
    "around four of half a cube": (RING, (4, 4, 2), LINE, "{0,3},{1,2}", 2),
    "around sixteen": (V6E, (16, 1, 1), [(x, 0) for x in range(16)], "{0,12},{13,14},{1,2}", 1),
    "half around": (RING, (4, 4, 4), LINE, "{0,2},{1,3},{2,0},{3,1}", 1),
    "a row of sixteen to each other row": (
        V6E,
        (16, 1, 1),
        [(x, 0) for x in range(16)],
        "{0,8},{2,10},{4,12}",
        3,
    ),
}


@pytest.mark.parametrize("name", PERMUTED)
def test_a_permutation_takes_the_links_on_its_way(name):
    chip, sizes, chips, pairs, messages = PERMUTED[name]
    starts, ends = zip(
        *(permuted(f"p{i}", some) for i, some in enumerate(pairs.split())), strict=True
    )
    links = Torus([(*place, 0, 0) for place in chips], (*sizes, 1), chip)
    found = estimate_time(module("".join(starts + ends), devices=len(chips)), chip, links)
    assert found.collectives == pytest.approx(messages * SIZE / 1e9 + LATENCY)


CUBE = [(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
# the chip, the size of its slice, the places, groups, the devices of a group, the links over which
# each receives
GROUPS = {
    "a line": (V6E, (4, 1, 1), LINE, "{{0,1,2,3}}", 4, 1),
    "a ring": (RING, (4, 4, 4), LINE, "{{0,1,2,3}}", 4, 2),
    "half of a ring": (RING, (4, 4, 4), LINE, "{{0,1},{2,3}}", 2, 1),
    "a plane of four": (V6E, (2, 2, 1), PLANE, "{{0,1,2,3}}", 4, 2),
    "a plane of sixteen": (V6E, (4, 4, 1), SQUARE, "[1,16]<=[16]", 16, 2),
    "the rows of a plane": (V6E, (4, 4, 1), SQUARE, "[4,4]<=[16]", 4, 1),
    "every other chip of a line": (V6E, (4, 1, 1), LINE, "{{0,2},{1,3}}", 2, 1 / 2),
    "a cube": (RING, (4, 4, 4), CUBE, "{}", 64, 6),
    "a cube of a chip without rings": (V6E, (4, 4, 4), CUBE, "{}", 64, 3),
}


@pytest.mark.parametrize("name", GROUPS)
def test_rings_take_all_links_of_their_box(name):
    chip, sizes, chips, groups, n, lanes = GROUPS[name]
    links = Torus([(*place[:2], *(place[2:] or (0,)), 0) for place in chips], (*sizes, 1), chip)
    line = f"  %c = {A} all-gather(%x), replica_groups={groups}, dimensions={{0}}\n"
    found = estimate_time(module(line, devices=len(chips)), chip, links)
    assert spent(found) == {
        "collectives": pytest.approx((n - 1) / n * SIZE / lanes / 1e9 + LATENCY)
    }


def test_two_devices_of_a_chip_share_its_links():
    places = [(x, 0, 0, core) for x in range(2) for core in range(2)]
    links = Torus(places, (2, 1, 1, 2), ROUND)
    start, done = permuted("p", "{0,2},{1,3}")
    assert estimate_time(module(start + done), ROUND, links).collectives == pytest.approx(
        2 * SIZE / 1e9 + LATENCY
    )
    apart = f"  %c = {A} all-reduce(%x), replica_groups={{{{0,2}},{{1,3}}}}\n"
    assert estimate_time(module(apart), ROUND, links).collectives == pytest.approx(
        2 * SIZE / 1e9 + LATENCY
    )
    both = f"  %c = {A} all-reduce(%x), {SENT}\n"
    assert estimate_time(module(both), ROUND, links).collectives == pytest.approx(
        1.5 * SIZE / 1e9 + LATENCY
    )


SPARSE = (
    f"%summed (p: f32[1000,1000]) -> f32[1000,1000] {{\n  %p = {A} parameter(0)\n"
    f"  ROOT %c = {A} all-reduce(%p), {SENT}\n}}\n\n"
    f"%offloaded (p: f32[1000,1000]) -> f32[1000,1000] {{\n  %p = {A} parameter(0)\n"
    f"  ROOT %c = {A} custom-call(%p), custom_call_target=_, called_computations={{%summed}}\n}}\n"
)


def test_a_sum_on_sparse_cores_is_a_sum():
    shapes = f"((f32[1000,1000]), {A}, u32[])"
    start = '  %s = ((), ()) async-start(), async_execution_thread="sparsecore", calls=%offloaded\n'
    update = f"  %u = {shapes} async-update(%s, %x)\n"
    done = f"  %d = {A} async-done(%u)\n"
    reduced = pytest.approx(AROUND["all-reduce"] / 1e9 + LATENCY)
    beside = time_of(start + update + WORK + done, FUSED + SPARSE)
    assert spent(beside) == {"elementwise": 1, "overlapped": reduced}
    assert beside.unknown == ()
    assert spent(time_of(start + update + done, SPARSE)) == {"collectives": reduced}


def part(name, target, ms):
    call = f'\n  ROOT %t = {A} custom-call(%g), custom_call_target="{target}"' if target else ""
    gathered = f'all-gather(%p), {SENT}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}'
    computation = f"%{name}.1 (p: f32[1000,1000]) -> f32[1000,1000] {{\n  %p = {A} parameter(0)\n"
    computation += f"  {'' if target else 'ROOT '}%g = {A} {gathered}{call}\n}}\n\n"
    line = f"  %{name} = {A} fusion(%x), kind=kOutput, calls=%{name}.1"
    return computation, (
        estimated(line.split(" = ")[0].strip(), line.split(" = ")[1], ms) if ms else f"{line}\n"
    )


def test_a_gather_in_parts_is_sent_once_beside_the_products_between_its_ends():
    parts = [
        part("a", "AsyncCollectiveStart", 0),
        part("b", "", 1),
        part("c", "", 2),
        part("d", "AsyncCollectiveDone", 0),
    ]
    computations, lines = map("".join, zip(*parts, strict=True))
    assert spent(time_of(lines, computations)) == {
        "elementwise": 3,
        "overlapped": pytest.approx(GATHERED),
    }
    computations, lines = map("".join, zip(parts[0], parts[3], strict=True))
    assert spent(time_of(lines, computations)) == {"collectives": pytest.approx(GATHERED)}


def test_other_work_of_sparse_cores_is_not_timed():
    wrapped = (
        f"%gathers (p: f32[1000,1000]) -> f32[1000,1000] {{\n  %p = {A} parameter(0)\n"
        f'  ROOT %c = {A} custom-call(%p), custom_call_target="offloaded",'
        ' metadata={op_name="jit(f)/gather"}\n}\n'
    )
    line = (
        f'  %s = ({A}, {A}, u32[]) async-start(%x), async_execution_thread="sparsecore",'
        " calls=%gathers\n"
    )
    found = time_of(line + f"  %d = {A} async-done(%s)\n", wrapped)
    assert spent(found) == {}
    assert found.unknown == ("what the sparse cores take beside the rest (jit(f)/gather)",)


def test_it_names_the_compiler_and_the_chip():
    text = str(time_of(estimated("%e", f"{A} copy(%x)", 16)))
    version = importlib.metadata.version("libtpu")
    assert text.startswith(
        f"on v5p, estimated by libtpu {version}: compute 16.000 ms (products 0.000, "
    )
    assert len(text.splitlines()) == 1
    early = str(loop("and(%less, %less.1)"))
    assert early.splitlines()[1].startswith(f"at least, by libtpu {version}: compute 0.500 ms (")
