"""What holds for every test: one torch thread and a fixed seed."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds torch's generator before each test."""
    torch.manual_seed(0)
