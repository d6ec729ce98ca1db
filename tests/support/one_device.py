"""Runs tests that were written for eight emulated devices on the one that is here: each axis of a
mesh has size 1.

`python -m pytest -p tests.support.one_device tests/losses`, and of tests/head the files
from_hidden, from_logits, ids, kept, nucleus, quantized, statistics, log_probs_accuracy and
same_bits. Other files may ask for several devices.
"""

import re
from typing import Any

import pytest

import jaxppo
import sharding
import sharding.testing
from sharding import ParallelMesh

DEVICES = "asks for several devices"
SIZES = "asks for the sizes of a CPU's tiles"
OTHERS = {  # parts of tests' names, and why they do not run
    "test_a_device_without_a_token_that_counts_does_no_product": DEVICES,
    "test_devices_with_masks_of_their_own_may_share_hidden_states[1073741824]": DEVICES,
    "test_no_device_is_left_waiting": DEVICES,
    "test_other_axis_names": DEVICES,
    "test_mtp.py::test_micro_batches_add_up_to_the_step": DEVICES,
    "test_mtp.py::test_a_row_with_nothing_to_predict_gives_zero": DEVICES,
    "test_a_program_says_which_way_it_went_and_cannot_hang": DEVICES,
    "test_quantized.py::test_in_a_shard_map": DEVICES,
    "test_the_audit_tells_of_what_the_likeliest_send": DEVICES,
    "test_passes_stay_within_their_bytes": SIZES,
    "test_the_ratio_to_an_old_pass_of_the_same_policy_is_1[None-2097152": SIZES,
    "test_the_ratio_to_an_old_pass_of_the_same_policy_is_1[dp=2,cp=2,tp=2-2097152": SIZES,
}
_make = sharding.make_parallel_mesh


def make_parallel_mesh(description: str, **options: Any) -> ParallelMesh:
    return _make(re.sub(r"=\d+", "=1", description), **{**options, "devices": None})


for module in (sharding, sharding.testing, sharding.mesh, jaxppo):
    module.make_parallel_mesh = make_parallel_mesh
sharding.testing.emulate_devices = lambda count=8: None
sharding.testing.factorings = lambda count=8: ["dp=1,cp=1,tp=1"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in OTHERS.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
