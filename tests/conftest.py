"""Eight emulated CPU devices for every test, and the options of the test run."""

import gc
import os
import random

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from collections import Counter
from pathlib import Path

import comparisons
import hypothesis
import installed
import jax
import jax.numpy as jnp
import programs
import pytest

programs.start_devices(8)
comparisons.forbid_silent_nan()
STRICT = {
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_legacy_prng_key": "error",
}
JAX_AS_IT_COMES = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
JAX_AS_IT_COMES |= {"jax_legacy_prng_key": "allow"}
OPTAX = "optax raises a float to a power that is an array of integers"
TUNIX = "Tunix multiplies positions, masks and logits of other dtypes and ranks"
# modules or single tests that run other packages' code, which promotes dtypes; and the reason
EXCUSED = {
    "test_adapters::test_adapters_alone_learn_are_saved_and_are_loaded": OPTAX,
    "test_example": OPTAX,
    "test_faults": OPTAX,
    "test_frameworks": f"{OPTAX}; flax adds bf16 to f32",
    "test_agent::test_a_step_of_the_example": OPTAX,
    "test_gemma::test_it_trains_in_the_loop": OPTAX,
    "test_grpo": OPTAX,
    "test_tutorials": OPTAX,
    "test_guards": OPTAX,
    "test_models_and_packing::test_the_examples_of_frameworks": "flax adds bf16 to f32",
    "test_launch": OPTAX,
    "test_real_model": OPTAX,
    "test_tokens_page": OPTAX,
    "test_own_loop::test_a_loop_with_an_optimiser": OPTAX,
    "test_pods::test_a_scheduler_starts_one_command_again_until_it_is_done": OPTAX,
    "test_simply": "simply adds arrays of other ranks and dtypes",
    "test_tunix": TUNIX,
    "test_tunix_agentic": TUNIX,
    "test_tunix_experimental": TUNIX,
    "test_tunix_models": TUNIX,
    "test_llama": f"{OPTAX}; the RMSNorm of flax multiplies bf16 by f32",
    "test_zero_mismatch": f"{OPTAX}; the RMSNorm of flax multiplies bf16 by f32",
}


LEFT_OUT = pytest.StashKey[int]()  # how many cases run at night only


def set_options(options):
    for name, value in options.items():
        jax.config.update(name, value)


set_options(STRICT)
# millions of objects, little garbage: collecting took 6% of a run
gc.set_threshold(50_000, 20, 100)


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run the full tables too")
    parser.addoption(
        "--search-seed", type=int, help="of a night's searches and kills, to repeat them"
    )
    parser.addoption(
        "--golden",
        default=str(Path(__file__).parent / "golden"),
        help="folder of reference vectors",
    )


def pytest_configure(config):
    """Sets the examples of searches: by day 40 that never change, at night 600 new ones; each
    test takes its share.
    """
    # of the process that hands out tests
    if config.option.search_seed is None and hasattr(config, "workerinput"):
        config.option.search_seed = int(os.environ["SEARCH_SEED"])
    elif config.option.search_seed is None:
        config.option.search_seed = (
            random.SystemRandom().randrange(2**31) if config.getoption("--nightly") else 0
        )
    os.environ["SEARCH_SEED"] = str(config.option.search_seed)
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    common = {
        "deadline": None,
        "database": None,
        "suppress_health_check": checks,
        "print_blob": True,
    }
    found = hypothesis.Phase.generate
    shrunk = hypothesis.Phase.shrink
    hypothesis.settings.register_profile(
        "slice", max_examples=40, derandomize=True, phases=[found], **common
    )
    hypothesis.settings.register_profile(
        "nightly", max_examples=600, phases=[found, shrunk], **common
    )
    hypothesis.settings.load_profile("nightly" if config.getoption("--nightly") else "slice")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """By day, keeps the cases of `by_day` that other options, such as -k, keep; at night all."""
    kept = {item.nodeid for item in (items if config.getoption("--nightly") else by_day(items))}
    result = yield
    at_night = [item for item in items if item.nodeid not in kept]
    config.hook.pytest_deselected(items=at_night)
    config.stash[LEFT_OUT] = len(at_night)
    items[:] = [item for item in items if item.nodeid in kept]
    return result


def by_day(items):
    """The cases in which a parameter has a value that is new to the test, or every n-th."""
    cases: Counter[str] = Counter()
    met: set[tuple[str, str, str]] = set()  # (test, parameter, value) of the cases so far
    found = []
    for item in items:
        test = item.nodeid.split("[")[0]
        every = item.get_closest_marker("every")
        out = bool(item.get_closest_marker("nightly") or (every and cases[test] % every.args[0]))
        cases[test] += 1
        if hasattr(item, "callspec") and not out:
            values = {(test, name, repr(value)) for name, value in item.callspec.params.items()}
            out = values <= met
            met |= values
        if not out:
            found.append(item)
    return found


def pytest_sessionfinish(session):
    """A worker tells how many cases it left out: each collects all of them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Where workers ran the tests, this process has collected none itself."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Runs the excused tests with JAX's default settings, in the whole process, since some of
    them start threads.
    """
    module = item.path.stem
    set_options(
        JAX_AS_IT_COMES if {module, f"{module}::{item.originalname}"} & set(EXCUSED) else STRICT
    )
    try:
        return (yield)
    finally:
        set_options(STRICT)


def pytest_runtest_teardown():
    programs.let_go()


def pytest_terminal_summary(terminalreporter, config):
    """Prints each folder's seconds, added up over workers, the slowest first; and how many cases
    ran of how many.
    """
    seconds = Counter()
    cases = set()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                cases.add(report.nodeid)
                seconds[str(Path(report.location[0]).parent)] += report.duration
    if seconds:
        terminalreporter.section("seconds of each folder")
    for folder, of_folder in seconds.most_common():
        terminalreporter.write_line(f"{of_folder:8.1f}  {folder}")
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{len(cases)} of {len(cases) + left_out} cases ran; --nightly runs the others too"
        )


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The sdist and the wheel of this tree."""
    return installed.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def folder_of_programs(tmp_path_factory):
    """One folder for all modules: JAX finds a program again only where the folder is the same."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def kept_programs(folder_of_programs):
    """The folder in which programs are kept, so that runs share them, though each builds its own
    jitted functions.
    """
    with programs.kept_in(folder_of_programs, seconds=0.1) as folder:
        yield folder


@pytest.fixture(scope="module")
def nothing_is_read_that_was_not_written():
    """Fills arrays that start uninitialised on accelerators with NaN; on CPUs they would be
    zeros.
    """
    with pytest.MonkeyPatch.context() as patch:
        jax.clear_caches()
        patch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield
    jax.clear_caches()
