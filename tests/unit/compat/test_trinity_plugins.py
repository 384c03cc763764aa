"""Plug-ins written for Trinity-RFT, with its import names, registries, constructors and methods, run unchanged."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import make_algorithm, make_part
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.operators import ExperienceTable
from rftdask.algorithm.selectors import make_selector
from rftdask.buffer.log.schema import Experience, Status
from rftdask.compat.trinity.model import ModelWrapper
from rftdask.config.plugins import load_plugin_folders
from rftdask.config.schema.buffer import DataSelectorConfig
from rftdask.config.schema.explorer import SandboxConfig
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.monitor.trackers import make_tracker
from rftdask.rollouts.rewards.registry import compute_reward
from rftdask.rollouts.try_workflow import try_workflow

WORKFLOWS = """
from typing import Dict, List, Optional

from trinity.common.experience import EID, Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn
from trinity.common.workflows import WORKFLOWS, Task, Workflow
from trinity.common.workflows.step_wise_workflow import RewardPropagationWorkflow, StepWiseRewardWorkflow
from trinity.common.workflows.workflow import AsyncSimpleWorkflow, MathWorkflow, MultiTurnWorkflow, SimpleWorkflow
from trinity.utils.log import get_logger

logger = get_logger(__name__)


@REWARD_FUNCTIONS.register_module("says_truth")
class SaysTruth(RewardFn):
    def __init__(self, bonus: float = 0.0, **kwargs):
        self.bonus = bonus

    def __call__(self, response: str, truth: Optional[str] = None, **kwargs) -> Dict[str, float]:
        return {"truth": float(truth in response), "bonus": self.bonus}


@WORKFLOWS.register_module("asks_twice")
class AsksTwice(MultiTurnWorkflow):
    is_async = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Optional[List] = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.max_turns = task.workflow_args.get("max_turns", 2)

    def run(self) -> List[Experience]:
        messages = [{"role": "user", "content": self.task.task_desc}]
        for _ in range(self.max_turns):
            [answer] = self.model.chat(messages, n=1, temperature=0.5)
            messages += [{"role": "assistant", "content": answer.response_text}, {"role": "user", "content": "again"}]
        return [self.process_messages_to_experience(messages[:-1], 0.5, {"num_turns": self.max_turns})]


@WORKFLOWS.register_module("each_step")
class EachStep(StepWiseRewardWorkflow):
    @property
    def max_step_num(self):
        return 3

    def step(self, step_num: int) -> bool:
        answer = self.client.chat.completions.create(
            model=self.client.model_path, messages=[{"role": "user", "content": str(step_num)}]
        )
        return "stop" not in answer.choices[0].message.content

    def reward(self, exps: List[Experience], step_num: int) -> float:
        assert [exp.eid.step for exp in exps] == [step_num]
        return float(step_num)


@WORKFLOWS.register_module("awaits_and_scores")
class Awaits(Workflow):
    is_async = True
    can_repeat = True

    async def run_async(self):
        rows = await self.model.chat_async([{"role": "user", "content": "hi"}], **{"logprobs": 0, "top_k": None})
        for row in rows:
            assert len(row.tokens) == row.prompt_length + len(row.logprobs) and row.action_mask.all()
            row.reward = 1.0
            row.metrics = {"length": len(row.response_text)}
            row.info = {"env_state_hash": "s0", "step_reward": 0.25}
        return rows


@WORKFLOWS.register_module("own_math")
class OwnMath(MathWorkflow):
    def format_messages(self):
        messages = super().format_messages()
        assert messages[-1] == {"role": "user", "content": "1+1?"}
        return messages


class KeepsBest(SimpleWorkflow):
    def run(self):
        rows = self.model.chat(self.format_messages(), n=2)
        for row in rows:
            row.reward = 1.0
        return rows[:1]


class Nothing(Workflow):
    def run(self):
        return []


class Judged(Workflow):
    is_async = True

    async def run_async(self):
        return []
"""
PARTS = """
import torch
from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, AlgorithmType, POLICY_LOSS_FN, PolicyLossFn
from trinity.algorithm.advantage_fn import AdvantageFn, GroupAdvantage
from trinity.algorithm.utils import aggregate_loss, masked_mean
from trinity.buffer.operators import EXPERIENCE_OPERATORS, ExperienceOperator, ExperienceOperatorV1
from trinity.buffer.selector import SELECTORS
from trinity.buffer.selector.selector import BaseSelector
from trinity.common.experience import group_by
from trinity.utils.monitor import MONITOR, Monitor


@EXPERIENCE_OPERATORS.register_module("halves_and_filters")
class Halves(ExperienceOperator):
    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, exps):
        kept = [exp for exp in exps if exp.reward > self.threshold]
        for exp in kept:
            exp.reward /= 2
        return kept, {"kept": len(kept)}


@EXPERIENCE_OPERATORS.register_module("awaits")
class AwaitsOnce(ExperienceOperatorV1):
    async def prepare(self):
        self.ready = True

    async def process(self, exps):
        assert self.ready and self.auxiliary_models == {}
        return exps[:1], {}


@ADVANTAGE_FN.register_module("centered")
class Centered(GroupAdvantage):
    def __init__(self, scale: float = 1.0, **kwargs) -> None:
        self.scale = scale

    def group_experiences(self, exps):
        return group_by(exps, id_type="task")

    def calculate_group_advantage(self, group_id, exps):
        mean = torch.tensor([exp.reward for exp in exps]).mean()
        for exp in exps:
            exp.advantages = self.scale * (exp.reward - mean) * exp.action_mask
            exp.returns = exp.advantages.clone()
        return exps, {"mean": mean.item()}

    @classmethod
    def default_args(cls):
        return {"scale": 2.0}


class OfVerl(AdvantageFn):
    def __call__(self, exps, **kwargs):
        return exps, {}


@POLICY_LOSS_FN.register_module("plain_gradient")
class PlainGradient(PolicyLossFn):
    def __init__(self, backend: str = "verl", tau: float = 1.0, loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend=backend)
        self.tau = tau
        self.loss_agg_mode = loss_agg_mode

    def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
        loss = aggregate_loss(-advantages * logprob, action_mask, loss_agg_mode=self.loss_agg_mode)
        kl = masked_mean(old_logprob - logprob, action_mask)
        return loss / (1.0 + self.tau), {"kl": kl.detach().item()}

    @classmethod
    def default_args(cls):
        return {"tau": 1.0, "loss_agg_mode": "token-mean"}


@ALGORITHM_TYPE.register_module("own_type")
class OwnType(AlgorithmType):
    use_critic = False
    use_reference = False
    schema = "experience"

    @classmethod
    def default_config(cls):
        return {
            "repeat_times": 4,
            "advantage_fn": "centered",
            "sample_strategy": "warmup",
            "policy_loss_fn": "plain_gradient",
            "kl_penalty_fn": "none",
            "kl_loss_fn": "none",
            "entropy_loss_fn": "none",
        }


@SELECTORS.register_module("backwards")
class Backwards(BaseSelector):
    def __init__(self, data_source, config) -> None:
        super().__init__(data_source, config)
        self.size = data_source.dataset_size

    def get_indices(self, batch_size, return_extra_info=False):
        return list(range(self.size))[::-1][:batch_size]


@MONITOR.register_module("list_monitor")
class ListMonitor(Monitor):
    rows = []

    def __init__(self, project, group, name, role, config=None):
        super().__init__(project, name, role, config)

    def log(self, data, step, commit=False):
        self.rows.append((self.role, step, data))

    def close(self):
        self.rows.append((self.role, "closed"))
"""
TASK = Task("t", 0, 3, prompt="1+1?", truth="2", row={"question": "1+1?", "answer": "2"})


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "own_trinity_workflows.py").write_text(WORKFLOWS)
    (folder / "own_trinity_parts.py").write_text(PARTS)
    load_plugin_folders([str(folder)])
    yield sys.modules["own_trinity_parts"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "trinity"]:
        del sys.modules[name]


def attempt(workflow: str, *replies: str, **task: Any) -> list[Experience]:
    """The rows of a rollout by a workflow of the plug-in, in this process."""
    asked = Task(**{**vars(TASK), "workflow": workflow, **task})
    return asyncio.run(try_workflow(asked, replies, sandbox=SandboxConfig(mode="never")))


def test_one_experience_of_a_conversation_trains_all_calls(plugins: ModuleType) -> None:
    rows = attempt("asks_twice", "a", "b")
    assert [row.error for row in rows] == [""] * len(rows)
    assert {row.reward for row in rows} == {0.5} and rows[0].metrics["num_turns"] == 2.0
    text = "".join(row.response_text for row in rows)
    assert text.startswith("a") and text.endswith("b")


def test_steps_have_the_reward_of_the_last(plugins: ModuleType) -> None:
    rows = attempt("each_step", "go", "stop")
    assert [row.status for row in rows] == [Status.OK] * len(rows), rows[0].error
    assert {row.reward for row in rows} == {1.0}


def test_an_async_workflow_records_state_and_reward_per_turn(plugins: ModuleType) -> None:
    [row] = attempt("awaits_and_scores", "hello")
    assert (row.reward, row.metrics["length"], row.env_state, row.turn_reward) == (1.0, 5.0, "s0", 0.25)


@pytest.mark.parametrize("name", ["own_math", "own_trinity_workflows.OwnMath", "OwnMath"])
def test_workflows_are_found_by_name_class_and_path(plugins: ModuleType, name: str) -> None:
    [right] = attempt(
        name, "<think>x</think> <answer>2</answer>", reward_fn="says_truth", reward_fn_args={"bonus": 0.5}
    )
    assert right.error == "" and right.reward == 1.5 and right.metrics["truth"] == 1.0


def test_the_default_reward_of_a_math_workflow_is_ours(plugins: ModuleType) -> None:
    [right], [wrong] = attempt("own_math", "<answer>2</answer>"), attempt("own_math", "<answer>3</answer>")
    assert (right.reward or 0.0) > (wrong.reward or 0.0)


@pytest.mark.parametrize(
    ("name", "told"),
    [("KeepsBest", "KeepsBest returned 1 of 2 answers of the policy"), ("Nothing", "Nothing returned no experiences")],
)
def test_unsupported_workflow_features_are_reported(plugins: ModuleType, name: str, told: str) -> None:
    [row] = attempt(name, "x", reward_fn="says_truth")
    assert row.status is Status.FAILED and told in row.error


def test_a_reward_class_rewards_our_workflows(plugins: ModuleType) -> None:
    found = compute_reward(Task(**{**vars(TASK), "reward_fn": "says_truth"}), "it is 2", "math_reward")
    assert (found.value, found.metrics) == (1.0, {"truth": 1.0, "bonus": 0.0})


def test_operators_drop_and_reward_rows(plugins: ModuleType) -> None:
    table = ExperienceTable(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]))
    after, metrics = make_part("operator", "halves_and_filters", {"threshold": 0.5})(table)
    assert after.rewards_N.tolist() == [0.5, 0.0, 1.5]
    assert after.reasons_N.tolist() == [0, DropReason.LEFT_OUT, 0]
    assert metrics["kept"] == 2.0
    after, _ = make_part("operator", "awaits")(table)
    assert after.keep_N.tolist() == [True, False, False]
    with pytest.raises(UserError, match="unknown argument"):
        make_part("operator", "halves_and_filters", {"treshold": 0.5})


def test_an_algorithm_type_brings_its_advantage_and_its_loss(plugins: ModuleType) -> None:
    algorithm = make_algorithm("own_type", policy_loss_fn_args={"tau": 0.0})
    inputs = AdvantageInputs(rewards_N=torch.tensor([1.0, 0.0, 5.0]), group_N=torch.tensor([0, 0, 1]))
    assert algorithm.advantage_fn is not None
    found = algorithm.advantage_fn(inputs)
    assert found.advantages_N.tolist() == [1.0, -1.0, 0.0]  # scale 2 is its default argument
    mask_BT = torch.tensor([[True, True], [True, False]])
    logprobs_BT = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
    batch = LossInputs(
        policy_logprobs_BT=logprobs_BT,
        rollout_logprobs_BT=logprobs_BT.detach(),
        loss_mask_BT=mask_BT,
        token_weights_BT=mask_BT / 3.0,
        advantages_BT=torch.tensor([[1.0], [-1.0]]),
    ).cleaned()
    loss_BT, metrics = algorithm.policy_loss_fn(batch)
    loss = (loss_BT * batch.token_weights_BT).sum()
    loss.backward()
    # -(1 * -1 + 1 * -2 + -1 * -3) / 3
    assert loss.item() == pytest.approx(0.0, abs=1e-6) and float(metrics["kl"]) == 0.0
    assert logprobs_BT.grad is not None
    assert torch.allclose(logprobs_BT.grad, torch.tensor([[-1.0, -1.0], [1.0, 0.0]]) / 3)


def test_an_advantage_of_verls_batches_is_refused(plugins: ModuleType) -> None:
    with pytest.raises(
        UserError, match="OfVerl works on veRL's DataProto, which is not available here; derive it from GroupAdv"
    ):
        make_part("advantage_fn", "OfVerl")


def test_a_selector_orders_tasks(plugins: ModuleType) -> None:
    selector = make_selector(DataSelectorConfig(selector_type="backwards", seed=1))
    order = selector.order(torch.zeros(3, 0).double().numpy(), 1, None)  # type: ignore[arg-type]
    assert order.tolist() == [2, 1, 0]


def test_a_monitor_receives_metrics_by_role(plugins: ModuleType, tmp_path: Path) -> None:
    tracker = make_tracker("list_monitor", folder=tmp_path, project="p", name="n")
    tracker.log("trainer", 3, {"loss": 1.0})
    tracker.close()
    assert plugins.ListMonitor.rows == [("trainer", 3, {"loss": 1.0}), ("trainer", "closed")]


def test_a_blocking_method_has_its_own_name() -> None:
    method = ModelWrapper.generate
    assert (method.__name__, method.__qualname__) == ("generate", "ModelWrapper.generate")


def test_a_name_of_ours_cannot_be_taken(plugins: ModuleType) -> None:
    registry = sys.modules["trinity.common.workflows"].WORKFLOWS
    with pytest.raises(KeyError, match="math_workflow is already registered"):
        registry.register_module("math_workflow", type("Own", (), {"__module__": "own_trinity_parts"}))
    with pytest.raises(NotImplementedError, match="parts of kl_fn are written for rftdask itself"):
        sys.modules["trinity.algorithm"].KL_FN.register_module("k9")
