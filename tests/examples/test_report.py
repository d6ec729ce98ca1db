"""The page of a run: it has all valid records and no others, and no text of a run becomes
markup.
"""

import json
import re
import shutil
import struct

import numpy as np
import pytest
from html_pages import CHROMIUM, Read, browser_rules, chromium
from matplotlib import image
from said import said_by
from tensorboardX.proto.event_pb2 import Event

from examples.trainer.report import main
from examples.trainer.report_page import CHARTS

NAMES = [
    "reward",
    "kl",
    "entropy",
    "clip_fraction_last_update",
    "mismatch_kl",
    "tokens_per_second",
    "memory_gib",
]


def make_run(folder, lines=(), settings=None, steps=5):
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"step": i, **dict.fromkeys(NAMES, i + 0.25)} for i in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, records), *lines]))
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def page_of(folder):
    assert main([str(folder)]) == 0
    return Read((folder / "report.html").read_text())


def test_it_shows_every_curve_and_loads_nothing(tmp_path):
    read = page_of(make_run(tmp_path / "run"))
    for text in (
        "Reward",
        "KL",
        "Entropy",
        "Clip fractions",
        "Mismatch",
        "Throughput",
        "Memory",
        "5 steps, 1 to 5",
    ):
        assert text in read.texts, text
    assert read.tags.count("svg") == len(NAMES)
    assert read.texts.count("not recorded in this run") == 9  # of the charts, samples and the mesh
    assert not {"script", "img", "link", "iframe"} & set(read.tags)
    assert read.loaded == []
    assert len(set(read.ids)) == len(read.ids)


def test_a_browser_runs_no_script_of_it_and_loads_nothing(tmp_path):
    run = make_run(
        tmp_path / "run", settings={"mesh": {"axes": {"dp": 1}, "devices": [0], "roles": {}}}
    )
    assert set(browser_rules(page_of(run))) == {
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "style-src-attr 'unsafe-inline'",
    }


def test_a_curve_that_never_changes_is_told_in_words(tmp_path):
    lines = [
        json.dumps({"step": i, "ratio_mean": 1.0, "skipped": 0, "reward": i}) for i in range(6, 9)
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    read = page_of(tmp_path / "run")
    assert read.tags.count("svg") == 1
    assert {"ratio_mean is 1 in every step", "skipped is 0 in every step"} <= {*read.texts}


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [
        ((1e-14, 1e-3, 1.0), True),
        ((0.5, 2.0, 3.0), False),
        ((-1e-9, 3e-9, 1e-4), True),
        ((-1.0, 2.0, 3.0), False),
    ],
)
def test_values_of_many_decades_have_a_log_axis(tmp_path, values, logarithmic):
    """A linear axis shows nothing of 1e-14 beside 1; a label of the log axis has its exponent
    raised.
    """
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"step": i, "mismatch_kl": x}) for i, x in enumerate(values)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    texts = "".join(page_of(tmp_path / "run").texts)
    assert ("\N{MINUS SIGN}11" in texts or "\N{MINUS SIGN}8" in texts) == logarithmic


def test_the_title_and_another_run_beside_it(tmp_path):
    settings = {"arguments": {"task": "gcd", "loss": "ppo", "mesh": None, "seed": 0, "prompts": 4}}
    run = make_run(tmp_path / "run", settings=settings)
    other = make_run(tmp_path / "other", steps=9)
    alone = page_of(run).texts
    assert "run: task gcd, loss ppo, seed 0" in alone
    assert main([str(run), "--beside", str(other)]) == 0
    read = Read((run / "report.html").read_text())
    assert "5 steps, 1 to 5; dotted curves are those of other" in read.texts
    assert (run / "report.html").read_text().count("stroke-dasharray") >= len(NAMES)
    assert main([str(run), "--beside", str(tmp_path / "none")]) == 2


def test_rewards_are_rounded(tmp_path):
    read = with_samples(
        tmp_path, json.dumps({"step": 1, "samples": [{"reward": 0.30000000000000004}]})
    )
    assert "0.3" in read.texts


def test_lines_that_are_torn_and_values_that_are_none(tmp_path):
    lines = [
        '{"step": 6, "reward": null, "kl": "much", "entropy": NaN}',
        '{"step": 7, "reward": 1e999, "kl": [1]}',
    ]
    lines += [
        '{"step": 8, "reward": 1' + "0" * 400 + "}",
        '{"step": 1' + "0" * 400 + ', "reward": 1}',
        '{"step": 9}',
    ]
    lines += [
        "null",
        '{"rew',
        '{"step": "x"}',
        "\x00",
        '{"step": 2, "reward": -1e299}',
        '{"step": 10, "rew',
    ]
    read = page_of(make_run(tmp_path, lines))
    assert "9 steps, 1 to 9; 5 lines of metrics.jsonl are no records" in read.texts
    assert "reward is no finite number in 3 steps: 6, 7, 8" in read.texts
    assert "kl is no finite number in 2 steps: 6, 7" in read.texts
    rows = {text: read.texts[i + 1 : i + 5] for i, text in enumerate(read.texts) if text in NAMES}
    assert rows["reward"] == ["1.25", "5.25", "-1e+299", "5.25"]
    assert rows["memory_gib"] == ["1.25", "5.25", "1.25", "5.25"]


def test_lists_beyond_all_depth_are_no_record(tmp_path):
    assert "1 lines of metrics.jsonl are no records" in " ".join(
        page_of(make_run(tmp_path, ["[" * 200_000])).texts
    )


def test_nothing_outside_the_run_is_written_through_a_link(tmp_path, capsys):
    make_run(tmp_path / "run")
    for name in ("report.html", "report.html.new"):
        (tmp_path / name).write_text("mine")
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    page_of(tmp_path / "run")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "events.out.tfevents.mine").write_text("mine")
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "events")
    assert main([str(tmp_path / "run")]) == 2
    assert "tensorboard, a link, expected" in capsys.readouterr().err
    names = ("report.html", "report.html.new", "events/events.out.tfevents.mine")
    assert {(tmp_path / name).read_text() for name in names} == {"mine"}


def test_a_run_without_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    read = page_of(tmp_path)
    assert "no step yet" in read.texts
    assert "settings.json is not there, or cannot be read" in read.texts


def test_text_is_no_markup(tmp_path):
    evil = "<script>$x_1$</script>&amp;\"'"
    mesh = {"axes": {evil: 1}, "devices": [evil], "roles": {evil: [evil]}, evil: evil}
    run = make_run(
        tmp_path / "a<b>&",
        [json.dumps({"step": 6, evil: 1.0, "_x": None})],
        {evil: {evil: evil}, "mesh": mesh},
    )
    read = page_of(run)
    assert "script" not in read.tags
    assert read.texts.count(evil) == 7
    assert "a<b>&" in read.texts
    assert "_x is no finite number in 1 steps: 6" in read.texts


def with_samples(folder, *lines):
    make_run(folder)
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return page_of(folder)


def test_samples_are_shown_and_are_no_markup(tmp_path):
    evil = "</pre><script>alert(1)</script>&amp;\"'"
    read = with_samples(
        tmp_path,
        json.dumps(
            {"step": 1, "samples": [{"prompt": evil, "completion": "a\n b", "reward": 0.25}]}
        ),
        json.dumps(
            {"step": 2, "samples": [{"prompt": "\ud800", "completion": evil, "reward": evil}]}
        ),
    )
    assert "script" not in read.tags
    assert read.texts.count(evil) == 3
    at = read.texts.index("0.25")
    assert read.texts[at - 1 : at + 3] == ["1", "0.25", evil, "a\n b"]
    assert "?" in read.texts  # half of a pair of UTF-16
    assert "a few of 2 of 2 steps; those of all are in samples.jsonl" in read.texts


def test_samples_of_a_long_run_are_of_steps_from_the_first_to_the_last(tmp_path):
    lines = [json.dumps({"step": i, "samples": [{"prompt": f"ask {i}"}]}) for i in range(1, 1001)]
    read = with_samples(tmp_path, *lines)
    asked = [text for text in read.texts if text.startswith("ask ")]
    assert len(asked) == 20
    assert (asked[0], asked[-1]) == ("ask 1", "ask 1000")


def test_lines_that_are_no_samples(tmp_path):
    lines = [
        "null",
        '{"step": 1, "samples": 5}',
        '{"step": 2, "samples": [null, [1], {}, {"reward": NaN}]}',
        '{"step":',
    ]
    read = with_samples(tmp_path, *lines)
    assert "a few of 1 of 1 steps; those of all are in samples.jsonl" in read.texts
    assert "NaN" in read.texts


OTHER_MESH = '{"mesh": {"axes": {"dp": 3}, "devices": [0], "roles": {}}}'


@pytest.mark.parametrize("text", ["", "[1]", "[" * 200_000, '{"mesh": 1}', OTHER_MESH])
def test_settings_that_cannot_be_read(tmp_path, text):
    make_run(tmp_path, steps=0)
    (tmp_path / "settings.json").write_text(text)
    assert page_of(tmp_path).texts.count("not recorded in this run") == 2 + len(CHARTS)


def test_devices_of_one_colour_hold_the_same(tmp_path):
    mesh = {
        "axes": {"dp": 2, "cp": 1, "tp": 2},
        "devices": [0, 2, 1, 3],
        "roles": {"data": ["dp"], "tensor": ["tp"]},
    }
    read = page_of(make_run(tmp_path, settings={"mesh": mesh}, steps=0))
    assert "devices of one colour hold the same part of the parameters, of 2" in read.texts
    page = (tmp_path / "report.html").read_text()
    cells = re.findall(r"<td style=.background: hsl\((\d+) [^>]*>(\d)</td>", page)
    assert [device for _, device in cells] == ["0", "2", "1", "3"]
    assert cells[0][0] == cells[2][0] != cells[1][0] == cells[3][0]


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_that_is_no_run(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name)]) == 2
    (error,) = said_by("examples.trainer.report", capsys)
    assert error.startswith(
        f"examples.trainer.report: error: run: got {tmp_path / name}, expected the --out folder of"
        " a run"
    )


def scalars(path):
    """{(tag, step): value} of a file of events, each between its length and two checksums."""
    data = path.read_bytes()
    found = {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    return found


def test_events_read_back_as_they_were_written(tmp_path):
    run = make_run(tmp_path, ['{"step": 6, "reward": null, "kl": 0.5}', '{"step'])
    for _ in range(2):  # the second report replaces the first one's events
        assert main([str(run)]) == 0
    (path,) = (run / "tensorboard").iterdir()
    expected = {(name, step): step + 0.25 for name in NAMES for step in range(1, 6)} | {
        ("kl", 6): 0.5
    }
    assert scalars(path) == expected


@pytest.mark.nightly
@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
def test_chromium_shows_it(tmp_path):
    run = make_run(tmp_path / "run", settings={"arguments": {"task": "gcd"}}, steps=40)
    assert main([str(run)]) == 0

    address = f"file://{run / 'report.html'}"
    read = Read(
        re.sub(
            r"<(path|use|rect)([^>]*)></\1>", r"<\1\2/>", chromium(tmp_path, address, "--dump-dom")
        )
    )
    assert read.tags.count("svg") == len(NAMES)
    assert {"Throughput", "GRPO step", "40 steps, 1 to 40", "gcd"} <= set(read.texts)
    chromium(tmp_path, address, f"--screenshot={tmp_path / 'page.png'}")
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    # matplotlib's first colour
    blue = np.abs(pixels - np.array([31, 119, 180]) / 255).max(axis=-1) < 0.1
    assert blue.any(axis=0).sum() > 600  # curves in both columns
    assert blue.any(axis=1).sum() > 400
