"""Learning cases: one per algorithm type, and further ones for its other promises.

To add a type, add a `Case` to CASES. Bounds hold for seeds 0 to 2, and a wrong sign, mask, baseline or clip violates
one of them. `python -m tests.learning NAME... [--all]` prints the measurements.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd

from rftdask.config.schema.algorithm import AlgorithmConfig
from tests.learning.harness import Run
from tests.learning.toys import LETTERS, after, build_policy, write_tables

Bounds = Mapping[str, tuple[float, float]]
Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A run of a toy. `bounds`: metric -> (least, most) after the run; the first metric is the purpose of the type."""

    algorithm_type: str
    bounds: Bounds = field(default_factory=lambda: {"accuracy": (0.9, 1.0)})
    toy: str = "gifts"
    """Tasks of the rollouts and of the evaluation."""
    dataset: str = ""
    """Dataset instead of rollouts, or in addition to them."""
    steps: int = 40
    lr: float = 3e-3
    model: str = "model"
    """The policy; "experts" is a mixture of experts."""
    settings: tuple[str, ...] = ()
    """Further settings, as on a command line: KEY=VALUE."""
    shows: str = ""
    """Purpose of a further case of a type."""

    @property
    def name(self) -> str:
        return f"{self.algorithm_type}-{self.shows}" if self.shows else self.algorithm_type


@dataclass(frozen=True)
class Result:
    """Metrics before and after a run; `steps` has those of the trainer's steps."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    steps: pd.DataFrame
    seconds: float


def _anchored(kl_name: str) -> tuple[str, ...]:
    return f"algorithm.kl_loss_fn={kl_name}", "algorithm.kl_loss_fn_args.kl_coef=1.0"


PREFERS = {"preference": (0.9, 1.0)}
NEAR = {"accuracy": (0.85, 1.0), "drift": (0.0, 0.95)}
TASKS = "buffer.explorer_input.taskset"
PAYS = "algorithm.kl_loss_fn=none", "algorithm.kl_penalty_fn=k1", "algorithm.kl_penalty_fn_args.kl_coef=1.0"
MANY_UPDATES = "synchronizer.sync_interval=16", "buffer.batch_size=4"

CASES = (
    # Rollouts compared with others of their task.
    *(Case(name) for name in ("asymre", "bnpo", "cispo", "dapo", "decoupled_ppo", "dr_grpo", "drpo", "opmd", "rec")),
    *(Case(name) for name in ("rloo", "sapo")),
    Case("remax", steps=60, settings=("buffer.batch_size=32",)),
    # Many updates from rollouts of the same weights: those that leave the trust region have no gradient.
    *(Case(name, NEAR, steps=48, settings=MANY_UPDATES) for name in ("dppo", "grpo", "gspo", "m2po", "sppo", "vespo")),
    # Rollouts without such a baseline.
    Case(
        "ppo",
        {"accuracy": (0.93, 1), "explained": (0.8, 1)},
        settings=("buffer.batch_size=64", "trainer.critic.lr=1e-2", "trainer.critic_warmup=4"),
    ),
    Case("reinforceplusplus", toy="debts"),
    Case("topr", {"accuracy": (0.85, 1), "drift": (0, 1.7)}, toy="debts", steps=48, settings=MANY_UPDATES),
    Case("raft"),
    *(Case("grpo", settings=(f"algorithm.advantage_fn={name}",), shows=name) for name in ("clipb", "clipv")),
    # The policy stays near its start although leaving it is rewarded.
    *(
        Case("grpo", {"kl": (0, 0.2)}, toy="echo", settings=_anchored(name), shows=name)
        for name in ("k2", "k3", "low_var_kl", "abs", "corrected_k3")
    ),
    # Credit: for a rollout, whose reward applies to all of its tokens, and for tokens.
    *(
        Case(name, {"strayed": (0, 0.3), "earned_last": (0.4, 1)}, toy="echo", settings=settings, shows="k1")
        for name, settings in {
            "grpo": (*PAYS, "algorithm.advantage_fn_args.std=none"),
            "reinforceplusplus": PAYS,
        }.items()
    ),
    Case(
        "grpo",
        {"entropy": (1.5, 6)},
        toy="echo",
        settings=("algorithm.entropy_loss_fn_args.entropy_coef=0.5",),
        shows="entropy",
    ),
    Case("grpo", settings=("model.lora_configs=[{lora_rank: 8, lora_alpha: 16}]",), lr=1e-2, shows="lora"),
    Case(
        "grpo",
        {"accuracy": (0.9, 1), "agreement": (0.5, 0.999)},
        model="experts",
        settings=("algorithm.enable_router_replay=true",),
        shows="experts",
    ),
    # Schedules: from easy to hard; from hot to cold; from a strong to a weak KL term.
    Case(
        "grpo",
        {"accuracy": (0.93, 1), "earned": (0.5, 1)},
        toy="stairs",
        settings=(f"{TASKS}.data_selector={{selector_type: offline_easy2hard, feature_keys: [low]}}",),
        steps=24,
        shows="curriculum",
    ),
    Case(
        "grpo",
        {"accuracy": (0.9, 1), "earned_first": (0, 0.2), "earned_last": (0.95, 1)},
        toy="echo",
        settings=(f"{TASKS}.rollout_args={{temperature: 4, final_temperature: 0.5, temperature_steps: 30}}",),
        shows="cooling",
    ),
    Case(
        "grpo",
        {"accuracy": (0.9, 1), "kl_first": (0, 0.1)},
        toy="echo",
        settings=("algorithm.kl_loss_fn_args={kl_coef: 1.0, final_coef: 0.0, schedule_steps: 20}",),
        shows="letting_go",
    ),
    # Several turns.
    Case("remax", toy="corridor", steps=60, settings=("buffer.batch_size=32",), shows="turns"),
    Case("gigpo", toy="corridor"),
    Case("multi_step_grpo", toy="corridor"),
    # Demonstrations in addition to rollouts, and a teacher.
    Case("mix", toy="unheard", dataset="unheard", lr=1e-2),
    Case("mix_chord", toy="unpaid", dataset="echo"),
    Case("on_policy_distill"),
    Case(
        "on_policy_distill",
        steps=60,
        settings=("algorithm.policy_loss_fn=importance_sampling",),
        shows="importance_sampling",
    ),
    Case("jsd"),
    Case("jsd", settings=("algorithm.policy_loss_fn_args={beta: 0.0}",), shows="forward"),
    Case("jsd", settings=("algorithm.policy_loss_fn_args={beta: 1.0}",), shows="reverse"),
    Case("jsd", dataset="echo", settings=("algorithm.sample_strategy=mix",), shows="mix"),
    *(
        Case("sft", toy="echo", dataset="chats", settings=(f"algorithm.policy_loss_fn={name}",), shows=name)
        for name in ("sft_is", "sft_phi")
    ),
    # Datasets.
    Case("sft", {"accuracy": (0.9, 1), "told": (0, 0.1)}, toy="echo", dataset="chats"),
    Case("cpt", toy="echo", dataset="text"),
    Case("dpo", PREFERS, toy="echo", dataset="pairs"),
    *(
        Case(
            "dpo",
            PREFERS,
            toy="echo",
            dataset="pairs",
            settings=(f"algorithm.policy_loss_fn_args={{loss_type: {name}}}",),
            shows=name,
        )
        for name in ("hinge", "ipo", "ipo_sum")
    ),
    Case("kto", PREFERS, toy="echo", dataset="pairs"),
    Case("orpo", PREFERS, toy="echo", dataset="pairs"),
    Case("simpo", PREFERS, toy="echo", dataset="pairs"),
    Case("reward_model", {"ranked": (0.9, 1)}, toy="echo", dataset="pairs"),
)

LONG = Case(
    "grpo",
    {"accuracy": (0.95, 1.0), "entropy": (0.2, 2.0), "kl": (0.0, 1.5), "drift": (0.0, 0.3)},
    toy="echo",
    steps=2000,
    lr=1e-3,
    # A tiny entropy coefficient, so that the entropy is measured.
    settings=("algorithm.kl_loss_fn_args.kl_coef=0.01", "algorithm.entropy_loss_fn_args.entropy_coef=1e-4"),
    shows="long",
)
"""Not a test: what happens when a run continues long after it has converged; see docs/algorithms.md."""


def instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """Decorate a function that replaces `owner.name` within a context, and gets the original as its first argument."""
    original = getattr(owner, name)

    def decorate(replacement: Callable[..., Any]) -> Patch:
        def replaced(*args: Any, **options: Any) -> Any:
            return replacement(original, *args, **options)

        return lambda: mock.patch.object(owner, name, replaced)

    return decorate


def config_of(case: Case, seed: int, toys: Path, workflows: str = "") -> dict[str, Any]:
    """Return the configuration of a case's run.

    workflows: module of the workflows followed by a dot, for processes that have not imported it.
    """
    columns = {"prompt_type": "raw", "prompt_key": "prompt", "response_key": "response"}
    workflow = workflows + (case.toy if case.toy in ("corridor", "stairs", "tool") else "echo")
    taskset = {"path": str(toys / f"{case.toy}.jsonl"), "format": columns, "default_workflow_type": workflow}
    explorer_input: dict[str, Any] = {"eval_tasksets": [{"name": "held", **taskset}]}
    trainer_input: dict[str, Any] = {}
    section = AlgorithmConfig(algorithm_type=case.algorithm_type)
    on_rollouts = section.schema_type == "experience"
    if case.dataset:
        chats = {"prompt_type": "messages", "messages_key": "messages", "enable_concatenated_multi_turn": True}
        shown = {
            "path": str(toys / f"{case.dataset}.jsonl"),
            "format": chats if case.dataset == "chats" else {"prompt_type": "raw"},
            "data_selector": {"selector_type": "shuffle"},
        }
        trainer_input = {"auxiliary_buffers": {"shown": shown}} if on_rollouts else {"experience_buffer": shown}
    if on_rollouts:
        trained = {"stairs": "climbs"}.get(case.toy, case.toy)
        explorer_input["taskset"] = {"name": "tasks", **taskset, "path": str(toys / f"{trained}.jsonl")}
    explorer: dict[str, Any] = {"tasks_per_batch": 8, "rollout_model": {"dtype": "float32"}}
    if section.needs_teacher:
        explorer["auxiliary_models"] = [{"model_path": str(toys / "teacher")}]
    return {
        "name": f"{case.name}-{seed}",
        "mode": "both" if on_rollouts else "train",
        "seed": seed,
        "model": {"model_path": str(toys / case.model), "max_prompt_tokens": 16, "max_response_tokens": 4},
        "algorithm": {
            "algorithm_type": case.algorithm_type,
            "optimizer": {"lr": case.lr, "betas": [0.9, 0.99], "weight_decay": 0.0},
        },
        "buffer": {
            **({} if on_rollouts else {"train_batch_size": 32}),
            "batch_size": 4 if case.toy in ("corridor", "tool") else 8,
            "total_epochs": 1000,
            "explorer_input": explorer_input,
            "trainer_input": trainer_input,
        },
        "explorer": explorer,
        # Weights are published every fourth step, so three of four steps train rollouts of older weights.
        "synchronizer": {"sync_interval": 4},
        "trainer": {"total_steps": case.steps, "save_interval": 1_000_000},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip


@cache
def toys_of(seed: int) -> Path:
    """Return a folder with the datasets, the policy and the teacher of a seed, created once per process."""
    folder = Path(tempfile.mkdtemp(prefix="rftdask-learning-"))
    write_tables(folder)
    build_policy(folder / "model", seed)
    build_policy(folder / "teacher", seed + 100, knows=True)
    return folder


@cache
def mixture_of(seed: int) -> Path:
    """Return the mixture-of-experts policy of a seed, stored next to the other one."""
    build_policy(folder := toys_of(seed) / "experts", seed, experts=True)
    return folder


def learn(case: Case, seed: int) -> Result:
    """Run the case and measure the policy before and after."""
    began = time.process_time()
    toys = toys_of(seed)
    if case.model == "experts":
        mixture_of(seed)
    with tempfile.TemporaryDirectory(prefix="rftdask-learning-") as folder:
        run = Run(config_of(case, seed, toys), case.settings, Path(folder))
        before, said = look_at(run), first_letters(run)
        steps = run.train()
        after = look_at(run) | look_back(steps) | {"strayed": strayed(said, first_letters(run))}
    return Result(before, after, steps, time.process_time() - began)


def look_at(run: Run) -> dict[str, float]:
    """Return metrics of the current policy.

    accuracy: share of right rollouts. length: characters (or turns) of a right rollout. preference: share of echo's
    right answers that are more likely than the next letter. told: probability of "?" after a right answer, which is the
    user's part of a chat.
    """
    ends = {(row.group_id, row.rollout): row.metrics for row in run.rollouts()}
    accuracy = np.array([metrics["accuracy"] for metrics in ends.values()])
    length = np.array([metrics["length"] for metrics in ends.values()])
    found = {"accuracy": float(accuracy.mean()), "length": float((accuracy * length).sum() / max(accuracy.sum(), 1))}
    wins = [run.logprob(f"{letter}:", letter) > run.logprob(f"{letter}:", after(letter)) for letter in LETTERS]
    told = [np.exp(run.logprob(f"{letter}:{letter}", "?")) for letter in LETTERS]
    return found | {"preference": float(np.mean(wins)), "told": float(np.mean(told))}


def first_letters(run: Run) -> np.ndarray:
    """Return [8, 9] probabilities of each letter as the first letter of echo's answers, and of all other tokens, by
    question.
    """
    asked = [(f"{letter}:", said) for letter in LETTERS for said in LETTERS]
    letters = np.exp([run.logprob(*each) for each in asked]).reshape(len(LETTERS), len(LETTERS))
    return np.column_stack([letters, np.maximum(1.0 - letters.sum(1), 1e-12)])


def strayed(before: np.ndarray, after: np.ndarray) -> float:
    """Return the mean KL of the policy after a run from the policy before it, in nats."""
    return float((after * np.log(np.maximum(after, 1e-12) / before)).sum(1).mean())


def look_back(steps: pd.DataFrame) -> dict[str, float]:
    """Return metrics of a whole run.

    drift: largest KL from the weights that sampled a batch to those that train it, in nats per token, which clips
    bound. ranked: share of the pairs whose better response has the higher reward, in the last five steps. agreement:
    with replayed experts, the share of the engine's experts that the trainer would choose, minimum over the steps.
    kl_first: KL of the first ten steps; kl is that of the last five. earned: mean reward of the rollouts of all steps;
    earned_first, earned_last: of the first four, of the last five. explained: share of the variance of the returns that
    the critic explains, in the last five steps.
    """
    found = {name: float(steps[name].iloc[-5:].mean()) for name in ("kl", "entropy") if name in steps}
    if "kl" in steps:
        found["kl_first"] = float(steps["kl"].iloc[:10].mean())
    if "reward" in steps:
        spans = {"earned": slice(None), "earned_first": slice(4), "earned_last": slice(-5, None)}
        found |= {name: float(steps["reward"].iloc[span].mean()) for name, span in spans.items()}
    if "mismatch_kl" in steps:
        found["drift"] = float(steps["mismatch_kl"].max())
    if "router_agreement" in steps:
        found["agreement"] = float(steps["router_agreement"].min())
    if "reward_accuracy" in steps:
        found["ranked"] = float(steps["reward_accuracy"].iloc[-5:].mean())
    if "critic_explained_variance" in steps:
        found["explained"] = float(steps["critic_explained_variance"].iloc[-5:].mean())
    return found


def crossed(case: Case, after: Mapping[str, float]) -> list[str]:
    """Return a sentence for each bound of the case that the metrics violate."""
    return [
        f"{case.name}: {name} is {after[name]:.3f}, not within [{least:g}, {most:g}]"
        for name, (least, most) in case.bounds.items()
        if not least <= after[name] <= most
    ]
