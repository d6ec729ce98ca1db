"""Gemma 3 in the example: logits beside transformers' recorded ones, its window in trainer and
sampler, its files.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_llama
import tokenizers
import transformers_logits
from flax import nnx
from published_logits import logits_on

from examples.real import larger
from examples.trainer.arguments import LORA_TARGETS, parse
from examples.trainer.attention import attention
from examples.trainer.grpo_run import grpo_step, set_up
from examples.trainer.lora import LoraConfig, add_adapters
from examples.trainer.model_folder import FolderTokenizer
from examples.trainer.published import describe_model, load_model, read_config
from examples.trainer.sampler import make_sampler
from jaxppo import make_parallel_mesh
from jaxppo.batch.trees import Paths

RECORDED = Path(__file__).parents[1] / "golden" / "gemma.npz"
WINDOW = tiny_llama.GEMMA["sliding_window"]


def recorded(name):
    with np.load(RECORDED) as found:
        return found[name]


@pytest.mark.parametrize("mesh", ["fsdp=4,cp=2", pytest.param("dp=8", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", transformers_logits.GEMMAS)
def test_logits_are_those_of_transformers(tmp_path, name, mesh):
    """The longest sequence has 30 tokens, and the window 5."""
    tiny_llama.write(tmp_path, **transformers_logits.GEMMAS[name])
    got = np.concatenate(logits_on(tmp_path, mesh, transformers_logits.sequences(), "zigzag"))
    want = recorded(name)
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(got[:, transformers_logits.COLUMNS], want, rtol=0, atol=1e-5)


def test_without_the_window_logits_are_others_from_its_end_on(tmp_path):
    tiny_llama.write(tmp_path, **tiny_llama.GEMMA | {"sliding_window": 64})
    *_, got = logits_on(tmp_path, "dp=8", transformers_logits.sequences())
    error = np.abs(got[:, transformers_logits.COLUMNS] - recorded("gemma3")[-30:]).max(axis=-1)
    assert error[:WINDOW].max() < 1e-5
    assert error[WINDOW:].min() > 1e-3


def test_a_token_sees_a_window_of_its_own_path():
    """By a loop over the queries, in float64; the scale of scores is given."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 12, 2, 4)).astype(np.float32)
    segments = np.array([1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0])
    positions = np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1])
    order = rng.permutation(12)
    paths = Paths(jnp.asarray(segments[order][None]), jnp.asarray(positions[order][None]))
    given = (jnp.asarray(x[:, order]) for x in (q, k, v))
    got = np.asarray(attention(*given, paths, paths, window=3, scale=0.7))[:, np.argsort(order)]
    for i in range(10):
        seen = [
            j
            for j in range(10)
            if segments[j] == segments[i] and positions[i] - 3 < positions[j] <= positions[i]
        ]
        for head in range(2):
            scores = 0.7 * np.float64(k[0, seen, head]) @ q[0, i, head]
            weights = np.exp(scores - scores.max())
            want = weights / weights.sum() @ v[0, seen, head]
            np.testing.assert_allclose(got[0, i, head], want, rtol=0, atol=2e-6)


def test_a_cached_sampler_has_the_log_probs_of_the_whole_sequence(tmp_path):
    """Prompts and responses are both longer than the window."""
    tiny_llama.write(tmp_path, **tiny_llama.GEMMA)
    parallel = make_parallel_mesh("dp=8")
    sizes = read_config(tmp_path).with_tokens(261, 64)
    graphdef, params = load_model(tmp_path, sizes, parallel)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (8, 9)).astype(np.int32)
    prompts[:, :6] = prompts[0, :6]
    lengths = rng.integers(7, 10, 8).astype(np.int32)
    sample = make_sampler(graphdef, sizes, parallel, 9, 12, ends=(257,), common=6)
    got = jax.device_get(sample((params,), prompts, lengths, jax.random.key(0), np.float32(1), 1))
    assert got.mask.sum(axis=1).max() > 2 * WINDOW
    sequences = [[*prompts[i, :n], *got.tokens[i][got.mask[i]]] for i, n in enumerate(lengths)]
    for i, logits in enumerate(logits_on(tmp_path, "dp=8", sequences)):
        z = np.float64(logits[lengths[i] - 1 : -1, : sizes.vocab_size])
        shifted = z - z.max(axis=-1, keepdims=True)
        log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        chosen = got.tokens[i][got.mask[i]]
        want = np.take_along_axis(log_probs, chosen[:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(got.log_probs[i][got.mask[i]], want, rtol=0, atol=1e-5)


def test_embeddings_are_multiplied_in_the_dtype_of_the_model(tmp_path):
    """sqrt(24) is 4.898979, and in bfloat16 4.90625."""
    _, tensors = tiny_llama.write(tmp_path, dtype=tiny_llama.BFLOAT16, **tiny_llama.GEMMA)
    parallel = make_parallel_mesh("dp=8")
    graphdef, params = load_model(tmp_path, read_config(tmp_path), parallel)
    tokens = jnp.arange(256)[None]
    got = jax.jit(lambda params: nnx.merge(graphdef, params).embed(tokens))(params)
    embedding = tensors["model.embed_tokens.weight"][:256].astype(ml_dtypes.bfloat16)
    want = (embedding.astype(np.float32) * np.float32(4.90625)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(got)[0], want)


# hidden_size, intermediate_size, layers, heads, and how many parameters
SIZES = {"270m": (640, 2048, 18, 4, 268_098_176), "1b": (1152, 6912, 26, 4, 999_885_952)}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n != "270m")) for n in SIZES]
)
def test_published_sizes_have_their_number_of_parameters(tmp_path, name):
    width, mlp, layers, heads, count = SIZES[name]
    sizes = {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    sizes |= {
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "query_pre_attn_scalar": 256,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_llama.CONFIG, **tiny_llama.GEMMA, **sizes})
    )
    config = read_config(tmp_path)
    assert [i + 1 for i in range(config.layers) if not config.is_local(i)] == list(
        range(6, layers + 1, 6)
    )
    _, abstract = describe_model(config, make_parallel_mesh("dp=8"))
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == count


REFUSED = {
    "final_logit_softcapping": (30.0, "expected None"),
    "attn_logit_softcapping": (50.0, "expected None"),
    "use_bidirectional_attention": (True, "expected False"),
    "hidden_activation": ("gelu", "expected 'gelu_pytorch_tanh'"),
    "tie_word_embeddings": (False, "expected True"),
    "attention_bias": (True, "expected False"),
    "sliding_window": (None, "expected an integer"),
    "sliding_window_pattern": (0, "expected a number above 0"),
    "query_pre_attn_scalar": (-1, "expected a number above 0"),
    "rope_local_base_freq": ("10000", "expected a number above 0"),
    "layer_types": (["full_attention"], "one for each of the num_hidden_layers"),
    "rope_parameters": (
        {"full_attention": {"rope_theta": 1e6}},
        "expected those of 'sliding_attention' and of",
    ),
    "model_type": ("gemma3", "expected one of llama, qwen2, qwen3, gemma3_text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_other_models_are_refused_by_name(tmp_path, name):
    value, message = REFUSED[name]
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_llama.CONFIG, **tiny_llama.GEMMA, name: value})
    )
    with pytest.raises(ValueError, match=f"--model: got {name} ") as raised:
        read_config(tmp_path)
    assert message in str(raised.value)


def test_layers_of_another_kind_are_refused(tmp_path):
    kinds = ["chunked_attention"] * 6
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_llama.CONFIG, **tiny_llama.GEMMA, "layer_types": kinds})
    )
    with pytest.raises(
        ValueError, match=r"got layer_types \['chunked_attention'\] in .*'sliding_attention'"
    ):
        read_config(tmp_path)


def test_what_a_file_of_gemma_does_not_say(tmp_path):
    """The published files of 270M and 1B say neither that the head is tied nor, some of them,
    the pattern.
    """
    said = {**tiny_llama.CONFIG, **tiny_llama.GEMMA}
    for name in (
        "tie_word_embeddings",
        "sliding_window_pattern",
        "rope_theta",
        "rope_local_base_freq",
        "rope_scaling",
    ):
        said.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = read_config(tmp_path)
    assert (config.tied, config.pattern) == (True, 6)
    assert (config.local_rope.theta, config.global_rope.theta) == (1e4, 1e6)


TURNS = """{{ bos_token }}{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' + message.content }}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}"""


def test_a_tokenizer_of_scores_and_its_set_of_stop_ids(tmp_path):
    """As SentencePiece does: the pieces whose log-probabilities have the largest sum, unknown
    characters as bytes.
    """
    pieces = [
        ("<eos>", 0.0),
        ("<bos>", 0.0),
        ("<unk>", 0.0),
        ("▁a", -2.0),
        ("b", -4.0),
        ("ab", -5.0),
        ("▁", -3.0),
    ]
    pieces += [("▁ab", -5.5), ("a", -3.0)] + [(f"<0x{i:02X}>", -20.0) for i in range(256)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2, byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": TURNS, "bos_token": "<bos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    end_of_turn = made.token_to_id("<end_of_turn>")
    tokenizer = FolderTokenizer(tmp_path, [0, end_of_turn], [("a", "b")])
    assert (tokenizer.ends, tokenizer.end) == ((0, end_of_turn), end_of_turn)
    assert tokenizer.encode(" ab") == [7]  # -5.5, for -6 of "▁a" and "b"
    assert tokenizer.encode("ab ") == [5, 6]  # -8, for -10 of "a", "b" and "▁"
    assert tokenizer.encode("ä") == [9 + 0xC3, 9 + 0xA4]
    assert tokenizer.decode([7, 9 + 0xC3, 9 + 0xA4, end_of_turn]) == " abä"
    asked = tokenizer._tokenizer.decode(tokenizer.encode_question("ab"), skip_special_tokens=False)
    turns = "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    assert asked == f"<bos>{turns}<start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"


RUN = [
    "--task",
    larger.__file__,
    "--prompts",
    "4",
    "--samples",
    "4",
    "--held-out",
    "16",
    "--sft-steps",
    "0",
]
RUN += [
    "--updates",
    "1",
    "--share-prefixes",
    "--entropy-coef",
    "0.5",
    "--devices",
    "1",
    "--learning-rate",
    "0.01",
]


@pytest.mark.nightly
@pytest.mark.parametrize("lora", [[], ["--lora-rank", "2"]])
def test_it_trains_in_the_loop(tmp_path, lora):
    model = tmp_path / "model"
    tiny_llama.write(model, **tiny_llama.GEMMA)
    args = parse([*RUN, *lora, "--model", str(model), "--out", str(tmp_path / "run")])
    run = set_up(args)
    before = jax.device_get(run.state.params)
    for numbers in (grpo_step(run, args) for _ in range(2)):
        assert np.isfinite(list(numbers.values())).all()
        assert numbers["skipped"] == 0
        assert numbers["mismatch_log_prob_abs_diff"] < 1e-5
    for (path, x), y in zip(
        jax.tree.leaves_with_path(before), jax.tree.leaves(run.state.params), strict=True
    ):
        assert np.abs(x - jax.device_get(y)).max() > 1e-4, path


def test_every_layer_can_have_adapters(tmp_path):
    tiny_llama.write(tmp_path, **tiny_llama.GEMMA)
    parallel = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    config = read_config(tmp_path)
    graphdef, params = load_model(tmp_path, config, parallel)
    lora = LoraConfig(rank=2, alpha=2.0, targets=LORA_TARGETS, layers=4)
    _, adapters = add_adapters(graphdef, params, config, lora, parallel, seed=0)
    assert len(jax.tree.leaves(adapters)) == 2 * 7 * 4
