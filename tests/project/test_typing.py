"""What mypy and basedpyright report for a user's file, with jaxppo installed."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from installed import ROOT, run, with_jaxppo

USER = ROOT / "tests" / "support" / "typed_user.py"

# One mistake a line. Both must report each.
WRONG = """
policy_loss(stats, batch, config, normaliser=None)
policy_loss(stats, batch, config, temperature=0.7)
policy_loss_from_hidden(hidden, head, batch, config, tempreature=0.7)
policy_loss_from_hidden(hidden, head, batch, config, 1.0)
policy_loss_from_hidden(hidden, head, config, batch)
finalize_metrics(policy_loss_from_hidden(hidden, head, batch, config))
stats.log_prob
log_probs_from_hidden(hidden, head, targets, entropy="bonuss")
PolicyLossConfig(loss="ppo")
PolicyLossConfig(jaxppo.PPPO())
PolicyLossConfig(aggregation="token-mean")
PolicyLossConfig(kl=0.01)
PolicyLossConfig(clip_high=0.28)
PPO(clip=0.2)
GSPO(gradient="tokens")
KL(0.01, "k4")
OffPolicyConfig(weights="tokens")
Rejection("token_k4")
Head(kernel, layout="VH")
LoRA(kernel)
RolloutBatch.from_samples(samples)
RolloutBatch.from_padded(ids, ids, mask, advantage=values)
RolloutBatch.from_token_aligned(ids, ids, ids, mask, rewards="none")
RolloutBatch.from_samples([{"tokens": [1, 2]}], row_length=8)
ParallelMesh("dp=8")
accumulate_gradients(lambda params: 0.0, batch)
Normalizer.of("mean", batch)
jaxppo.loss_from_stats(stats, batch, jaxppo.Value())
finalize_metrics(stats)
presets.grppo()
Segments().all()
"""
# No mistakes here.
RIGHT = """
policy_loss(stats, batch, config, normalizer=None)
policy_loss_from_hidden(hidden, kernel, batch, config, temperature=0.7)
PolicyLossConfig(loss=PPO(), kl=KL(0.01, "k3"), aggregation="token_mean")
RolloutBatch.from_padded(ids, ids, mask, advantages=values)
"""
HEADER = """
import jax
import jaxppo
from jaxppo import (
    GSPO, KL, PPO, Head, LoRA, Normalizer, OffPolicyConfig, ParallelMesh, PolicyLossConfig, Rejection, RolloutBatch,
    Sample, TokenStats, accumulate_gradients, finalize_metrics, log_probs_from_hidden, policy_loss,
    policy_loss_from_hidden, presets
)
from jaxppo.sharding import Segments

def use(
    hidden: jax.Array, kernel: jax.Array, head: Head, ids: jax.Array, mask: jax.Array, values: jax.Array,
    targets: jax.Array, stats: TokenStats, batch: RolloutBatch, config: PolicyLossConfig, samples: list[Sample],
) -> None:
"""


@pytest.fixture(
    scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.nightly)]
)
def python(request, built, tmp_path_factory):
    return with_jaxppo(tmp_path_factory.mktemp("typed") / "venv", built[1], request.param)


@pytest.fixture
def project(tmp_path):
    shutil.copy(USER, tmp_path)
    return tmp_path


def mypy(python, folder, *files):
    """(file, line) of all that mypy, strict, objects to, and what it says.

    JAX leaves some functions untyped.
    """
    options = [
        "--strict",
        "--untyped-calls-exclude=jax",
        "--cache-dir=/dev/null",
        "--python-executable",
        python,
    ]
    options += ["--config-file="]  # none, or mypy takes that of a folder above
    done = run(sys.executable, "-m", "mypy", *options, "-O", "json", *files, cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(x["file"], x["line"]) for x in found if x["severity"] == "error"}, done.stdout


def basedpyright(python, folder, *files):
    """The same with basedpyright, strict; many of JAX's own functions have arguments whose type
    it does not know.
    """
    rules = {"include": files, "typeCheckingMode": "strict", "reportUnknownMemberType": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(rules))
    done = run(
        sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python, cwd=folder
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files), done.stdout
    found = [x for x in report["generalDiagnostics"] if x["severity"] in ("error", "warning")]
    return {(Path(x["file"]).name, x["range"]["start"]["line"] + 1) for x in found}, done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("check", [mypy, pytest.param(basedpyright, marks=pytest.mark.nightly)])
def test_a_users_file_is_clean_and_mistakes_are_reported(python, project, check):
    wrong = WRONG.strip().splitlines()
    lines = [f"    {line}" for line in wrong + RIGHT.strip().splitlines()]
    (project / "wrong.py").write_text(HEADER + "\n".join(lines) + "\n")
    found, said = check(python, project, USER.name, "wrong.py")
    assert [x for x in found if x[0] == USER.name] == [], said
    reported = {line - len(HEADER.splitlines()) - 1 for file, line in found if file == "wrong.py"}
    assert [line for i, line in enumerate(wrong) if i not in reported] == []
    assert reported <= set(range(len(wrong))), said


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sharding.py", "sharding/__init__.py"])
def test_mypy_is_clean_in_a_project_with_a_module_named_sharding(python, project, name):
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("mine: int = 1\n")
    text = USER.read_text().replace(
        "import jaxppo\n", "import jaxppo\nimport sharding\nassert sharding.mine\n", 1
    )
    (project / USER.name).write_text(text)
    found, said = mypy(python, project, USER.name)
    assert not found, said
