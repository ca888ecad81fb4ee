"""Distributions: bounds of the support, entropies, divergences and action masks."""

import copy
import math

import pytest
import torch
import torch.distributions as D
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from torch import nn
from torchrl.modules import MultiAgentMLP
from torchrl.modules import distributions as R

import composite_losses as cl
from composite_losses.errors import ConfigError
from tests.cases.builders_ce import (
    ALL_LOSSES,
    BATCHES,
    GEOMETRIES,
    WIDTH,
    actor_of,
    at,
    clip_loss,
    collect,
    critic_of,
    finite,
    fresh,
    gradients,
    inputs_of,
    nested,
    rows,
    set_group,
    table_actor,
)

B = WIDTH
INF = math.inf

# --- the bounds of a squashed Gaussian ---

BOUNDS = {
    "default": {},
    "floats": {"low": -2.0, "high": 3.0},
    "tensors": {"low": torch.tensor([-2.0, -1.0, 0.0]), "high": torch.tensor([3.0, 1.0, 0.5])},
}


def limits(kwargs):
    low, high = kwargs.get("low", -1.0), kwargs.get("high", 1.0)
    return torch.as_tensor(low).expand(WIDTH), torch.as_tensor(high).expand(WIDTH)


@BATCHES
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("source", ["stored", "params"])
def test_action_at_the_bound(source, bounds, batch, agents):
    """Case 58: actions exactly at low and high: loss and gradients finite, ratio 1."""
    kwargs = BOUNDS[bounds]
    actor, td = fresh("tanh", batch, agents=agents, kwargs=kwargs)
    holder = td if agents is None else td["agents"]
    low, high = limits(kwargs)
    choice = torch.arange(holder["action"].numel()).reshape(holder["action"].shape) % 3
    action = torch.where(choice == 0, low, holder["action"])
    holder["action"] = torch.where(choice == 1, high, action)
    with torch.no_grad():
        holder["action_log_prob"] = actor.get_dist(td.copy()).log_prob(holder["action"])
    if source == "params":
        del holder["action_log_prob"]
    loss = clip_loss(actor, agents=agents, validate=True)
    assert loss.log_prob_source(td) == {"action": source}
    out = loss(td)
    assert finite(out.values())
    assert finite(gradients(loss, out).values())
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
    assert out["clip_fraction"] == 0


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("side", ["below", "above"])
@pytest.mark.parametrize("agents", [None, 1, 3])
def test_action_outside_its_support(agents, side, bounds):
    """Case 58: an action beyond the bounds (1.5 on (-1, 1)) is an error under validation."""
    kwargs = BOUNDS[bounds]
    actor, td = fresh("tanh", (B,), agents=agents, kwargs=kwargs)
    assert clip_loss(actor, agents=agents, validate=True)(td)["loss_objective"].isfinite()
    low, high = limits(kwargs)
    key = at(agents, "action")
    td[key][0, ..., 1] = high[1] + 0.5 if side == "above" else low[1] - 0.5
    loss = clip_loss(actor, agents=agents, validate=True)
    with pytest.raises(ConfigError, match=r"(?s)head 'action'.*support"):
        loss(td)
    assert any("support" in reason for reason in cl.diagnose(loss, td).reasons)


# --- clipped actions ---


@BATCHES
@pytest.mark.parametrize("kind", ["independent", "independent_normal", "tanh", "normal"])
def test_clipped_actions_show(kind, batch, agents):
    """Case 60: max |log-ratio| < 1e-6 for sampled actions, > 0 once they are clipped."""
    actor, td = fresh(kind, batch, agents=agents)
    loss = clip_loss(actor, agents=agents)
    raw = cl.diagnose(loss, td)
    assert 0 <= raw.max_abs_log_ratio["action"] < 1e-6
    assert raw.reasons == []
    key = at(agents, "action")
    td[key] = td[key].clamp(-0.1, 0.1)
    clipped = cl.diagnose(loss, td)
    assert clipped.max_abs_log_ratio["action"] > 1e-3
    assert clipped.reasons


# --- entropies ---


@pytest.mark.parametrize("coeff", [0.0, 0.01])
@pytest.mark.parametrize("name", ALL_LOSSES)
@pytest.mark.parametrize("kinds", ["tanh", "no_entropy", "mixture", "truncated", "kumaraswamy"])
def test_entropy_without_closed_form(kinds, name, coeff):
    """Case 61: no crash without a closed-form entropy, at coefficient 0 and 0.01; it is logged."""
    actor, td = fresh(kinds, (B,))
    cls, options = ALL_LOSSES[name]
    loss = clip_loss(actor, cls=cls, entropy_coeff=coeff, **options)
    out = loss(td)
    assert out["entropy"].isfinite()
    assert not out["entropy"].requires_grad
    assert finite(gradients(loss, out).values())
    assert out["loss_entropy"].item() == pytest.approx(-coeff * out["entropy"].item(), abs=1e-6)


def counted(logits):
    return D.Binomial(torch.tensor([2.0, 3.0, 4.0]), logits=logits)


@pytest.mark.parametrize("coeff", [0.0, 0.01])
def test_entropy_of_counts(coeff):
    """Case 61: Binomial heads with different counts have no closed form in torch."""
    odds = (0.1, -0.2, 0.3)
    actor = table_actor(counted, logits=torch.tensor(odds).expand(3, 3))
    with torch.no_grad():
        td = actor(rows(3))
    loss = cl.ClipPPOLoss(actor, entropy_coeff=coeff, samples_mc_entropy=2000)
    out = loss(td)
    expected = 0.0  # −Σ p log p over the outcomes, by hand
    for n, logit in zip((2, 3, 4), odds, strict=True):
        p = 1 / (1 + math.exp(-logit))
        probs = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        expected -= sum(q * math.log(q) for q in probs)
    assert out["entropy"].item() == pytest.approx(expected, abs=0.1)
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)


class SampledTanh(R.TanhNormal):
    """The same distribution as a class that no formula covers."""


# H of tanh(X), X ~ N(0, scale): by quadrature of H(X) + E[log(1 − tanh(X)²)]
TANH_ENTROPY = {1.0: 0.66980, 0.5: 0.49997, 0.1: -0.89360}


@pytest.mark.parametrize("scale", TANH_ENTROPY)
@pytest.mark.parametrize("cls", [R.TanhNormal, SampledTanh])
def test_entropy_of_a_squashed_gaussian(cls, scale):
    """Case 62: 0.66980, 0.49997, −0.89360 within 0.02 from 20k samples; gradient to the scale."""
    tables = {"loc": torch.zeros(2, 1), "scale": torch.full((2, 1), scale)}
    actor = table_actor(cls, **tables)
    with torch.no_grad():
        td = actor(rows(2))
    loss = cl.ClipPPOLoss(actor, entropy_coeff=1.0, samples_mc_entropy=20_000)
    state = torch.get_rng_state()
    out = loss(td)
    assert torch.equal(state, torch.get_rng_state()) == (cls is R.TanhNormal)
    tolerance = 1e-4 if cls is R.TanhNormal else 0.02
    assert out["entropy"].item() == pytest.approx(TANH_ENTROPY[scale], abs=tolerance)
    assert out["loss_entropy"].item() == pytest.approx(-TANH_ENTROPY[scale], abs=tolerance)
    out["loss_entropy"].backward()
    grad = [p.grad for p in loss.parameters() if p.grad is not None][-1]
    # the mean over two rows of dH/dscale; H rises by about 1/scale where the squashing is weak
    step = 1e-3
    assert grad.abs().min() > 0.01
    exact = (quadrature(scale + step) - quadrature(scale - step)) / (2 * step)
    torch.testing.assert_close(-grad.sum(), torch.tensor(exact), rtol=0.1, atol=0.02)


def quadrature(scale):
    z = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    weight = (-z.square() / 2).exp() / math.sqrt(2 * math.pi) * (24 / 4000)
    slope = 2 * (math.log(2) - scale * z - nn.functional.softplus(-2 * scale * z))
    return 0.5 * math.log(2 * math.pi * math.e * scale**2) + (weight * slope).sum().item()


@pytest.mark.parametrize("agents", [None, 1, 3])
def test_mixed_composite(agents):
    """Case 62: the head with a closed form is exact and deterministic beside a sampled one."""
    kinds = {"gear": "categorical", "move": "no_entropy"}
    actor, td = fresh(kinds, (B,), agents=agents)
    loss = clip_loss(actor, agents=agents, samples_mc_entropy=4000)
    one, two = loss(td), loss(td)
    params = td[at(agents, "params")]
    p = params["gear", "logits"].softmax(-1)
    exact = -(p * p.log()).sum(-1).mean()
    normal = (0.5 * math.log(2 * math.pi * math.e) + params["move", "scale"].log()).sum(-1).mean()
    torch.testing.assert_close(one["entropy/gear"], exact)
    assert one["entropy/gear"] == two["entropy/gear"]
    assert one["entropy/move"] != two["entropy/move"]
    torch.testing.assert_close(one["entropy/move"], normal, rtol=0, atol=0.1)
    torch.testing.assert_close(one["entropy"], exact + normal, rtol=0, atol=0.1)


@BATCHES
@pytest.mark.parametrize("cls", [D.Categorical, R.OneHotCategorical])
def test_entropy_is_of_the_distribution(cls, batch, agents):
    """Case 63: Categorical (.7, .3) has entropy 0.61086 whichever action is stored."""
    # −(.7 log .7 + .3 log .3) = .24967 + .36119
    probs = torch.tensor([0.7, 0.3])
    prefix = () if agents is None else ("agents",)
    key = lambda name: nested(prefix, name)  # noqa: E731
    net = nn.Linear(WIDTH, 2)
    nn.init.zeros_(net.weight)
    net.bias.data = probs.log()
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=[key("observation")], out_keys=[key("logits")]),
        ProbabilisticTensorDictModule(
            in_keys={"logits": key("logits")},
            out_keys=[key("action")],
            distribution_class=cls,
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )
    td = collect(actor, inputs_of("categorical", batch, agents=agents), prefix=prefix)
    loss = clip_loss(actor, agents=agents)
    for action in (0, 1):
        sample = td[key("action_log_prob")].shape
        index = torch.full(sample, action)
        td[key("action")] = index if cls is D.Categorical else nn.functional.one_hot(index, 2)
        td[key("action_log_prob")] = probs.log()[action].expand(sample).clone()
        out = loss(td)
        assert out["entropy"].item() == pytest.approx(0.61086, abs=1e-5)
        assert out["loss_entropy"].item() == pytest.approx(-0.0061086, abs=1e-7)


# --- divergences ---


def moved(actor, size=0.3):
    """Another policy with the same heads."""
    other = copy.deepcopy(actor)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(size * torch.randn_like(p))
    return other


@BATCHES
def test_kl_penalty_of_unusual_heads(batch, agents):
    """Case 65: KL(old ‖ new) of a Dirichlet and a TanhNormal head, in closed form."""
    kinds = {"mix": "dirichlet", "move": "tanh"}
    actor, td = fresh(kinds, batch, agents=agents)
    loss = clip_loss(actor, cls=cl.KLPENPPOLoss, agents=agents)
    out = loss(td)
    assert out["kl"].abs() < 1e-6
    loss = clip_loss(moved(actor), cls=cl.KLPENPPOLoss, agents=agents, functional=False)
    key = at(agents, "params")
    old, new = td[key], loss.actor_network[0](td.copy())[key]
    mix = D.kl_divergence(*(D.Dirichlet(p["mix", "concentration"]) for p in (old, new)))
    normals = [D.Normal(p["move", "loc"], p["move", "scale"]) for p in (old, new)]
    expected = mix + D.kl_divergence(*normals).sum(-1)
    out = loss(td)
    assert expected.min() > 1e-3
    torch.testing.assert_close(out["kl"], expected.mean().detach(), rtol=1e-4, atol=1e-5)
    assert finite(gradients(loss, out).values())


@pytest.mark.parametrize("kind", ["kumaraswamy", "truncated", "mixture", "doubled_normal"])
def test_kl_without_registered_pair(kind):
    """Case 65: without a closed form the KL is sampled: 0 at equal weights, finite after a step."""
    actor, td = fresh({"gear": "categorical", "move": kind}, (B, B))
    loss = cl.KLPENPPOLoss(actor, samples_mc_kl=2000)
    assert loss(td)["kl"].abs() < 1e-5
    loss = cl.KLPENPPOLoss(moved(actor), samples_mc_kl=2000)
    out = loss(td)
    assert out["kl"] > 0
    assert finite(gradients(loss, out).values())


# --- action masks ---

LOW = {t: torch.finfo(t).min for t in (torch.float32, torch.float16, torch.bfloat16)}
ALLOWED = torch.tensor([[True, False, True, False]] * 2)


def masked_case(way, dtype):
    """(actor, data) of two rows with 2 of 4 actions allowed at equal logits."""
    logits = torch.zeros(2, 4, dtype=dtype)
    fill = {"inf": -INF, "min": LOW[dtype]}
    cls, kwargs = D.Categorical, {}
    if way in fill:
        logits = logits.masked_fill(~ALLOWED, fill[way])
    else:
        cls = R.MaskedOneHotCategorical if way == "one_hot" else R.MaskedCategorical
        kwargs = {"neg_inf": LOW[dtype]} if way == "mask_min" else {}
    actor = table_actor(cls, logits=logits, mask=way not in fill, kwargs=kwargs)
    action = torch.tensor([0, 2])
    action = nn.functional.one_hot(action, 4) if way == "one_hot" else action
    # log ½ for two equal classes
    stored = torch.full((2,), math.log(0.5))
    return actor, rows(2, action=action, action_log_prob=stored, action_mask=ALLOWED)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("way", ["inf", "min", "mask", "mask_min", "one_hot"])
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_masked_logits(name, way, dtype):
    """Cases 66 and 67: 2 of 4 equal actions: 0.6931; finite gradients, exactly 0 where masked."""
    actor, td = masked_case(way, dtype)
    if name == "klpen":
        td = actor[0](td).detach()
    cls, options = ALL_LOSSES[name]
    loss = cls(actor, entropy_coeff=0.01, **options)
    out = loss(td)
    assert out["entropy"].item() == pytest.approx(0.6931, abs=1e-4)
    assert out["entropy"].dtype == torch.float32
    if name != "a2c" and name != "reinforce":
        assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-6)
    assert finite(out.values())
    (gradient,) = gradients(loss, out).values()
    assert gradient.isfinite().all()
    assert (gradient[~ALLOWED] == 0).all()
    assert (gradient[ALLOWED] != 0).all()


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("kind", ["masked", "masked_one_hot"])
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_rows_without_any_action(name, kind, agents):
    """Case 68: an agent all-masked in half the rows: as if those were dropped, value term aside."""
    actor, td = fresh(kind, (4,), agents=agents)
    cls, options = ALL_LOSSES[name]
    td["agents", "action_mask"][::2, 0] = False
    loss = clip_loss(
        moved(actor, 0.1), cls=cls, agents=agents, critic=True, entropy_coeff=0.01, **options
    )
    loss.eval()
    out = loss(td)
    flat = td["agents"].reshape(-1)
    kept = flat[flat["action_mask"].any(-1)]
    assert kept.shape[0] == 4 * agents - 2
    plain = actor_of(kind)
    plain.load_state_dict(loss.actor_network.state_dict())
    alone = cls(plain, critic_of(), entropy_coeff=0.01, **options).eval()
    for to, source in zip(alone.parameters(), loss.parameters(), strict=True):
        to.data.copy_(source.data)
    expected, all_rows = (
        alone(kept),
        alone(flat.set("action_mask", torch.ones(len(flat), 3).bool())),
    )
    for key, value in out.items():
        of_value = key in ("loss_critic", "loss_value", "explained_variance")
        torch.testing.assert_close(value, (all_rows if of_value else expected)[key], msg=key)
    assert finite(gradients(loss, out).values())


@BATCHES
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_head_without_any_action(geometry, batch, agents):
    """Case 68: in a composite an all-masked head is inactive: factor 1, entropy 0."""
    kinds = {"gear": "masked", "move": "independent"}
    actor, td = fresh(kinds, batch, agents=agents)
    prefix = () if agents is None else ("agents",)
    td[nested(prefix, "gear_mask")] = torch.zeros_like(td[nested(prefix, "gear_mask")])
    td[nested(prefix, "move_log_prob")] -= 0.1
    td[nested(prefix, "gear_log_prob")] = torch.full_like(td[nested(prefix, "gear_log_prob")], -INF)
    advantage = td[nested(prefix, "advantage")].squeeze(-1)
    out = clip_loss(actor, agents=agents, ratio=geometry)(td)
    # r = e^0.1 = 1.105 of the one active head, within the clip range
    expected = -(math.exp(0.1) * advantage).mean()
    torch.testing.assert_close(out["loss_objective"], expected, rtol=1e-4, atol=1e-5)
    assert out["entropy/gear"] == 0
    torch.testing.assert_close(out["entropy"], out["entropy/move"])
    for head in kinds:
        assert out[f"clip_fraction/{head}"] == 0


@pytest.mark.parametrize("cls", [D.Categorical, D.OneHotCategorical, R.OneHotCategorical])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("source", ["stored", "params"])
def test_extreme_logits_with_argument_checks(source, masked, cls):
    """Case 70: logits of ±1e4 and masks with validate_args=True: no simplex error, ratio 1."""
    logits = torch.tensor(
        [[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4 - 1], [3e3, 3e3, -1e4], [0.1, 0.2, -0.3]]
    )
    if masked:
        logits[:, 1] = -INF
    actor = table_actor(cls, logits=logits, kwargs={"validate_args": True})
    with torch.no_grad():
        td = actor(rows(4))
    loss = cl.ClipPPOLoss(actor, log_prob_source=source, validate=True)
    out = loss(td)
    assert finite(out.values())
    # what the class stored is rounded at 1e4, to 1e-3
    tolerance = 3e-3 if source == "stored" else 1e-6
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=tolerance)
    assert finite(gradients(loss, out).values())


@pytest.mark.parametrize("agents", [None, 1, 3])
@pytest.mark.parametrize("kind", ["masked", "masked_one_hot"])
def test_extreme_logits_with_a_mask(kind, agents):
    """Case 70: so for the masked classes, whose forbidden logit may be the largest by far."""
    actor, td = fresh(kind, (B,), agents=agents)
    with torch.no_grad():
        actor[0].module.last.bias.copy_(torch.tensor([1e4, -1e4, 1e4]))
        td = collect(
            actor,
            inputs_of(kind, (B,), agents=agents),
            prefix=() if agents is None else ("agents",),
        )
    loss = clip_loss(actor, agents=agents, validate=True)
    out = loss(td)
    assert finite(out.values())
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
    assert finite(gradients(loss, out).values())


class PolicyNet(nn.Module):
    """TorchRL's multi-agent MLP, masks passed on."""

    def __init__(self, agents, share):
        super().__init__()
        self.net = MultiAgentMLP(
            WIDTH, WIDTH, agents, centralized=False, share_params=share, depth=1
        )

    def forward(self, observation):
        return 5 * self.net(observation)


@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("cls", [R.MaskedCategorical, R.MaskedOneHotCategorical])
def test_greedy_action_is_allowed(cls, share, agents):
    """Cases 71 to 73: the greedy action is in the mask, of finite log-prob; the mask is kept."""
    key = lambda name: ("agents", name)  # noqa: E731
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(
            PolicyNet(agents, share), in_keys=[key("observation")], out_keys=[key("logits")]
        ),
        ProbabilisticTensorDictModule(
            in_keys={"logits": key("logits"), "mask": key("action_mask")},
            out_keys=[key("action")],
            distribution_class=cls,
            return_log_prob=True,
        ),
    )
    inputs = inputs_of("masked", (8,), agents=agents)
    mask = inputs[key("action_mask")].clone()
    with set_interaction_type(InteractionType.MODE):
        td = collect(actor, inputs, prefix=("agents",))
        assert torch.equal(td[key("action_mask")], mask)
        action = td[key("action")]
        index = action if cls is R.MaskedCategorical else action.argmax(-1)
        assert mask.gather(-1, index.unsqueeze(-1)).all()
        assert td[key("action_log_prob")].isfinite().all()
        loss = set_group(cl.ClipPPOLoss(actor, validate=True))
        before = td.clone()
        out = loss(td)
    assert (td == before).all()
    assert out["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
    logits = td[key("logits")].masked_fill(~mask, -INF)
    expected = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(loss.log_probs(td)[("current", *key("action"))].detach(), expected)


@pytest.mark.parametrize("cls", [R.MaskedCategorical, R.MaskedOneHotCategorical])
def test_sparse_mask(cls):
    """Case 71: a mask given as indices: actions are full indices, scored as the class does."""
    indices = torch.tensor([[0, 2], [1, 3], [2, 3]])
    logits = torch.randn(3, 4)
    actor = table_actor(cls, logits=logits, kwargs={"indices": indices})
    with torch.no_grad():
        td = actor(rows(3))
    action = td["action"] if cls is R.MaskedCategorical else td["action"].argmax(-1)
    assert (indices == action.unsqueeze(-1)).any(-1).all()
    chosen = logits.gather(-1, indices).log_softmax(-1)
    expected = chosen.gather(-1, (indices == action.unsqueeze(-1)).long().argmax(-1, keepdim=True))
    loss = cl.ClipPPOLoss(actor)
    torch.testing.assert_close(
        loss.log_probs(td)["current", "action"].detach(), expected.squeeze(-1)
    )
    assert loss(td)["max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
