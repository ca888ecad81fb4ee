"""Only ``make test-benchmarl`` collects these tests: BenchMARL has an environment of its own."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("benchmarl") else ["test_*.py"]
WARNINGS = (
    # what BenchMARL uses of TorchRL
    "ignore:SyncDataCollector has been deprecated:DeprecationWarning",
    "ignore:The default behavior of TransformedEnv will change:FutureWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets through what BenchMARL itself warns of."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
