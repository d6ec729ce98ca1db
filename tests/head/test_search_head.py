"""The search from hidden states and from logits: heads, adapters, temperatures, dtypes, meshes,
one pass and two.
"""

from __future__ import annotations

import pytest
from check_from_hidden import check_policy_loss_from_hidden
from hypothesis import strategies as st
from random_heads import heads
from random_losses import LOSSES, configs
from random_steps import MESHES, large_steps, places, steps
from searches import search

FSDP = ("dp=2,fsdp=2,tp=2", "cp=2,fsdp=4", "fsdp=8", "cp=2,fsdp=2,tp=2")


@pytest.mark.every(5)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_from_hidden(name: str):
    where = places((None, *MESHES, *FSDP), (None, None, 2), sequence_parallel=True)
    drawn = st.lists(steps, min_size=1, max_size=2)
    search(f"{name} from hidden", 0.02, configs(name), where, heads, drawn)(
        check_policy_loss_from_hidden
    )


@pytest.mark.every(14)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_from_hidden_of_large_steps(name: str):
    where = places((None, *MESHES, *FSDP), (None, None, 2), sequence_parallel=True)
    drawn = st.lists(large_steps, min_size=1, max_size=1)
    search(f"{name} from hidden, large", 0.005, configs(name), where, heads, drawn)(
        check_policy_loss_from_hidden
    )
