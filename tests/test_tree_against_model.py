"""The production tree does what the obvious one does, on many short random scripts.

UNIFIED_CACHE_MODEL_CALLS sets how many calls each policy gets (default 20,000), UNIFIED_CACHE_MODEL_SEED
the first seed.
"""

import os

import pytest

from tests.model.driver import Config, Failure, Script, generate, make_config, run, shrink
from tests.model.regressions import REGRESSIONS
from tests.model.tree_model import POLICIES
from unified_cache import PrefixTree

pytestmark = pytest.mark.parallel

CALLS = int(os.environ.get("UNIFIED_CACHE_MODEL_CALLS", "20000"))
FIRST_SEED = int(os.environ.get("UNIFIED_CACHE_MODEL_SEED", "1"))
CALLS_A_SCRIPT = 200


def test_the_model_knows_every_policy() -> None:
    assert sorted(PrefixTree.eviction_policies()) == sorted(POLICIES)


@pytest.mark.parametrize("policy", PrefixTree.eviction_policies())
def test_random_scripts(policy: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + max(1, CALLS // CALLS_A_SCRIPT)):
        config = make_config(seed, policy)
        failure = run(generate(seed, CALLS_A_SCRIPT, config), config)
        if failure is not None:
            shortest: Failure = shrink(failure.script, config) or failure
            pytest.fail(f"policy {policy}, seed {seed}\n{shortest.report()}", pytrace=False)


@pytest.mark.parametrize("config, script", REGRESSIONS)
def test_regressions(config: Config, script: Script) -> None:
    failure = run(script, config, every=1)
    if failure is not None:
        pytest.fail(failure.report(), pytrace=False)
