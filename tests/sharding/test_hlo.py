"""The reader of compiled modules against text whose contents can be counted by hand."""

import math

import pytest

from sharding.audit.hlo import parse, parts, shape_bytes, transfer
from sharding.audit.hlo_integers import loop, values

# 8 devices; a loop of 5 turns around a loop of at most 6, in its smaller part a sum over all
MODULE = """HloModule m, num_partitions=4, replica_count=2, entry_computation_layout={(f32[8])->f32[8]}

%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: s32[], q: s32[]) -> pred[] {
  %p = s32[]{:T(128)} parameter(0)
  %q = s32[]{:T(128)} parameter(1)
  ROOT %less = pred[]{:T(512)} compare(%p, %q), direction=LT
}

%inner.cond (s.1: (s32[], s32[], f32[8])) -> pred[] {
  %s.1 = (s32[]{:T(128)}, s32[], /*index=2*/f32[8]{0:T(1024)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=1
  %six = s32[] constant(6)
  %in.1 = pred[] fusion(%i.1, %six), kind=kLoop, calls=%wrapped
  %in.2 = pred[] compare(%i.1, %n.1), direction=LE
  ROOT %both = pred[] and(%in.1, %in.2)
}

%inner.body (s.2: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %s.2 = (s32[], s32[], f32[8]{0:T(1024)}) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.2), index=0
  %n.2 = s32[] get-tuple-element(%s.2), index=1
  %x.2 = f32[8]{0:T(1024)} get-tuple-element(%s.2), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i.2, %one)
  %all = f32[8]{0:T(1024)} all-reduce(%x.2), channel_id=1, replica_groups={}, to_apply=%add.1
  ROOT %t.2 = (s32[], s32[], f32[8]{0:T(1024)}) tuple(%next, %n.2, %all), metadata={op_name="jit(f)/while"}
}

%outer.cond (s.3: (s32[], s32[], f32[8], s32[])) -> pred[] {
  %s.3 = (s32[], s32[], f32[8], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%s.3), index=0
  %zero = s32[] constant(0)
  ROOT %more = pred[] compare(%i.3, %zero), direction=GT
}

%outer.body (s.4: (s32[], s32[], f32[8], s32[])) -> (s32[], s32[], f32[8], s32[]) {
  %s.4 = (s32[], s32[], f32[8], s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%s.4), index=0
  %n.4 = s32[] get-tuple-element(%s.4), index=1
  %x.4 = f32[8] get-tuple-element(%s.4), index=2
  %step = s32[] get-tuple-element(%s.4), index=3
  %down = s32[] subtract(%i.4, %step)
  %start = s32[] constant(0)
  %t.4 = (s32[], s32[], f32[8]) tuple(%start, %n.4, %x.4)
  %loop.4 = (s32[], s32[], f32[8]) while(%t.4), condition=%inner.cond, body=%inner.body
  %y.4 = f32[8] get-tuple-element(%loop.4), index=2
  %kept = s32[] get-tuple-element(%loop.4), index=1
  ROOT %t.5 = (s32[], s32[], f32[8], s32[]) tuple(%down, %kept, %y.4, %step)
}

ENTRY %main (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %ten = s32[] constant(10)
  %two = s32[] constant(2)
  %copied = s32[] copy(%ten)
  %t = (s32[], s32[], f32[8], s32[]) tuple(%copied, %n, %x, %two)
  %loop = (s32[], s32[], f32[8], s32[]) while(%t), condition=%outer.cond, body=%outer.body
  ROOT %y = f32[8] get-tuple-element(%loop), index=2
}
"""


def test_a_module_is_read():
    module = parse(MODULE)
    assert module.entry == "main"
    assert module.devices == 8
    assert [x.op for x in module.computations["add.1"].values()] == [
        "parameter",
        "parameter",
        "add",
    ]
    sum_ = module.computations["add.1"]["sum"]
    assert (sum_.shape, sum_.operands, sum_.is_root) == ("f32[]", ("a", "b"), True)
    assert module.computations["inner.body"]["t.2"].op_name == "jit(f)/while"
    assert module.computations["main"]["ten"].inside == "10"
    assert module.looped == {
        "inner.cond",
        "inner.body",
        "outer.cond",
        "outer.body",
        "wrapped",
        "add.1",
    }


def test_the_turns_of_loops_in_it():
    module = parse(MODULE)
    main = module.computations["main"]
    body = module.computations["outer.body"]
    around = loop(module, main["loop"], values(module, main))
    assert around.turns == (5, 5)
    inside = loop(module, body["loop.4"], values(module, body, around.body_args))
    assert inside.turns == (0, 6)
    four = values(module, body, around.body_args)["step"]
    assert (four.low, four.high) == (2, 2)
    counted = loop(
        module, main["loop"], values(module, main, [None, values(module, main)["ten"]])
    ).body_args
    assert loop(module, body["loop.4"], values(module, body, counted)).turns == (6, 6)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("constant(10)", "constant(11)", (6, 6)),
        ("direction=GT", "direction=GE", (6, 6)),
        ("direction=GT", "direction=NE", (5, 5)),
        ("copy(%ten)", "copy(%n)", (0, math.inf)),
        ("subtract(%i.4, %step)", "add(%i.4, %step)", (2**30 - 5, math.inf)),  # up to 2**31 - 1
        ("subtract(%i.4, %step)", "multiply(%i.4, %step)", (0, math.inf)),
        ("tuple(%down, %kept, %y.4, %step)", "tuple(%down, %kept, %y.4, %n.4)", (0, math.inf)),
        (
            "ROOT %more = pred[] compare(%i.3, %zero)",
            "ROOT %more = pred[] custom-call(%i.3, %zero)",
            (0, math.inf),
        ),
    ],
)
def test_turns_that_cannot_be_read_are_not_bounded(old, new, expected):
    assert old in MODULE
    module = parse(MODULE.replace(old, new))
    main = module.computations["main"]
    assert loop(module, main["loop"], values(module, main)).turns == expected


PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", PAIRS),
        ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8]", FOURS),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", PAIRS),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", FOURS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        ("replica_groups=mesh['b'=8] {'b':(1)2}", PAIRS),
        ("replica_groups=mesh['b'=8] {'b':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups=a_form_of_tomorrow", ()),
    ],
)
def test_the_groups_of_a_collective(written, groups):
    module = parse(MODULE.replace("replica_groups={}", f"{written}, use_global_device_ids=true"))
    body = module.computations["inner.body"]
    assert transfer(module, "inner.body", body["all"]).groups == groups


@pytest.mark.parametrize(
    ("line", "op", "size"),
    [
        ("f32[8,4] all-reduce(%x)", "all-reduce", 128),
        ("(f32[8], bf16[8]) all-reduce(%x, %x)", "all-reduce", 48),
        ("(f32[8], bf16[8]) all-reduce-start(%x, %x)", "all-reduce", 48),
        ("f32[2] reduce-scatter(%x)", "reduce-scatter", 32),
        ("(f32[2], f32[8]) all-gather-start(%x)", "all-gather", 32),
        ("((f32[2], s8[4]), (f32[8], s8[16]), u32[]) all-gather-start(%x)", "all-gather", 48),
        (
            "(f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)",
            "collective-permute",
            32,
        ),
        ("pred[8] all-to-all(%x)", "all-to-all", 8),
        ("f8e4m3fn[8] ragged-all-to-all(%x)", "ragged-all-to-all", 8),
    ],
)
def test_the_bytes_of_a_collective(line, op, size):
    module = parse(
        f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  ROOT %y = {line},"
        " replica_groups={{0,1,2,3}}\n}"
    )
    found = transfer(module, "main", module.computations["main"]["y"])
    assert (found.op, found.bytes) == (op, size)


def test_only_collectives_are_transfers():
    module = parse(MODULE)
    found = [
        name
        for name, c in module.computations.items()
        for x in c.values()
        if transfer(module, name, x)
    ]
    assert found == ["inner.body"]


def test_shapes():
    assert shape_bytes("bf16[8,4]{1,0:T(8,128)(2,1)}") == 64
    assert shape_bytes("f32[]") == 4
    assert shape_bytes("s4[8]") == 4
    assert shape_bytes("f32[<=8]") == 32
    assert shape_bytes("token[]") == 0
    assert shape_bytes("(f32[2]{0:S(1)}, f32[3]{0:T(128)S(0)}, f32[4])", in_hbm=True) == 28
    assert parts("((f32[2,3], s32[]), /*index=1*/u32[]{:S(2)})") == [
        "(f32[2,3], s32[])",
        " /*index=1*/u32[]{:S(2)}",
    ]
