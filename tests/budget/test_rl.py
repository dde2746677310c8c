"""What is on a card in every phase of a step of reinforcement learning, by hand."""

from dataclasses import replace

import pytest

from tonnage.budget.rl import Cast, Phase, phases
from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration, serving_budget
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.loss import loss_term
from tonnage.budget.training.memory import training_budget
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model

GPU, SHAPE = find_gpu("h200"), find_model("qwen2.5-1.5b")
TRAINING = Configuration(precision="bf16", seq=2560, micro_batch=2, accumulate=8, logit_share=0.8)
CAST = Cast(shape=SHAPE, gpu=GPU, training=TRAINING, sleep=2)


def engine(name: str = "vllm") -> ServingBudget:
    asked = ServingConfiguration(engine=name, context=2560, utilization=0.3, max_seqs=64, batched_tokens=4096)  # type: ignore[arg-type]
    return serving_budget(SHAPE, asked, GPU)


def by_name(cast: Cast, budget: ServingBudget | None = None) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(cast, budget or engine())}


def of(phase: Phase, owner: str, category: Category) -> int:
    return sum(one.size_bytes for one in phase.held if one.owner == owner and one.term.category is category)


def test_phases_come_in_the_order_of_a_step() -> None:
    assert list(by_name(CAST)) == ["rollout", "old log-probs", "train actor", "sync"]
    ppo = replace(CAST, reference="copy", reward=SHAPE, critic=SHAPE)
    assert list(by_name(ppo)) == [
        "rollout", "reward", "reference", "old log-probs", "values", "train actor", "train critic", "sync",
    ]  # fmt: skip
    own = replace(CAST, share_weights=True, old_log_probs=False, sleep=1)
    assert list(by_name(own, engine("tonnage"))) == ["rollout", "train actor"]


def test_training_beside_a_sleeping_engine_is_that_of_plan_train_and_what_sleeps() -> None:
    alone = float(training_budget(SHAPE, TRAINING, GPU).total_bytes)
    train = by_name(CAST)["train actor"]
    asleep = sum(one.size_bytes for one in train.held if one.owner == "engine")
    graphs = next(int(term.size_bytes) for term in engine().terms if term.name == "CUDA graphs")
    assert train.total_bytes - asleep == pytest.approx(alone, abs=64)
    assert graphs < asleep < graphs + 2**29 and of(train, "engine", Category.KV_CACHE) == 0


def test_an_engine_that_stays_awake_keeps_weights_and_cache() -> None:
    awake, asleep = (by_name(replace(CAST, sleep=sleep))["train actor"] for sleep in (0, 2))
    kept = engine().ledger
    assert awake.total_bytes - asleep.total_bytes == kept[Category.PARAMETERS] + kept[Category.KV_CACHE]


def test_a_rollout_holds_the_engine_beside_weights_and_states_and_no_gradients() -> None:
    rollout = by_name(CAST)["rollout"]
    assert of(rollout, "actor", Category.PARAMETERS) == 2 * SHAPE.parameters
    assert of(rollout, "actor", Category.OPTIMIZER_STATES) == 4 * SHAPE.parameters
    assert not of(rollout, "actor", Category.GRADIENTS) and not of(rollout, "actor", Category.ACTIVATIONS)
    assert of(rollout, "engine", Category.KV_CACHE) == engine().ledger[Category.KV_CACHE]


def test_one_process_has_one_context_and_two_have_two() -> None:
    shared, apart = (by_name(replace(CAST, own_process=own))["rollout"] for own in (False, True))
    assert apart.context_bytes > 1.5 * shared.context_bytes > 0


def test_a_reference_is_a_copy_in_16_bits_and_the_base_without_adapters_costs_nothing() -> None:
    copied = by_name(replace(CAST, reference="copy"))
    assert all(of(phase, "reference", Category.PARAMETERS) == 2 * SHAPE.parameters for phase in copied.values())
    adapters = replace(CAST, training=replace(TRAINING, lora_rank=16), reference="adapters-off")
    assert "reference" in by_name(adapters)
    assert not any(of(phase, "reference", Category.PARAMETERS) for phase in by_name(adapters).values())


def test_frozen_weights_are_sharded_where_parameters_are() -> None:
    sharded = replace(TRAINING, zero=3, framework="fsdp2", data=8, shard=8)
    rollout = by_name(replace(CAST, reference="copy", training=sharded))["rollout"]
    assert of(rollout, "reference", Category.PARAMETERS) == pytest.approx(2 * SHAPE.parameters / 8, abs=1)


def test_what_is_offloaded_is_on_the_card_in_its_own_phase_only() -> None:
    cast = replace(CAST, reference="copy", offload=frozenset({"frozen", "optimizer", "weights"}))
    found = by_name(cast)
    assert of(found["reference"], "reference", Category.PARAMETERS) == 2 * SHAPE.parameters
    assert not of(found["rollout"], "reference", Category.PARAMETERS)
    assert not of(found["rollout"], "actor", Category.PARAMETERS)
    assert not of(found["rollout"], "actor", Category.OPTIMIZER_STATES)
    assert of(found["train actor"], "actor", Category.OPTIMIZER_STATES) == 4 * SHAPE.parameters
    assert of(found["sync"], "actor", Category.PARAMETERS) == 2 * SHAPE.parameters


def test_logits_are_made_of_completions_alone() -> None:
    whole = loss_term(SHAPE, replace(TRAINING, logit_share=1.0), "loss").size_bytes
    assert loss_term(SHAPE, TRAINING, "loss").size_bytes == pytest.approx(0.8 * float(whole))
    scored = by_name(CAST)["old log-probs"]
    # Logits in 16 bits, in FP32, and their log-softmax, of 0.8 of the tokens; and what the head reads.
    logits = 0.8 * 5120 * SHAPE.vocab * (2 + 4 + 4) + 5120 * SHAPE.hidden * 2
    assert of(scored, "actor", Category.ACTIVATIONS) == pytest.approx(logits, rel=1e-6)


def test_shared_weights_are_there_once() -> None:
    cast = replace(CAST, share_weights=True, old_log_probs=False, sleep=1)
    rollout = by_name(cast, engine("tonnage"))["rollout"]
    assert rollout.ledger[Category.PARAMETERS] == 2 * SHAPE.parameters


def test_our_engine_keeps_weights_of_its_own_asleep() -> None:
    found = by_name(replace(CAST, sleep=1), engine("tonnage"))
    assert of(found["train actor"], "engine", Category.PARAMETERS) > 2 * 0.99 * SHAPE.parameters
    assert not of(found["train actor"], "engine", Category.KV_CACHE)


def test_sharded_weights_pass_whole_parameters_on_their_way() -> None:
    sharded = replace(TRAINING, zero=3, framework="fsdp2", data=8, shard=8)
    sync = by_name(replace(CAST, training=sharded))["sync"]
    assert of(sync, "actor", Category.WORKSPACE) > SHAPE.vocab * SHAPE.hidden * 4
    assert not [one for one in by_name(CAST)["sync"].held if one.term.name == "weights on their way"]


def test_a_critic_has_no_logits_and_trains_beside_the_actor_that_waits() -> None:
    found = by_name(replace(CAST, critic=SHAPE))
    critic = found["train critic"]
    assert not [one for one in critic.held if one.term.name == "logits and loss" and one.size_bytes]
    assert of(critic, "actor", Category.OPTIMIZER_STATES) and not of(critic, "actor", Category.GRADIENTS)
    assert of(found["train actor"], "critic", Category.OPTIMIZER_STATES)


def test_an_engine_apart_is_on_cards_of_its_own() -> None:
    found = by_name(replace(CAST, apart=True, sleep=0))
    assert found["rollout"].on == "rollout" and {one.owner for one in found["rollout"].held} == {"engine"}
    assert found["train actor"].on == "trainer" and "engine" not in {one.owner for one in found["train actor"].held}
