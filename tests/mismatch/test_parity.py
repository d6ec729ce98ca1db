"""Where two systems first differ: `python -m jaxppo.mismatch --parity`, stage by stage, on
numbers worked by hand.
"""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxppo.mismatch.__main__ import main
from jaxppo.mismatch.parity import STAGES, compare_stages

BF16 = ml_dtypes.bfloat16


def recorded(**changes):
    """What a system recorded of four tokens; the changes take the place of arrays, None takes
    one away.
    """
    hidden = np.arange(12).reshape(4, 3).astype(BF16)
    kernel = (np.arange(15).reshape(3, 5) / 4).astype(BF16)
    found = {
        "tokens": np.array([4, 0, 2, 2]),
        "hidden": hidden,
        "kernel": kernel,
        "bias": np.zeros(5, np.float32),
        "logits": hidden.astype(np.float32) @ kernel.astype(np.float32),
        "temperature": np.float32(0.5),
        "support": np.array([[4, 1, -1], [0, 3, 2], [2, -1, -1], [2, 4, -1]]),
        "log_probs": -np.arange(4, dtype=np.float32),
        "stop_ids": np.array([7, 8]),
    } | changes
    return {name: x for name, x in found.items() if x is not None}


def at(x, index, value):
    """A copy with another number at this index."""
    x = np.array(x)
    x[index] = value
    return x


SAME = recorded()
# by the stage that differs first: what the sampler recorded, and the line that says so
FIRST = {
    "tokens": (
        {"tokens": at(SAME["tokens"], 1, 3)},
        "1 of 4 tokens differ, first [1]: 0 and 3; 3 apart at most",
    ),
    "hidden": (
        # 7 is 1.75 * 2^2, and the next number of bfloat16 is 2^-5 above it
        {"hidden": at(SAME["hidden"], (2, 1), 7.03125), "log_probs": SAME["log_probs"] - 1},
        "1 of 4 tokens differ, first [2, 1]: 7 and 7.03125; 0.0312 apart at most",
    ),
    "kernel": (
        {"kernel": at(SAME["kernel"], (1, 0), 2)},
        "1 of 15 numbers differ, first [1, 0]: 1.25 and 2; 0.75 apart",
    ),
    "bias": (
        {"bias": SAME["bias"] + 1},
        "5 of 5 numbers differ, first [0]: 0 and 1; 1 apart at most",
    ),
    # 9 * 0 + 10 * 1.25 + 11 * 2.5
    "logits": (
        {"logits": at(SAME["logits"], (3, 0), 0)},
        "1 of 4 tokens differ, first [3, 0]: 40 and 0; 40 apart",
    ),
    "temperature": (
        {"temperature": np.float32(1)},
        "1 of 1 numbers differ, first []: 0.5 and 1; 0.5 apart at most",
    ),
    "support": (
        {"support": at(SAME["support"], (3, 1), 3)},
        "1 of 4 tokens differ, first [3, 0]: 4 and 3; 1 apart at most",
    ),
    "log_probs": (
        {"log_probs": at(SAME["log_probs"], 3, np.nan)},
        "1 of 4 tokens differ, first [3]: -3 and nan",
    ),
    "stop_ids": (
        {"stop_ids": np.array([8])},
        "1 of 2 ids differ, first 7, which the trainer alone has",
    ),
}


def test_every_stage_has_a_case_and_advice():
    assert list(FIRST) == list(STAGES)
    assert all(stage.advice for stage in STAGES.values())


@pytest.mark.parametrize("name", FIRST)
def test_the_first_difference_is_named(name):
    changes, line = FIRST[name]
    found = compare_stages(recorded(), recorded(**changes))
    assert found.first == name
    words = f"{STAGES[name].words:15}"
    said = [text for text in str(found).splitlines() if text.startswith(words)]
    assert len(said) == 1
    assert line in said[0]
    assert str(found).endswith(f"first difference: {STAGES[name].words}. {STAGES[name].advice}.")
    before = list(STAGES)[: list(STAGES).index(name)]
    assert [found.differences[stage] for stage in before] == [None] * len(before)


def test_logits_that_one_system_rounds():
    """257 has nine bits, and bfloat16 has eight."""
    logits = np.array([[1.0, 257.0], [256.0, 2.0]], np.float32)
    found = compare_stages({"logits": logits}, {"logits": logits.astype(BF16)})
    assert found.first == "logits"
    assert (
        "1 of 2 tokens differ, first [0, 1]: 257 and 256, in float32 and bfloat16; 1 apart"
        in str(found)
    )
    assert "logits_dtype" in str(found)


def test_what_is_the_same_otherwise_written():
    """Other dtypes of equal numbers, a temperature for each token, ids in another order, twice
    or in fewer columns.
    """
    other = recorded(
        hidden=SAME["hidden"].astype(np.float32),
        tokens=SAME["tokens"].astype(np.int16),
        temperature=np.full(4, 0.5),
        support=np.array([[1, 4, 4, -1], [3, 2, 0, 0], [-1, -1, 2, -1], [4, 2, -1, -1]]),
        stop_ids=np.array([[8], [7]]),
    )
    found = compare_stages(recorded(), other)
    assert (found.first, found.alone) == (None, {})
    assert str(found).count("the same\n") == len(STAGES)
    assert str(found).endswith("no difference in what both files hold")


def test_tokens_that_do_not_count():
    where = np.array([True, False, True, True])
    other = recorded(hidden=at(SAME["hidden"], 1, np.nan), log_probs=at(SAME["log_probs"], 1, 5))
    assert compare_stages(recorded(where=where), other).first is None
    found = compare_stages(recorded(), other)
    assert found.first == "hidden"
    assert np.isnan(found.differences["hidden"].largest)
    assert found.differences["log_probs"].largest == 6


def test_rows():
    """`[R, T]`, and a mask of the vocabulary as support."""
    hidden = np.zeros((2, 3, 4), np.float32)
    support = np.ones((2, 3, 5), bool)
    trainer = {"hidden": hidden, "support": support, "where": np.array([[1, 1, 0], [1, 0, 0]])}
    other = {"hidden": at(hidden, (0, 2, 1), 1), "support": at(support, (1, 0, 4), False)}
    found = compare_stages(trainer, other)
    assert found.first == "support"
    assert (found.differences["support"].count, found.differences["support"].of) == (1, 3)
    assert found.differences["support"].first == (1, 0, 4)


def test_stages_that_one_file_holds():
    found = compare_stages(recorded(bias=None), recorded(logits=None))
    assert found.alone == {"logits": "trainer", "bias": "sampler"}
    assert "head, bias     not compared: the sampler's file alone holds it" in str(found)
    assert "log-probs      not recorded" in str(
        compare_stages({"tokens": SAME["tokens"]}, {"tokens": SAME["tokens"]})
    )


def saved(folder, **arrays):
    np.savez(folder / "a.npz", **recorded())
    np.savez(folder / "b.npz", **arrays)
    return [str(folder / "a.npz"), str(folder / "b.npz"), "--parity"]


def test_two_files(tmp_path, capsys):
    """bfloat16 is stored as numpy stores it. The exit code tells a script whether they differ."""
    main(saved(tmp_path, **recorded()))
    assert capsys.readouterr().out.endswith("no difference in what both files hold\n")
    with pytest.raises(SystemExit) as ended:
        main([*saved(tmp_path, **recorded(hidden=at(SAME["hidden"], (2, 1), 9))), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert found["first"] == "hidden"
    assert found["differences"]["hidden"]["first"] == [2, 1]
    assert found["differences"]["kernel"] is None


# by name: what the sampler recorded, more arguments, what the line says
BAD = {
    "a name": (
        recorded(logprobs=SAME["log_probs"]),
        [],
        "sampler: got logprobs, expected none but tokens, hidden",
    ),
    "a mask of the sampler": (
        recorded(where=np.ones(4)),
        [],
        "sampler: got where, expected none but",
    ),
    "nothing": (
        {},
        [],
        "files: got no stage that both hold, expected some of tokens, hidden, kernel",
    ),
    "ids of floats": (
        recorded(tokens=np.ones(4)),
        [],
        "sampler: tokens: got dtype float64, expected integers",
    ),
    "fewer tokens": (
        recorded(hidden=SAME["hidden"][:3]),
        [],
        "sampler: hidden: got shape (3, 3), expected (4,), as the first array of tokens has",
    ),
    "no tokens": (
        {"hidden": np.ones(3)},
        [],
        "sampler: hidden: got shape (3,), expected [R, T] or [N], and one more dimension",
    ),
    "a wider model": (
        recorded(hidden=np.ones((4, 6), np.float32)),
        [],
        "sampler: hidden: got shape (4, 6), expected the trainer's, (4, 3)",
    ),
    "a turned kernel": (
        recorded(kernel=SAME["kernel"].T),
        [],
        "sampler: kernel: got shape (5, 3), expected the",
    ),
    "a mask beside ids": (
        recorded(support=np.ones((4, 5), bool)),
        [],
        "support: got int64 beside bool, expected ids in both files, or bool in both",
    ),
    "text": (recorded(stop_ids=np.array(["a"])), [], "b.npz: stop_ids: got dtype <U1"),
    "bins": (
        recorded(),
        ["--bins", "2"],
        "--parity: got it beside --bins, --layout or --rounded-to, expected none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_in_one_line(tmp_path, capsys, case):
    arrays, options, message = BAD[case]
    with pytest.raises(SystemExit) as ended:
        main([*saved(tmp_path, **arrays), *options])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("python -m jaxppo.mismatch: error: ")
    assert message in said.err


def test_masks_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"trainer: where: got shape \(3,\), expected that of tokens, \(4,\)"
    ):
        compare_stages(recorded(where=np.ones(3)), recorded())
    with pytest.raises(
        ValueError, match="trainer: where: got no token that counts, expected 1 at least"
    ):
        compare_stages(recorded(where=np.zeros(4)), recorded())
