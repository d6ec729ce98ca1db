"""What a run keeps of its samples' tokens, and the page of it: true numbers, no line twice, no
text as markup.
"""

import html
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from html_pages import CHROMIUM, Read, browser_rules, chromium
from programs import xla_flags
from tiny_runs import ONE_UPDATE

from examples.trainer import explained, tokens_page
from examples.trainer.arguments import parse
from examples.trainer.grpo_run import grpo_step, set_up, supervised
from examples.trainer.report import Report, main
from examples.trainer.tasks import Tokenizer
from examples.trainer.train_grpo import main as train
from jaxppo import RolloutBatch, Sample
from jaxppo.losses.explain import ExplainedTokens, by_sample
from sharding import make_parallel_mesh

pytestmark = pytest.mark.usefixtures("kept_programs")
LENGTH = ["--sft-steps", "12", "--steps", "3", "--checkpoint-every", "2"]
RUN = [*tiny_runs.TINY, "--learning-rate", "0.01", *LENGTH]
ALL = 16  # samples of a step
EVIL = (
    "</script><script>alert(1)</script><!--<img src=x"
    " onerror=alert(1)>&lt;\"'\x00\u2028\u202e\ud800"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run on dp=2,cp=2,tp=2 with one update a step.

    The tokens of all samples are explained.
    """
    folder = tmp_path_factory.mktemp("run")
    assert train([*ONE_UPDATE, *LENGTH, "--out", str(folder)]) == 0
    return folder


def tokens_of(folder):
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


def total(record, name):
    return float(np.sum(np.array(record[name], np.float64)))


# What a run keeps


def test_contributions_of_all_samples_sum_to_the_loss(finished):
    found = tokens_of(finished)
    steps = tiny_runs.records(finished)
    assert sorted((x["step"], x["sample_id"]) for x in found) == [
        (i, j) for i in (1, 2, 3) for j in range(ALL)
    ]
    for numbers in steps:
        of_step = [x for x in found if x["step"] == numbers["step"]]
        contributions = [total(x, "contribution") for x in of_step]
        scale = np.abs([y for x in of_step for y in x["contribution"]]).sum()
        assert sum(contributions) == pytest.approx(numbers["loss"], abs=1e-5 * scale)
        assert np.mean([x["reward"] for x in of_step]) == pytest.approx(numbers["reward"], rel=1e-5)
        lengths = sum(sum(x["loss_mask"]) for x in of_step)
        assert sum(total(x, "kl") for x in of_step) / lengths == pytest.approx(
            numbers["kl"], rel=1e-4, abs=1e-7
        )


def test_lists_have_one_length_and_texts_are_those_of_the_sample(finished):
    texts = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    found = tokens_of(finished)
    for record in found:
        lists = {name: x for name, x in record.items() if isinstance(x, list)}
        assert {*lists} >= {
            "text",
            "ratio",
            "advantages",
            "weight",
            "loss/policy",
            "loss/kl",
            "loss/entropy",
        }
        assert {len(x) for x in lists.values()} == {len(record["tokens"])}
        lost = [reason == "masked" for reason in record["reason"]]
        assert lost == [mask == 0 for mask in record["loss_mask"]]
    for step in texts:
        kept = {
            x["before"] + "".join(x["text"]): x["reward"]
            for x in found
            if x["step"] == step["step"]
        }
        for sample in step["samples"]:
            assert kept[sample["prompt"] + sample["completion"]] == pytest.approx(
                sample["reward"], rel=1e-5
            )


def explained_step(folder, *options):
    args = parse([*RUN, "--out", str(folder), *options])
    run = set_up(args)
    supervised(run, args)
    numbers = grpo_step(run, args)
    return run, explained.records(run.explained, 1, run.task.tokenizer), numbers


TREES = ["--share-prefixes", "--loss", "clip_cov"]


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.nightly), TREES], ids=["rows", "trees"]
)
def test_sums_over_a_sample_are_those_of_by_sample(tmp_path, options):
    run, found, _ = explained_step(tmp_path, "--explain", "5", *options)
    chosen = run.explained
    sums = by_sample(chosen.found, chosen.batch)
    places = zip(*np.nonzero(np.asarray(chosen.batch.sample_ids) >= 0), strict=True)
    assert [x["sample_id"] for x in found] == [0, 3, 6, 9, 12]
    for record, place in zip(found, places, strict=True):
        for name in chosen.found.arrays:
            expected = float(sums[name][place])
            scale = max(np.abs(record[name]).sum(), 1e-30)
            assert total(record, name) == pytest.approx(expected, abs=1e-5 * scale), name
        assert record["reason"].count("") == int(sums["trained"][place])


def check_same(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert {*got} == {*want}
        for name, x in want.items():
            if name.startswith("sampler"):  # rounding alone
                continue
            if isinstance(x, list) and isinstance(x[0], float):
                np.testing.assert_allclose(got[name], x, rtol=2e-3, atol=2e-5, err_msg=name)
            else:
                assert got[name] == x, name


@pytest.mark.nightly
def test_tokens_do_not_depend_on_mesh_and_layout(tmp_path):
    options = ["--explain", str(ALL)]
    _, whole, numbers = explained_step(tmp_path / "a", *options)
    _, other, _ = explained_step(
        tmp_path / "b", *options, "--mesh", "dp=1,cp=4,tp=2", "--context-layout", "zigzag"
    )
    ratios = [
        x
        for sample in whole
        for x, mask in zip(sample["ratio"], sample["loss_mask"], strict=True)
        if mask
    ]
    for of, name in ((max, "ratio_max_last_update"), (np.mean, "ratio_mean_last_update")):
        assert abs(numbers[name] - 1) > 1e-3  # as it is in the first of two updates
        assert of(ratios) == pytest.approx(numbers[name], rel=1e-5)
    assert {reason for x in whole for reason in x["reason"]} >= {"", "masked"}
    check_same(other, whole)


@pytest.mark.nightly
def test_two_processes_keep_what_one_keeps(tmp_path):
    """Process 0 writes samples of both."""
    options = [*RUN, "--sft-steps", "0", "--mesh", "dp=8", "--steps", "1"]
    command = [sys.executable, "-m", "examples.trainer.train_grpo", *options, "--processes", "2"]
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": root,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(quick=True),
    }
    subprocess.run(
        [*command, "--out", str(tmp_path / "two")],
        env=environment,
        cwd=root,
        check=True,
        timeout=300,
    )
    assert train([*options, "--out", str(tmp_path / "one")]) == 0
    check_same(tokens_of(tmp_path / "two"), tokens_of(tmp_path / "one"))


@pytest.mark.parametrize(
    ("count", "step", "expected"),
    [(3, 0, [0, 3, 6]), (3, 8, [8, 2, 5]), (9, 1, [1, 2, 3, 4, 5, 6, 7, 8, 0])],
)
def test_other_samples_at_each_step(count, step, expected):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    samples = [
        Sample([i // 3, 10 + i, 20 + i], 1, sample_id=i, group_id=i // 3, reward=float(i))
        for i in range(9)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=8, rows=6, parallel=parallel).put(
        parallel
    )
    reason = jnp.where(batch.loss_mask > 0, 0, 2)
    found = ExplainedTokens({"twice": 2.0 * batch.targets}, reason, ("", "padding", "masked"))
    choose = partial(explained.choose, count=count, parallel=parallel)
    chosen = jax.jit(lambda found, batch, step: choose(found, batch, step=step))(
        found, batch, jnp.int32(step)
    )
    made = explained.records(chosen, step, Tokenizer("", ""))
    assert [x["sample_id"] for x in made] == expected
    for record, i in zip(made, expected, strict=True):
        assert record["tokens"] == [10 + i, 20 + i]
        assert record["twice"] == [20.0 + 2 * i, 40.0 + 2 * i]
        assert (record["group_id"], record["reward"]) == (i // 3, float(i))


def test_no_more_than_there_are(tmp_path):
    assert set_up(parse([*RUN, "--out", str(tmp_path), "--explain", "99"])).learner.explain == ALL


def test_none_are_explained_if_nobody_asks(tmp_path):
    options = [*RUN, "--explain", "0", "--sft-steps", "0", "--updates", "1"]
    options += ["--steps", "1", "--devices", "1", "--out", str(tmp_path)]
    assert train(options) == 0
    assert not (tmp_path / "tokens.jsonl").exists()
    assert set_up(parse([*options, "--resume"])).learner.explain == 0
    (tmp_path / "tokens.html").write_text("of an older run")
    assert main([str(tmp_path)]) == 0
    assert not (tmp_path / "tokens.html").exists()
    assert "tokens.html" not in (tmp_path / "report.html").read_text()


@pytest.mark.every(2)
@pytest.mark.parametrize("torn", ['{"step": 3, "sample_id": 0, "tok', ""])
def test_a_run_that_goes_on_has_each_line_once(finished, tmp_path, torn):
    """As if it was killed after the checkpoint of step 2, in or before the lines of step 3."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "tokens.jsonl").write_text("".join(lines[: 2 * ALL + 5]) + torn)
    assert train([*ONE_UPDATE, *LENGTH, "--out", str(tmp_path), "--resume"]) == 0
    assert (tmp_path / "tokens.jsonl").read_text() == "".join(lines)


@pytest.mark.parametrize("explains", [True, False])
def test_later_steps_are_forgotten(tmp_path, explains):
    """A run that explains no more tokens forgets the lines of the steps that it makes anew."""
    lines = [json.dumps({"step": i, "tokens": []}) for i in (1, 2, 3)]
    (tmp_path / "mine").write_text("\n".join(lines))
    (tmp_path / "tokens.jsonl").symlink_to(tmp_path / "mine")
    numbers = {"reward": 1.0, "loss": 0.0, "entropy": 1.0, "tokens_per_second": 1.0}
    with Report(tmp_path, 9, 2, {}, explains) as report:
        report.add(3, numbers, [], [{"step": 3, "new": True}] * explains)
    assert [x["step"] for x in tokens_of(tmp_path)] == [1, 2, 3][: 2 + explains]
    assert (tmp_path / "mine").read_text() == "\n".join(lines)  # nothing is written through a link


# The page


def record(step=1, sample=0, **more):
    fields = {
        "step": step,
        "sample_id": sample,
        "group_id": 0,
        "reward": 0.5,
        "before": "ask",
        "text": ["a", "b"],
    }
    fields |= {"tokens": [7, 8], "loss_mask": [0, 1], "reason": ["masked", ""], "ratio": [0.0, 1.5]}
    return fields | {"contribution": [0.0, -0.25]} | more


def page_of(folder, *lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    if lines:
        (folder / "tokens.jsonl").write_text(
            "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        )
    assert main([str(folder)]) == 0
    return (folder / "tokens.html").read_text()


def test_a_browser_runs_the_pages_own_script_alone(tmp_path):
    read = Read(page_of(tmp_path, record(before=EVIL)))
    assert set(browser_rules(read)) == {
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    }
    assert len(read.inline["script"]) == 1


class Data(Read):
    """A page that also keeps the data of its script."""

    def __init__(self, text):
        self.scripts = []
        super().__init__(text)
        self.data = json.loads(self.scripts[0])

    def handle_data(self, text):
        if self.open[-1:] == ["script"]:
            self.scripts.append(text)
        super().handle_data(text)


def test_the_pages_data_are_those_of_the_file(tmp_path):
    read = Data(page_of(tmp_path, record(1), record(2, 3, reward=None), record(1, reward=0.75)))
    (first, second), columns = read.data["samples"], read.data["columns"]
    assert (first["step"], first["id"], first["reward"]) == (1, 0, 0.75)  # the later of two
    assert (second["step"], second["id"], second["reward"]) == (2, 3, None)
    assert first["values"] == {"ratio": [0.0, 1.5], "contribution": [0.0, -0.25]}
    assert columns == [["contribution", "contribution to the loss"], ["ratio", "ratio"]]
    assert (
        "a few samples of 2 of 2 steps; all that were explained are in tokens.jsonl" in read.texts
    )


def test_pages_link_to_each_other_and_load_nothing(tmp_path):
    page = page_of(tmp_path, record())
    assert Data(page).loaded == ["report.html"]
    assert Read((tmp_path / "report.html").read_text()).loaded == ["tokens.html"]
    for call in (
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert call not in page, call


def test_no_text_of_a_run_becomes_markup(tmp_path):
    plain = Data(page_of(tmp_path / "plain", record()))
    hostile = record(
        before=EVIL,
        text=[EVIL, EVIL],
        reason=["masked", EVIL],
        **{EVIL: [1.0, 2.0], "__proto__": [1, 2]},
    )
    evil = Data(page_of(tmp_path / "evil", hostile))
    assert evil.tags == plain.tags
    (sample,) = evil.data["samples"]
    assert (sample["before"], sample["text"], sample["reasons"]) == (
        EVIL,
        [EVIL] * 2,
        ["masked", EVIL],
    )
    assert sample["values"][EVIL] == [1.0, 2.0]
    assert all("<" not in script for script in evil.scripts[:1])


def test_lines_that_are_none_are_counted(tmp_path):
    spoilt = [
        *(
            "null",
            "[" * 200_000,
            '{"step',
            '{"step": 1}',
            '{"step": 1, "sample_id": 0, "tokens": 5}',
        ),
        *(
            record(tokens=["a", "b"]),
            record(reason=["masked"]),
            record(text=["a", 5]),
            record(loss_mask=[0, None]),
        ),
        *(
            record(sample_id=True),
            record(step=10**400),
            record(reason=[1, 2]),
            record(tokens=[1, 1 << 60]),
        ),
    ]
    kept = record(
        more=[1.0],
        words=["x", "y"],
        huge=[10**400, 0],
        bad=[None, 1.0],
        reward="much",
        group_id=None,
    )
    read = Data(page_of(tmp_path, *spoilt, kept))
    assert read.data["samples"][0]["values"].keys() == {"ratio", "contribution", "bad"}
    assert (read.data["samples"][0]["reward"], read.data["samples"][0]["group"]) == (None, None)
    told = f"all that were explained are in tokens.jsonl; {len(spoilt)} lines of it are no records"
    assert f"a few samples of 1 of 1 steps; {told}" in read.texts


def test_a_file_without_a_sample(tmp_path):
    assert "no sample yet; " in page_of(tmp_path, "nothing")


def test_a_long_run_has_a_page_of_some_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_page, "_MOST", 100)
    read = Data(page_of(tmp_path, *(record(i) for i in range(1, 61))))  # of six numbers each
    steps = [sample["step"] for sample in read.data["samples"]]
    assert (steps[0], steps[-1], len(steps)) == (1, 60, 16)
    assert (
        "a few samples of 16 of 60 steps; all that were explained are in tokens.jsonl" in read.texts
    )


def test_no_page_is_written_through_a_link(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("tokens.html", "tokens.html.new"):
        (tmp_path / name).write_text("mine")
        (run / name).symlink_to(tmp_path / name)
    page_of(run, record())
    assert {(tmp_path / name).read_text() for name in ("tokens.html", "tokens.html.new")} == {
        "mine"
    }
    assert not (run / "tokens.html").is_symlink()


def test_a_runs_page_has_its_samples(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    assert main([str(tmp_path)]) == 0
    read = Data((tmp_path / "tokens.html").read_text())
    assert [(x["step"], x["id"]) for x in read.data["samples"]] == [
        (i, j) for i in (1, 2, 3) for j in range(ALL)
    ]
    assert [name for name, _ in read.data["columns"]][:9] == [*tokens_page.LABELS]


@pytest.mark.nightly
@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
def test_chromium_shows_the_tokens(tmp_path):
    clipped = record(
        1, 1, text=["a", EVIL], reason=["masked", "clipped above"], contribution=[0.0, 0.5]
    )
    page_of(tmp_path, record(), clipped, record(1, 2, ratio=[0.0, None]))
    address = f"file://{tmp_path / 'tokens.html'}#step=1&column=ratio&off=clipped+above"
    page = chromium(tmp_path, address, "--dump-dom")
    drawn = page[page.index('id="page"') : page.index('<script type="application/json"')]
    assert "<script" not in drawn
    assert "<img" not in drawn
    assert html.escape(EVIL[:50], quote=False) in drawn
    assert "⟨U+202e⟩" in drawn
    for text in (
        "b, ratio 1.5, trained",
        "a, no loss, masked",
        'class="off"',
        "clipped above (1)",
        "trained (2)",
    ):
        assert text in drawn, text
    assert "contributions sum to −0.25" in drawn
    assert 'class="bad" aria-label="b, ratio not finite, trained"' in drawn
