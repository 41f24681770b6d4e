"""Every loss, correction and penalty against float64 numpy, value and gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.config.objective import CORRECTION_BOUNDS, DEFAULTS, objective
from agent_rl.config.schema import AlgorithmConfig
from agent_rl.trainer.losses import LOSSES, LossInputs, TotalLoss

SEQUENCES = 7
Arrays = dict[str, np.ndarray]


def inputs(num: int = 300, seed: int = 0, gap: float = 0.4) -> LossInputs:
    """Tokens of seven sequences of different lengths, dealt at random; the sixth has none."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2.0, num)
    sequences = rng.choice(SEQUENCES - 1, num)
    advantages = rng.normal(size=SEQUENCES)[sequences]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return LossInputs(
        logprobs=tensor(old + gap * rng.normal(size=num)).requires_grad_(),
        old_logprobs=tensor(old),
        rollout_logprobs=tensor(old + gap * rng.normal(size=num)),
        advantages=tensor(advantages),
        sequences=torch.tensor(sequences),
        num_sequences=SEQUENCES,
        ref_logprobs=tensor(old + gap * rng.normal(size=num)),
    )


def arrays(given: LossInputs) -> Arrays:
    """The same in float64."""
    return {
        field.name: getattr(given, field.name).detach().double().numpy()
        for field in dataclasses.fields(given)
        if isinstance(getattr(given, field.name), torch.Tensor)
    } | {"sequences": given.sequences.numpy()}


def surrogate(ratio: np.ndarray, a: Arrays, low: float, high: float) -> np.ndarray:
    return -np.minimum(ratio * a["advantages"], np.clip(ratio, 1 - low, 1 + high) * a["advantages"])


def reference_grpo(a: Arrays, low: float, high: float) -> np.ndarray:
    return surrogate(np.exp(a["logprobs"] - a["old_logprobs"]), a, low, high)


def reference_gspo(a: Arrays, low: float, high: float) -> np.ndarray:
    """Sequence by sequence, as the paper writes it."""
    return surrogate(reference_gspo_ratio(a), a, low, high)


def reference_gspo_ratio(a: Arrays) -> np.ndarray:
    ratio = np.zeros(len(a["logprobs"]))
    for q in range(SEQUENCES):
        own = a["sequences"] == q
        if own.any():
            new, old = a["logprobs"][own].sum(), a["old_logprobs"][own].sum()
            ratio[own] = np.exp(new - old) ** (1 / own.sum())
    return ratio


def reference_cispo(a: Arrays, low: float, high: float, frozen: np.ndarray) -> np.ndarray:
    """``frozen`` are the log-probs of the weight, which a gradient does not see."""
    weight = np.clip(np.exp(frozen - a["old_logprobs"]), 1 - low, 1 + high)
    return -weight * a["advantages"] * a["logprobs"]


REFERENCES: dict[str, Callable[[Arrays, Arrays, float, float], np.ndarray]] = {
    "grpo": lambda a, _, low, high: reference_grpo(a, low, high),
    "dr_grpo": lambda a, _, low, high: reference_grpo(a, low, high),
    "dapo": lambda a, _, low, high: reference_grpo(a, low, high),
    "gspo": lambda a, _, low, high: reference_gspo(a, low, high),
    "cispo": lambda a, frozen, low, high: reference_cispo(a, low, high, frozen["logprobs"]),
    "sft": lambda a, *_: -a["advantages"] * a["logprobs"],
}


def reference_gspo_token(a: Arrays, frozen: Arrays, low: float, high: float) -> np.ndarray:
    """What a token contributes to a sequence's ratio, its neighbours held."""
    held = reference_gspo_ratio(frozen)
    return surrogate(held * np.exp(a["logprobs"] - frozen["logprobs"]), a, low, high)


REFERENCE_CORRECTIONS: dict[str, Callable[[np.ndarray, np.ndarray, float, float], np.ndarray]] = {
    "tis": lambda rho, seq, low, high: np.minimum(rho, high),
    "icepop": lambda rho, seq, low, high: rho * (rho >= low) * (rho <= high),
    "mis": lambda rho, seq, low, high: np.array(
        [p * (low <= p <= high) for p in (np.prod(rho[seq == q]) for q in seq)]
    ),
}


def weights_of(a: Arrays) -> np.ndarray:
    """One over the length of the token's sequence: what ``sequence`` reduction multiplies by."""
    return 1 / np.array([(a["sequences"] == q).sum() for q in a["sequences"]])


def numeric_gradient(total: Callable[[Arrays], float], at: Arrays) -> np.ndarray:
    """Central differences in float64, one token at a time."""
    step, out = 1e-6, np.zeros(len(at["logprobs"]))
    for i in range(len(out)):
        ends = []
        for sign in (1, -1):
            moved = at["logprobs"].copy()
            moved[i] += sign * step
            ends.append(total(at | {"logprobs": moved}))
        out[i] = (ends[0] - ends[1]) / (2 * step)
    return out


# Bounds that clip a good part of the tokens, for every loss.
TIGHT = {"clip_low": 0.2, "clip_high": 0.28}
GSPO_TIGHT = {"clip_low": 0.02, "clip_high": 0.03}


@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_of_every_loss(loss: str) -> None:
    bounds = {"sft": {}, "gspo": GSPO_TIGHT}.get(loss, TIGHT)
    total = TotalLoss(AlgorithmConfig(loss=loss, **bounds))  # type: ignore[arg-type]
    low, high = total.objective.clip_low, total.objective.clip_high
    subject = inputs()
    at = arrays(subject)
    weights = weights_of(at)
    out = total(subject)
    expected = REFERENCES[loss](at, at, low, high)
    assert out.per_token.detach().numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    (out.per_token * torch.tensor(weights, dtype=torch.float32)).sum().backward()

    def scalar(moved: Arrays) -> float:
        return float((weights * REFERENCES[loss](moved, at, low, high)).sum())

    assert subject.logprobs.grad is not None
    assert subject.logprobs.grad.numpy() == pytest.approx(
        numeric_gradient(scalar, at), rel=1e-4, abs=1e-7
    )
    if loss not in ("sft", "cispo"):
        assert 0 < int(out.clipped.sum()) < len(out.clipped)
        assert bool((subject.logprobs.grad[out.clipped] == 0).all())


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", CORRECTION_BOUNDS)
def test_value_and_gradient_with_correction_and_reference(loss: str, correction: str) -> None:
    config = AlgorithmConfig(
        loss=loss,  # type: ignore[arg-type]
        correction=correction,  # type: ignore[arg-type]
        kl_weight=0.3,
        **(GSPO_TIGHT if loss == "gspo" else TIGHT),
    )
    total, subject = TotalLoss(config), inputs(num=60, gap=0.5)
    at = arrays(subject)
    rho = np.exp(at["old_logprobs"] - at["rollout_logprobs"])
    weight = REFERENCE_CORRECTIONS[correction](rho, at["sequences"], *CORRECTION_BOUNDS[correction])

    def per_token(a: Arrays) -> np.ndarray:
        low, high = total.objective.clip_low, total.objective.clip_high
        ratio = np.exp(a["ref_logprobs"] - a["logprobs"])
        # A token's weight scales what that token adds to the gradient.
        function = reference_gspo_token if loss == "gspo" else REFERENCES[loss]
        policy = function(a, at, low, high)
        return weight * policy + 0.3 * (ratio - 1 - np.log(ratio))

    out = total(subject)
    assert out.per_token.detach().numpy() == pytest.approx(per_token(at), rel=1e-4, abs=1e-6)
    assert out.details["correction_weight"].numpy() == pytest.approx(weight, rel=1e-4)
    shares = weights_of(at)
    (out.per_token * torch.tensor(shares, dtype=torch.float32)).sum().backward()
    expected = numeric_gradient(lambda a: float((shares * per_token(a)).sum()), at)
    assert subject.logprobs.grad is not None
    assert subject.logprobs.grad.numpy() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    if correction != "tis":
        assert 0 < int((weight == 0).sum()) < len(weight)
    else:
        assert 0 < int((weight == 2.0).sum()) < len(weight)


def test_entropy_is_subtracted_and_carries_its_own_gradient() -> None:
    subject = inputs()
    entropy = torch.rand(300, requires_grad=True)
    plain = TotalLoss(AlgorithmConfig())(subject).per_token
    out = TotalLoss(AlgorithmConfig(entropy_weight=0.1))(
        dataclasses.replace(subject, entropy=entropy)
    )
    assert torch.allclose(out.per_token, plain - 0.1 * entropy)
    out.per_token.sum().backward()
    assert entropy.grad is not None
    assert torch.allclose(entropy.grad, torch.full((300,), -0.1))


def test_a_sequence_split_over_ranks_is_one_sequence() -> None:
    """Two halves of the tokens, their sums added as context-parallel ranks add them."""
    for config in (
        AlgorithmConfig(loss="gspo", **GSPO_TIGHT),  # type: ignore[arg-type]
        AlgorithmConfig(correction="mis"),
    ):
        whole = inputs(num=40)
        expected = TotalLoss(config)(whole)
        expected.per_token.sum().backward()
        halves = [slice(0, 17), slice(17, 40)]
        parts = [part(whole, half) for half in halves]
        sent: list[torch.Tensor] = []

        def note(values: torch.Tensor, sent: list[torch.Tensor] = sent) -> torch.Tensor:
            sent.append(values)
            return values

        for one in parts:
            TotalLoss(config)(dataclasses.replace(one, sum_over_ranks=note))
        assert len(sent) == 2  # one exchange a rank
        for one, half in zip(parts, halves, strict=True):
            both = sent[0] + sent[1]
            summed = dataclasses.replace(one, sum_over_ranks=lambda _, both=both: both)
            out = TotalLoss(config)(summed)
            out.per_token.sum().backward()
            assert torch.allclose(out.per_token, expected.per_token[half], rtol=1e-5)
            assert whole.logprobs.grad is not None
            assert one.logprobs.grad is not None
            assert torch.allclose(one.logprobs.grad, whole.logprobs.grad[half], rtol=1e-4)


def part(whole: LossInputs, tokens: slice) -> LossInputs:
    fields = {
        field.name: getattr(whole, field.name).detach()[tokens]
        for field in dataclasses.fields(whole)
        if isinstance(getattr(whole, field.name), torch.Tensor)
    }
    fields["logprobs"] = fields["logprobs"].clone().requires_grad_()
    return dataclasses.replace(whole, **fields)


@pytest.mark.parametrize("correction", ["none", *CORRECTION_BOUNDS])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_tokens_is_an_empty_loss_with_a_gradient(loss: str, correction: str) -> None:
    if loss == "sft" and correction != "none":
        correction = "none"
    config = AlgorithmConfig(loss=loss, correction=correction, kl_weight=0.1)  # type: ignore[arg-type]
    total = TotalLoss(config)(inputs(num=0)).per_token.sum()
    assert float(total.detach()) == 0.0
    total.backward()


def test_equal_policies_have_ratio_one_and_weight_one() -> None:
    old = inputs().old_logprobs
    for loss in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        for correction in CORRECTION_BOUNDS:
            same = dataclasses.replace(
                inputs(),
                logprobs=old.clone().requires_grad_(),
                rollout_logprobs=old,
                ref_logprobs=old,
            )
            config = AlgorithmConfig(loss=loss, correction=correction, kl_weight=1.0)  # type: ignore[arg-type]
            out = TotalLoss(config)(same)
            assert torch.equal(out.ratio, torch.ones(300))
            assert not bool(out.clipped.any())
            assert torch.equal(out.details["correction_weight"], torch.ones(300))
            assert torch.equal(out.details["kl_reference"], torch.zeros(300))
            out.per_token.sum().backward()
            # the policy gradient, whatever the loss
            assert same.logprobs.grad is not None
            assert torch.allclose(same.logprobs.grad, -same.advantages)


@pytest.mark.parametrize("correction", ["none", *CORRECTION_BOUNDS])
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "sft"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1000.0, -1000.0])
def test_a_ratio_beyond_a_float_spoils_no_gradient(loss: str, correction: str, gap: float) -> None:
    """Four tokens of sequences of their own: good, bad; beside each a plain one of its sign."""
    config = AlgorithmConfig(loss=loss, correction=correction, kl_weight=0.1)  # type: ignore[arg-type]
    old = torch.tensor([-1.0 - gap, -1.0, -1.0 - gap, -1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    subject = LossInputs(
        logprobs=torch.full((4,), -1.0, requires_grad=True),
        old_logprobs=old,
        rollout_logprobs=torch.full((4,), -1.0),
        advantages=advantages,
        sequences=torch.arange(4),
        num_sequences=4,
        ref_logprobs=torch.tensor([-1.0 + gap, -1.0, -1.0, -1.0]),
    )
    out = TotalLoss(config)(subject)
    out.per_token.sum().backward()
    gradient = subject.logprobs.grad
    assert gradient is not None
    assert bool(gradient.isfinite().all())
    assert bool(out.per_token.isfinite().all())
    assert torch.equal(gradient[[1, 3]], -advantages[[1, 3]])
    if loss != "cispo":
        assert out.clipped.tolist() == [gap > 0, False, gap < 0, False]
        assert float(gradient[2]) == 0.0  # held by the clip, or beyond what a ratio can say


def test_masked_sequences_survive_products_beyond_a_float() -> None:
    """20,000 tokens that all drift one way: the product is e^2000."""
    num = 20_000
    subject = dataclasses.replace(
        inputs(num=num),
        rollout_logprobs=torch.full((num,), -1.1),
        old_logprobs=torch.full((num,), -1.0),
    )
    out = TotalLoss(AlgorithmConfig(correction="mis"))(subject)
    assert bool(out.per_token.isfinite().all())
    assert float(out.details["correction_masked"].mean()) == 1.0


@settings(deadline=None, max_examples=50)  # a loaded machine is not a fault
@given(st.floats(-8, 8), st.floats(-3, 3), st.sampled_from(["grpo", "gspo", "cispo"]))
def test_the_policy_term_never_pushes_against_the_advantage(
    gap: float, advantage: float, loss: str
) -> None:
    one = LossInputs(
        logprobs=torch.tensor([-1.0], requires_grad=True),
        old_logprobs=torch.tensor([-1.0 - gap]),
        rollout_logprobs=torch.tensor([-1.0]),
        advantages=torch.tensor([advantage]),
        sequences=torch.tensor([0]),
        num_sequences=1,
    )
    TotalLoss(AlgorithmConfig(loss=loss))(one).per_token.sum().backward()  # type: ignore[arg-type]
    assert one.logprobs.grad is not None
    assert float(one.logprobs.grad) * advantage <= 0


def test_every_loss_has_its_defaults_and_what_is_set_wins() -> None:
    assert set(DEFAULTS) == set(LOSSES)
    dapo = objective(AlgorithmConfig(loss="dapo"))
    assert (dapo.clip_low, dapo.clip_high, dapo.reduction) == (0.2, 0.28, "token")
    assert (dapo.overlong_fraction, dapo.dynamic_sampling_rounds) == (0.2, 2)
    dr = objective(AlgorithmConfig(loss="dr_grpo"))
    assert (dr.advantage, dr.reduction) == ("dr_grpo", "constant")
    changed = objective(
        AlgorithmConfig(
            loss="dapo",
            advantage="dr_grpo",
            clip_low=0.0,
            clip_high=0.0,
            loss_reduction="sequence",
            overlong_fraction=0.0,
            dynamic_sampling_rounds=0,
        )
    )
    assert changed == dataclasses.replace(
        dapo,
        advantage="dr_grpo",
        clip_low=0.0,
        clip_high=0.0,
        reduction="sequence",
        overlong_fraction=0.0,
        dynamic_sampling_rounds=0,
    )
