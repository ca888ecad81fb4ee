"""TorchRL's Ray collector, an engine of its own, feeds one learner with our loss."""

import pytest
import torch
from torchrl.objectives.value import GAE

from composite_losses import ClipPPOLoss, diagnose
from examples.steering import Steering, make_actor, make_critic

ray = pytest.importorskip("ray")
collectors = pytest.importorskip("torchrl.collectors.distributed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WORKERS, ENVS, STEPS, BATCHES = 2, 4, 16, 4


def test_collectors_in_other_processes_follow_the_learner() -> None:
    """Two workers act with the weights of the last update: every batch has ratio 1 on arrival.

    After the update the ratio is no longer 1, so the weights do move; a worker that kept its old
    ones would show in the next batch.
    """
    torch.manual_seed(0)
    actor, critic = make_actor(), make_critic()
    loss = ClipPPOLoss(actor, critic, entropy_coeff=1e-3)
    estimator = GAE(gamma=0.95, lmbda=0.9, value_network=critic)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-2)
    frames = WORKERS * ENVS * STEPS
    collector = collectors.RayCollector(
        [lambda: Steering(ENVS)] * WORKERS,
        actor,
        frames_per_batch=frames,
        total_frames=frames * BATCHES,
        sync=True,
        update_after_each_batch=True,
        ray_init_config={"num_cpus": WORKERS, "include_dashboard": False},
        remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 2 * 10**8},
    )
    count = 0
    try:
        for data in collector:
            assert data.numel() == frames
            report = diagnose(loss, data)
            assert report.reasons == []
            assert report.sources == {"move": "stored", "gear": "stored"}
            estimator(data)
            out = loss(data)
            sum(value for key, value in out.items() if key.startswith("loss")).backward()
            optimiser.step()
            optimiser.zero_grad()
            assert max(diagnose(loss, data).max_abs_log_ratio.values()) > 1e-3
            count += 1
    finally:
        collector.shutdown()
        ray.shutdown()
    assert count == BATCHES
