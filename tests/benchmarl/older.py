"""A pytest plugin: what of the other tests an older TorchRL cannot run, and why.

Loaded with ``-p tests.benchmarl.older``. Everything else must pass.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torchrl.modules
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.utils import ValueEstimators

# reason -> test files that cannot even be imported
FILES = {
    "TorchRL's MAPPOLoss, IPPOLoss, MultiAgentGAE and value normalisers came later": (
        "losses/test_multiagent.py",
    ),
}
# reason -> regular expressions of test ids
TESTS: dict[str, tuple[str, ...]] = {
    "TorchRL's MAPPOLoss and IPPOLoss came later": (
        r"losses/test_groups_estimates.py::test_torchrls_layout",
    ),
    "TorchRL's value normalisers came later": (
        r"cases/test_masks.py::test_value_norm_sees_valid_rows_only",
        r"cases/test_groups_masks.py::test_value_normaliser_learns_from_the_living",
    ),
    "assigning out_keys in TensorDict 0.11 selects outputs, it does not rename them": (
        r"cases/test_keys_set.py::test_value_key_of_the_critic\[\w+-(v|key2)-(agents|A)",
    ),
    "TorchRL 0.11's MaskedOneHotCategorical declares a wrong event shape for a mask of indices": (
        r"cases/test_distributions.py::test_sparse_mask\[MaskedOneHotCategorical\]",
    ),
    "TorchRL 0.11 fails on a pair of clip ranges": (r"losses/test_parity.py::.*ClipPPO-pair",),
    "TorchRL 0.11 ignores delay_actor and max_importance_ratio": (
        r"losses/test_parity.py::test_options_of_ppo\[.*-(delay|cap and delay|together)-",
        # no ratio of the fourth shape, B, reaches the cap
        r"losses/test_parity.py::test_options_of_ppo\[.*-cap-(BT|BA|BTA)\]",
        r"losses/test_parity.py::test_kl_penalty\[options3-",
    ),
    "TorchRL 0.11's ReinforceLoss does not look for the key that the actor declares": (
        r"losses/test_parity.py::.*reinforce",
        r"losses/test_parity.py::.*\[RF",
    ),
}
# what TorchRL 0.11 does in a torch that came after it
OUTDATED = "ignore:size_average and reduce args will be deprecated:UserWarning"
# of a subclass of TorchRL's A2CLoss, with which ours is compared
UNANNOTATED = r"ignore:The name \w+ wasn't part of the annotations:UserWarning"


def pytest_configure(config: pytest.Config) -> None:
    """Lets the one warning through, and names what test files look up when they are imported."""
    config.addinivalue_line("filterwarnings", OUTDATED)
    # of use only to tests that are left out below
    torchrl.modules.RunningValueNorm = None
    # all that TorchRL's ClipPPOLoss builds
    ClipPPOLoss.SUPPORTED_VALUE_ESTIMATORS = tuple(ValueEstimators)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves those files out."""
    found = any(collection_path.as_posix().endswith(end) for ends in FILES.values() for end in ends)
    return found or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects those tests, and lets the other warning through where it is TorchRL's."""
    for item in items:
        if item.path.name == "test_parity.py":
            item.add_marker(pytest.mark.filterwarnings(UNANNOTATED))
    patterns = [re.compile(text) for texts in TESTS.values() for text in texts]
    left_out = [item for item in items if any(p.search(item.nodeid) for p in patterns)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
