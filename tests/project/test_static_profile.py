"""The benchmark of two tools of the TPU compiler, on excerpts of what they write.

Nothing is compiled.
"""

import dataclasses

import pytest

from benchmarks.static_profile import profile_of, records
from sharding.devices import known_device

ROUND = dataclasses.replace(known_device("TPU v6 lite"), hertz=1e9)  # 1e6 cycles are a ms

FILE = """hlo_op_estimate {
  hlo_op_name: "fusion.27"
  estimated_cycles: 1372855
  num_equivalent_hlos: 1
  dma_instruction_type: DMA_INSTRUCTION_TYPE_LOCAL
  scalar_inputs: 0
}
"""


def written(folder, **cycles):
    for name, count in cycles.items():
        text = FILE.replace("fusion.27", name).replace("1372855", str(count))
        (folder / f"{name}_TPU v6 lite_static_llo_profile.textproto").write_text(text)
    return profile_of(folder)


def test_a_profile_is_read(tmp_path):
    (tmp_path / "fusion.27_TPU v6 lite_static_llo_profile.textproto").write_text(FILE)
    assert written(tmp_path, **{"pmax.14": 17077}) == {"fusion.27": 1372855, "pmax.14": 17077}


def test_a_file_that_was_not_finished_says_nothing(tmp_path):
    for name, text in (("a", ""), ("b", 'hlo_op_estimate {\n  hlo_op_name: "b"\n  estimated_cyc')):
        (tmp_path / f"{name}_TPU v6 lite_static_llo_profile.textproto").write_text(text)
    assert written(tmp_path, c=5) == {"c": 5}


A, STATE = "f32[1000,1000]{1,0}", "(s32[], f32[1000,1000]{1,0})"


def line(name, operation, operand, ms, scope="jit(f)"):
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{round(ms * 1e6)}"}}}}'
    return (
        f'  {name} = {A} {operation}({operand}), metadata={{op_name="{scope}/{operation}"}},'
        f" {config}\n"
    )


TEXT = (
    f"%again (r: f32[1000,1000]) -> f32[1000,1000] {{\n  %r = {A} parameter(0)\n"
    + line("ROOT %again.1", "sine", "%r", 50)
    + f"}}\n\n%not (q: f32[1000,1000]) -> f32[1000,1000] {{\n  ROOT %q = {A} parameter(0)\n}}\n\n"
    f"%body (s: {STATE}) -> {STATE} {{\n  %s = {STATE} parameter(0)\n  %one = s32[] constant(1)\n"
    f"  %i = s32[] get-tuple-element(%s), index=0\n  %y = {A} get-tuple-element(%s), index=1\n"
    "  %next = s32[] add(%i, %one)\n"
    + line("%turn", "exponential", "%y", 2, "jit(f)/while/body")
    + f"  ROOT %t.1 = {STATE} tuple(%next, %turn)\n}}\n\n%cond (s: {STATE}) -> pred[] {{\n  %s ="
    f" {STATE} parameter(0)\n  %nine = s32[] constant(9)\n  %i = s32[] get-tuple-element(%s),"
    " index=0\n  ROOT %less = pred[] compare(%i, %nine), direction=LT\n}\n\nENTRY %main (x:"
    f" f32[1000,1000], p: pred[]) -> f32[1000,1000] {{\n  %x = {A} parameter(0)\n  %p = pred[]"
    " parameter(1)\n"
    + line("%a", "tanh", "%x", 3)
    + line("%b", "tanh", "%a", 3)
    + line("%alone", "sqrt", "%b", 4)
    + f"  %zero = s32[] constant(0)\n  %t = {STATE} tuple(%zero, %alone)\n  %w = {STATE} while(%t),"
    f" condition=%cond, body=%body\n  %z = {A} get-tuple-element(%w), index=1\n  ROOT %c = {A}"
    " conditional(%p, %z, %z), true_computation=%again, false_computation=%not,"
    ' metadata={op_name="jit(f)/<rarely: again>/cond"}\n}\n'
)


def test_both_tools_say_what_each_instruction_takes(tmp_path):
    found = records(TEXT, written(tmp_path, a=1_000_000, turn=5_000_000), ROUND)
    expected = [
        ("exponential f32[1000,1000], in a loop", 1, 9 * 2, 9 * 5),  # nine turns
        # %b computes the same as %a, which alone has a file
        ("tanh f32[1000,1000]", 2, 2 * 3, 2 * 1),
        ("sqrt f32[1000,1000]", 1, 4, None),  # has none
    ]
    rows = [tuple(row.values()) for row in found[:-1]]
    # the branch that is rarely taken is not there
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [row[2:] for row in rows] == [pytest.approx(row[2:]) for row in expected]
    assert found[-1].pop("instruction") == "all computing"
    assert found[-1] == pytest.approx({"estimated_ms": 28, "static_ms": 51, "not_in_profile_ms": 4})


def kernel(cycles):
    declared = f'backend_config={{"cost_estimate":{{"bytes_accessed":"5","flops":"{int(ROUND.flops / 1e3)}"}}}}'
    text = f"ENTRY %main (x: f32[1000,1000]) -> f32[1000,1000] {{\n  %x = {A} parameter(0)\n"
    call = (
        'custom-call(%x), custom_call_target="tpu_custom_call",'
        f' metadata={{op_name="jit(f)/kernel"}}, {declared}'
    )
    return records(f"{text}  ROOT %k = {A} {call}\n}}\n", {"k": cycles}, ROUND)


def test_kernels_are_compared_with_what_they_declare():
    """One ms at the chip's peak, which the estimate takes for 1 / 0.93."""
    found, total = kernel(1_250_000)
    assert (found["estimated_ms"], found["static_ms"]) == (pytest.approx(1 / 0.93), 1.25)
    assert total["static_ms"] == 1.25
    found, total = kernel(900_000)  # a branch of the kernel was not taken: no chip is that fast
    assert found["static_ms"] is None
    assert total["static_ms"] == total["not_in_profile_ms"] == pytest.approx(1 / 0.93)


def test_a_profile_of_another_program_is_refused():
    with pytest.raises(ValueError, match="of another program, which has other"):
        records(TEXT, {"a": 5, "other": 5}, ROUND)
