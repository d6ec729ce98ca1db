"""The example's models of the Llama kind: logits beside the definition's and transformers',
files, training.
"""

import json
import math
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_llama
import transformers_logits
from flax import nnx
from published_logits import logits_on
from safetensors.numpy import load_file, save_file

from examples.trainer import model_folder
from examples.trainer.arguments import parse
from examples.trainer.grpo_run import grpo_step, set_up, supervised
from examples.trainer.model_folder import FolderTokenizer
from examples.trainer.published import describe_model, load_model, read_config
from examples.trainer.train_grpo import main
from sharding import make_parallel_mesh
from sharding.axes import LAYOUTS
from sharding.testing import factorings

LENGTHS = (11, 6, 14)


def logits_by_definition(config, tensors, tokens):
    """[T, V] of one sequence, in float64: x + attention(norm(x)), x + mlp(norm(x)), a loop over
    heads and positions.
    """
    w = {
        name.removeprefix("model.").removesuffix(".weight"): np.float64(x)
        for name, x in tensors.items()
    }
    size = config["head_dim"]
    eps = config["rms_norm_eps"]
    theta = config["rope_theta"]
    share = config["num_attention_heads"] // config["num_key_value_heads"]

    def norm(x, scale):
        return scale * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    def turned(x, position):
        out = np.empty(size)
        for i in range(size // 2):
            z = complex(x[i], x[i + size // 2]) * np.exp(1j * position / theta ** (2 * i / size))
            out[i], out[i + size // 2] = z.real, z.imag
        return out

    x = w["embed_tokens"][tokens]
    for layer in range(config["num_hidden_layers"]):

        def at(name, layer=layer):
            return w[f"layers.{layer}.{name}"]

        y = norm(x, at("input_layernorm"))
        q, k, v = (y @ at(f"self_attn.{c}_proj").T for c in "qkv")
        mixed = np.empty_like(q)
        for head in range(config["num_attention_heads"]):
            here = slice(head * size, (head + 1) * size)
            shared = slice(head // share * size, (head // share + 1) * size)
            keys = [
                turned(norm(row, at("self_attn.k_norm")), t) for t, row in enumerate(k[:, shared])
            ]
            for t in range(len(tokens)):
                query = turned(norm(q[t, here], at("self_attn.q_norm")), t)
                scores = np.array([query @ key for key in keys[: t + 1]]) / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                mixed[t, here] = weights / weights.sum() @ v[: t + 1, shared]
        x = x + mixed @ at("self_attn.o_proj").T
        y = norm(x, at("post_attention_layernorm"))
        gate = y @ at("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    return norm(x, w["norm"]) @ w.get("lm_head", w["embed_tokens"]).T


def sequences():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, n) for n in LENGTHS]


def check_logits(folder, config, tensors, mesh, layout):
    for got, tokens in zip(logits_on(folder, mesh, sequences(), layout), sequences(), strict=True):
        np.testing.assert_allclose(
            got, logits_by_definition(config, tensors, tokens), rtol=0, atol=1e-5
        )


CASES = [("dp=2,cp=2,tp=2", "zigzag", 1, True), ("fsdp=4,cp=2", "contiguous", 3, False)]


@pytest.mark.parametrize(("mesh", "layout", "shards", "tied"), CASES)
def test_logits_are_those_of_the_definition(tmp_path, mesh, layout, shards, tied):
    config, tensors = tiny_llama.write(tmp_path, shards, tie_word_embeddings=tied)
    check_logits(tmp_path, config, tensors, mesh, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mesh", [mesh for mesh in factorings(8) if "tp=1" in mesh or "tp=2" in mesh]
)
def test_logits_on_any_mesh_and_layout(tmp_path, mesh, layout):
    config, tensors = tiny_llama.write(tmp_path)
    check_logits(tmp_path, config, tensors, mesh, layout)


RECORDED = Path(__file__).parents[1] / "golden" / "llama.npz"


@pytest.mark.parametrize(
    "mesh", ["dp=2,cp=2,tp=2", pytest.param("dp=1,cp=8", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", transformers_logits.MODELS)
def test_logits_are_those_of_transformers(tmp_path, name, mesh):
    """Llama, Qwen 2 and Qwen 3, tied or not, with biases, norms and slowed rotations, of
    recorded random models.
    """
    tiny_llama.write(tmp_path, **transformers_logits.MODELS[name])
    got = np.concatenate(logits_on(tmp_path, mesh, transformers_logits.sequences()))
    with np.load(RECORDED) as recorded:
        want = recorded[name]
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(got[:, transformers_logits.COLUMNS], want, rtol=0, atol=1e-5)


# hidden_size, intermediate_size, layers, heads, tied, and how many parameters
SIZES = {
    "0.6b": (1024, 3072, 28, 16, True, 596_049_920),
    "1.7b": (2048, 6144, 28, 16, True, 1_720_574_976),
    "4b": (2560, 9728, 36, 32, True, 4_022_468_096),
    "8b": (4096, 12288, 36, 32, False, 8_190_735_360),
    "14b": (5120, 17408, 40, 40, False, 14_768_307_200),
    "32b": (5120, 25600, 64, 64, False, 32_762_123_264),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n != "0.6b")) for n in SIZES]
)
def test_published_sizes_have_their_number_of_parameters_and_lie_on_a_mesh(tmp_path, name):
    width, mlp, layers, heads, tied, count = SIZES[name]
    sizes = {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    sizes |= {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }
    (tmp_path / "config.json").write_text(json.dumps({**tiny_llama.CONFIG, **sizes}))
    parallel = make_parallel_mesh("fsdp=4,tp=2")
    _, abstract = describe_model(read_config(tmp_path), parallel)
    leaves = jax.tree.leaves(abstract)
    assert sum(leaf.size for leaf in leaves) == count
    shardings = jax.tree.leaves(jax.tree.map(parallel.sharding, nnx.get_partition_spec(abstract)))
    held = sum(
        math.prod(s.shard_shape(leaf.shape)) for leaf, s in zip(leaves, shardings, strict=True)
    )
    vectors = sum(leaf.size for leaf in leaves if leaf.ndim == 1)  # every device holds those
    assert held == (count - vectors) / 8 + vectors


def test_bfloat16_is_rounded_and_no_more(tmp_path):
    config, _ = tiny_llama.write(tmp_path, dtype=tiny_llama.BFLOAT16, tie_word_embeddings=False)
    stored = {
        name: x.astype(np.float64) for name, x in load_file(tmp_path / "model.safetensors").items()
    }
    got = np.concatenate(logits_on(tmp_path, "dp=4,tp=2", sequences()))
    want = np.concatenate([logits_by_definition(config, stored, tokens) for tokens in sequences()])
    # about twenty roundings by 2^-9 of numbers of about 1, one after the other
    assert 1e-4 < np.sqrt(np.mean((got - want) ** 2)) < 20**0.5 * 2**-9


def test_each_device_reads_its_part_alone(tmp_path, monkeypatch):
    tiny_llama.write(tmp_path, shards=2)
    read = []

    class Recorded:
        def __init__(self, tensor):
            self.tensor = tensor

        def __getattr__(self, name):
            return getattr(self.tensor, name)

        def __getitem__(self, index):
            found = self.tensor[index]
            read.append(found.size / math.prod(self.tensor.get_shape()))
            return found

    opened = model_folder._open

    class Opened:
        def __init__(self, path):
            self.file = opened(path)
            self.keys = self.file.keys

        def get_slice(self, name):
            return Recorded(self.file.get_slice(name))

    monkeypatch.setattr(model_folder, "_open", Opened)
    parallel = make_parallel_mesh("fsdp=4,tp=2")
    _, params = load_model(tmp_path, read_config(tmp_path), parallel)
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    assert all(shard.data.size == x.size // 8 for x in kernels for shard in x.addressable_shards)
    vectors = len(jax.tree.leaves(params)) - len(kernels)
    assert sorted(read) == [1 / 8] * 8 * len(kernels) + [1] * vectors


TINY = [
    "--prompts",
    "4",
    "--samples",
    "4",
    "--held-out",
    "16",
    "--sft-steps",
    "2",
    "--learning-rate",
    "0.005",
]
TINY += ["--task", "gcd", "--updates", "1"]


@pytest.mark.nightly
def test_it_trains_in_the_loop(tmp_path):
    model = tmp_path / "model"
    tiny_llama.write(model, shards=2, num_hidden_layers=1)
    args = parse([*TINY, "--model", str(model), "--out", str(tmp_path / "run")])
    run = set_up(args)
    before = jax.device_get(run.state.params)
    prompt = run.task.held_out[0].prompt
    text = run.task.tokenizer._tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nFind the Greatest Common Divisor")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    supervised(run, args)
    for numbers in (grpo_step(run, args) for _ in range(2)):
        assert all(np.isfinite(value) for value in numbers.values())
        assert numbers["skipped"] == 0
        # the cache of the sampler, and rows that are packed
        assert numbers["mismatch_log_prob_abs_diff"] < 1e-5
    for (path, x), y in zip(
        jax.tree.leaves_with_path(before), jax.tree.leaves(run.state.params), strict=True
    ):
        assert np.abs(x - jax.device_get(y)).max() > 1e-4, path
    assert run.learner.model.vocab_size == 261 < run.learner.model.padded_vocab


def config_with(**settings):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return change


def tensors_with(change_of):
    def change(folder):
        path = folder / "model.safetensors"
        found = load_file(path)
        change_of(found)
        save_file(found, path)

    return change


def without(name):
    def change(folder):
        (folder / name).unlink()

    return change


def written(name, content):
    def change(folder):
        (folder / name).write_bytes(content)

    return change


def cut(name):
    def change(folder):
        os.truncate(folder / name, (folder / name).stat().st_size - 10)

    return change


def other_index(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {
        "weight_map": {
            "model.norm.weight": "part.safetensors",
            "model.more.weight": "part.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def absent_part(folder):
    index = {"weight_map": {"model.norm.weight": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def indexed(name):
    def change(folder):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.norm.weight": name}})
        )

    return change


def header(text, length=None):
    """A safetensors file that begins with this header, said to be so long."""
    start = (len(text) if length is None else length).to_bytes(8, "little")
    return written("model.safetensors", start + text + bytes(8))


def without_keys(found):
    del found[K]


def with_more(found):
    found["model.layers.1.more.weight"] = found[K]


def with_integers(found):
    found[K] = found[K].astype(np.int8)


def weight(value):
    def change(found):
        found[K][3, 5] = value

    return tensors_with(change)


K = "model.layers.1.self_attn.k_proj.weight"
BOUNDS = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}
BOUNDS |= {"original_max_position_embeddings": 8192}
BAD = {
    "no folder": (shutil.rmtree, "without a readable config.json"),
    "no config": (
        without("config.json"),
        "without a readable config.json (No such file",
    ),
    "torn config": (cut("config.json"), "config.json, expected JSON"),
    "list": (written("config.json", b"[]"), "with a list, expected a JSON object"),
    "gemma": (config_with(model_type="gemma3"), "got model_type 'gemma3' in"),
    "no type": (config_with(model_type=None), "got model_type None in"),
    "yarn": (config_with(rope_scaling={"type": "yarn"}), "got rope_scaling {'type': 'yarn'} in"),
    "no factor": (config_with(rope_scaling={"type": "linear"}), "got factor None in"),
    "text as rope": (config_with(rope_scaling="linear"), "got rope_scaling 'linear' in"),
    "rope bounds": (config_with(rope_scaling=BOUNDS), "got high_freq_factor 1.0 in"),
    "norms": (
        config_with(model_type="llama"),
        "self_attn.k_norm.weight and 1 more, which the model of config.json",
    ),
    "half a head": (config_with(partial_rotary_factor=0.5), "got partial_rotary_factor 0.5 in"),
    "bias of a text": (config_with(attention_bias="yes"), "got attention_bias 'yes' in"),
    "rope": (
        config_with(rope_parameters={"rope_type": "yarn"}),
        "got rope_parameters {'rope_type': 'yarn'}",
    ),
    "window": (
        config_with(layer_types=["sliding_attention"]),
        "got layer_types ['sliding_attention']",
    ),
    "width": (config_with(hidden_size=None), "got hidden_size None in"),
    "text": (config_with(num_hidden_layers="2"), "got num_hidden_layers '2' in"),
    "groups": (config_with(num_key_value_heads=3), "got num_key_value_heads 3 in"),
    "dtype": (config_with(torch_dtype="float8"), "got torch_dtype 'float8' in"),
    "short": (config_with(max_position_embeddings=20), "got max_position_embeddings 20, expected"),
    "no end": (config_with(eos_token_id=None), "got eos_token_id None in"),
    "no ends": (config_with(eos_token_id=[]), "got eos_token_id [] in"),
    "ends of texts": (
        config_with(eos_token_id=["<|im_end|>"]),
        "got eos_token_id ['<|im_end|>'] in",
    ),
    "strange end": (
        config_with(eos_token_id=270),
        "got eos_token_id 270, expected the id of a token in",
    ),
    "one strange end": (
        config_with(eos_token_id=[257, 270]),
        "got eos_token_id 270, expected the id of a token in",
    ),
    "vocabulary": (
        config_with(vocab_size=256),
        "got vocab_size 256 in config.json, expected the 261 ids of",
    ),
    "no tokenizer": (without("tokenizer.json"), "without tokenizer.json"),
    "torn tokenizer": (
        cut("tokenizer.json"),
        "tokenizer.json, expected what the tokenizers library reads",
    ),
    "no tensors": (without("model.safetensors"), "expected model.safetensors or"),
    "torn tensors": (
        cut("model.safetensors"),
        "model.safetensors, expected a whole safetensors file",
    ),
    "index": (other_index, "part.safetensors without model.more.weight, which"),
    "absent part": (
        absent_part,
        "without part.safetensors, which model.safetensors.index.json names",
    ),
    "missing": (
        tensors_with(without_keys),
        f"got no tensor {K}, which config.json asks for",
    ),
    "more layers": (
        config_with(num_hidden_layers=3),
        "got num_hidden_layers 3 in config.json, expected 2",
    ),
    "fewer layers": (
        config_with(num_hidden_layers=1),
        "got num_hidden_layers 1 in config.json, expected 2",
    ),
    "a hundred thousand layers": (
        config_with(num_hidden_layers=100_000),
        "expected 2, the layers of the tensors",
    ),
    "a layer by another name": (
        tensors_with(with_more),
        "got tensors model.layers.1.more.weight, which the model of config.json does not have",
    ),
    "a width beyond memory": (
        config_with(hidden_size=2**31 - 1),
        "embed_tokens.weight of shape [272, 24], expected",
    ),
    "a vocabulary beyond memory": (config_with(vocab_size=2**31 - 1), "expected [2147483647, 24]"),
    "heads beyond memory": (
        config_with(num_attention_heads=2**30),
        "of shape [24, 32], expected [24, 8589934592]",
    ),
    "a width beyond numbers": (
        config_with(intermediate_size=10**30),
        "got intermediate_size 10000000000",
    ),
    "an infinite theta": (config_with(rope_theta=math.inf), "got rope_theta inf in"),
    "an end beyond numbers": (config_with(eos_token_id=2**40), "got eos_token_id 1099511627776 in"),
    "a tie of text": (config_with(tie_word_embeddings="no"), "got tie_word_embeddings 'no' in"),
    "layer types that are a number": (config_with(layer_types=5), "got layer_types 5 in"),
    "layer types of objects": (config_with(layer_types=[{}]), "got layer_types [{}] in"),
    "a deep config": (
        written("config.json", b"[" * 100_000),
        "config.json with lists in lists beyond all depth, expected JSON",
    ),
    "bytes in config": (written("config.json", b"\xff{}"), "config.json, expected JSON"),
    "an index of elsewhere": (
        indexed("../other/model.safetensors"),
        "got '../other/model.safetensors' for",
    ),
    "an index of a whole path": (
        indexed("/etc/model.safetensors"),
        "got '/etc/model.safetensors' for",
    ),
    "an index of the folder": (indexed(".."), "got '..' for model.norm.weight in"),
    "an index of numbers": (indexed(5), "got 5 for model.norm.weight in"),
    "an index of no text": (indexed("a\0.safetensors"), "which model.safetensors.index.json names"),
    "a header beyond the file": (
        header(b"{}", 2**60),
        "model.safetensors, expected a whole safetensors file",
    ),
    "a header of no JSON": (
        header(b"{" * 100),
        "model.safetensors, expected a whole safetensors file",
    ),
    "a deep header": (
        header(b'{"a":' * 10_000),
        "model.safetensors, expected a whole safetensors file",
    ),
    "a header of other sizes": (
        header(
            b'{"model.norm.weight": {"dtype": "F32", "shape": [999999999999], "data_offsets": [0,'
            b" 8]}}"
        ),
        "model.safetensors, expected a whole safetensors file",
    ),
    "a weight of NaN": (weight(math.nan), f"got nan in {K}, expected finite weights"),
    "an infinite weight": (weight(-math.inf), f"got -inf in {K}, expected finite weights"),
    "misshapen": (
        config_with(intermediate_size=40),
        "mlp.down_proj.weight of shape [24, 32], expected [24, 40]",
    ),
    "integers": (
        tensors_with(with_integers),
        f"got {K} in I8, expected one of BF16, F16, F32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_end_in_one_line_and_exit_code_2(tmp_path, capsys, name):
    change, message = BAD[name]
    folder = tmp_path / "model"
    tiny_llama.write(folder)
    change(folder)
    assert main([*TINY, "--model", str(folder), "--out", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("train_grpo.py: error: --model: got ")
    assert message in errors[0]


def test_meshes_that_do_not_divide_the_model(tmp_path):
    tiny_llama.write(tmp_path)
    config = read_config(tmp_path)
    with pytest.raises(
        ValueError, match="mesh: got 4 tensor shards, expected a divisor of the 2 key-value heads"
    ):
        load_model(tmp_path, config, make_parallel_mesh("dp=2,tp=4"))
    tiny_llama.write(tmp_path / "wide", hidden_size=28)
    with pytest.raises(
        ValueError, match=r"mesh: got .*'fsdp': 8.*, expected sizes that divide model.embed_tokens"
    ):
        load_model(tmp_path / "wide", read_config(tmp_path / "wide"), make_parallel_mesh("fsdp=8"))


def tokenizer_of(folder, worked=()):
    return FolderTokenizer(folder, read_config(folder).ends, worked)


def asked(folder, worked=()):
    tokenizer = tokenizer_of(folder, worked)
    return tokenizer._tokenizer.decode(
        tokenizer.encode_question("2 + 2 = ä?"), skip_special_tokens=False
    )


def test_a_base_models_end_of_text_asks_plainly_and_says_so(tmp_path, capsys):
    tiny_llama.write(tmp_path, eos_token_id=256)
    assert asked(tmp_path) == "2 + 2 = ä?\n"
    told = capsys.readouterr().out
    assert told.endswith(
        "tokenizer_config.json is not used: no answer in it ends with <|endoftext|>\n"
    )
    assert asked(tmp_path, [("1 + 1 = ?", "2")]) == "1 + 1 = ?\n2\n2 + 2 = ä?\n"


@pytest.mark.parametrize(("here", "there"), [([256, 257], None), (256, [257, 256]), ([256], 257)])
def test_several_ends_are_a_set_and_the_template_says_which_ends_an_answer(tmp_path, here, there):
    """The first one was taken, and then the template, which ends turns with another, was
    dropped.
    """
    tiny_llama.write(tmp_path, eos_token_id=here)
    if there is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": there}))
    tokenizer = tokenizer_of(tmp_path)
    assert (tokenizer.ends, tokenizer.end) == ((256, 257), 257)
    assert asked(tmp_path).startswith("<|im_start|>user\n2 + 2 = ä?<|im_end|>")


def test_worked_questions_are_turns_before_the_question(tmp_path):
    tiny_llama.write(tmp_path)
    turns = "<|im_start|>user\n1 + 1 = ?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert asked(tmp_path, [("1 + 1 = ?", "2")]) == turns + asked(tmp_path)


def test_questions_are_asked_by_the_template_of_the_folder(tmp_path):
    """That of tokenizer_config.json, one or several by name, or that of chat_template.jinja; or
    none.
    """
    tiny_llama.write(tmp_path)
    as_turn = (
        "<|im_start|>user\n2 + 2 = ä?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert asked(tmp_path) == as_turn
    config = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": tiny_llama.TEMPLATE},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert asked(tmp_path) == as_turn
    other = "{% for m in messages %}Q: {{ m.content }}{{ eos_token }}A:{% endfor %}"
    config.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "chat_template.jinja").write_text(other)
    assert asked(tmp_path) == "Q: 2 + 2 = ä?<|im_end|>A:"
    (tmp_path / "chat_template.jinja").unlink()
    config.unlink()
    assert asked(tmp_path) == "2 + 2 = ä?\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages[7].content }}",
        "{{ raise_exception('no user') }}",
        "{{ ''.__class__.mro() }}",
    ],
)
def test_a_template_that_does_not_render_is_refused(tmp_path, template):
    tiny_llama.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(
        ValueError,
        match=r"--model: got a chat template in .*chat_template.jinja that does not render",
    ):
        asked(tmp_path)
