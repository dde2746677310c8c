"""Trainings whose blocks, losses or optimizers do not take what a survey asks of them: fit finds another way."""

import pytest

from fit.zoo.virtual_zoo import SHARES, chosen

KINDS = (
    "losses collected in a list",
    "blocks that take integers",
    "blocks that write their input",
    "layers dropped by a coin",
    "gradient penalty",
    "a mask with as many rows as the batch",
    "a list with a tensor for each row",
    "state carried from batch to batch",
    "sparse embedding with sparse adam",
)
# Each is in the way of a survey as one of the others is.
ALIKE = {
    "blocks that take integers",
    "gradient penalty",
    "a mask with as many rows as the batch",
    "sparse embedding with sparse adam",
}
REFUSED = {"state carried from batch to batch", "sparse embedding with sparse adam"}  # at all of these budgets


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[tuple[str, float], str]:
    """How it went for the kinds that this run tests."""
    kinds = [item.callspec.params["kind"] for item in request.session.items if item.path == request.path]
    return {(fit["kind"], fit["share"]): words for fit, words in chosen(*kinds)}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k in ALIKE else ()) for k in KINDS])
def test_a_plan_is_chosen_and_exact_or_no_plan_fits(found: dict[tuple[str, float], str], kind: str) -> None:
    outcomes = [found[kind, share] for share in SHARES]
    assert all(words.startswith(("exact", "refused: ")) for words in outcomes), outcomes
    assert (kind in REFUSED) == (not outcomes[0].startswith("exact"))
