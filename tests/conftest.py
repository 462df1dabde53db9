"""Shape checks, Hypothesis profiles and one torch thread a worker, for the whole suite.

The shape checks wrap every function of `windage.estimators`, `toy` and `llm` on import. They are
installed here because jaxtyping's own pytest flag never reaches the workers of pytest-xdist.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# An int is a float, as PEP 484 says; beartype needs to be told.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", **quiet)
settings.register_profile("ci", **quiet, derandomize=True, print_blob=True)
settings.register_profile("long", **quiet, max_examples=1_000)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-shapes", action="store_true", help="leave shapes and types of arguments unchecked"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--no-shapes"):
        install_import_hook(["windage.estimators", "windage.toy", "windage.llm"], CHECKER)
        # The checker looks at one item of a sequence, chosen by `random`, also inside strategies.
        config.addinivalue_line("filterwarnings", "ignore:Do not use the `random` module")
