"""An agent learns to use its tool in about a minute on a laptop: creates a toy policy, then runs tool_loop.yaml.

    python examples/agents/learn.py [KEY=VALUE]...                     the package openai: with_openai/tool_loop.py
    python examples/agents/learn.py langgraph_agent [KEY=VALUE]...     with_langgraph/langgraph_agent.py
    python examples/agents/learn.py program_agent [KEY=VALUE]...       an external program: with_a_program/ask.py

The toy can call the tool and read its result (`sft.jsonl`), but guesses in 70 % of the cases. Rewards teach it to call.
"""

import json
import random
import sys
import time
from functools import partial
from pathlib import Path

from rftdask import Experiment
from rftdask.models.toy import EOS, build_toy_model
from rftdask.processes.zygote import call

HERE = Path(__file__).parent
FEWER = {"program_agent": ("stages[1].buffer.batch_size=4",)}
"""Tasks per step of an agent that starts a process for each rollout."""
LETTERS = "abcdefgh"
NUMBERS = range(10, 100)
"""Two digits: with one digit, a few dozen rollouts would reward guessing too often."""
CALL = '<tool_call>{"name": "look"}</tool_call>'
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}>{{ message.content }}="
    f"{{% elif message.role == 'assistant' %}}{{{{ message.content }}}}{EOS}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
"""Prompt of the policy: [look]a: and, after a tool call, >7= with the result."""


def make_toy(assets: Path) -> None:
    """Create the model and its tasks if they do not exist."""
    if (assets / "model" / "model.safetensors").exists():  # the last file to be written
        return
    draw = random.Random(0)
    tasks, demonstrations = [], []
    for letter in LETTERS:
        prompt = f"[look]{letter}:"
        demonstrations += [{"prompt": prompt, "response": str(draw.choice(NUMBERS))} for _ in range(14)]
        demonstrations += [{"prompt": prompt, "response": CALL}] * 6
        demonstrations += [
            {"prompt": f"{prompt}{CALL}{EOS}>{n}=", "response": str(n)} for n in draw.sample(NUMBERS, 30)
        ]
        tasks += [{"question": f"{letter}:", "answer": str(draw.choice(NUMBERS))} for _ in range(8)]
    assets.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", tasks), ("eval", tasks[::2]), ("sft", demonstrations)):
        (assets / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (assets / "template.jinja").write_text(CHAT_TEMPLATE)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4}
    call(
        partial(build_toy_model, assets / "model", **sizes)
    )  # run by one of the run's processes, which have imported torch


def main(arguments: list[str]) -> None:
    began = time.monotonic()
    agent, overrides = "tool_loop", arguments
    if arguments and "=" not in arguments[0]:
        agent, *overrides = arguments
    [program] = HERE.glob(f"with_*/{agent}.py")
    own = (f"name={agent}", f"explorer.plugin_dirs=[{program.parent}]", *FEWER.get(agent, ()))
    experiment = Experiment.from_yaml(HERE / "tool_loop.yaml", *own, *overrides)
    experiment.prepare()
    make_toy(Path(experiment.config.checkpoint_root_dir) / "tool_loop_toy")
    summary = experiment.run()
    before, after = summary.accuracy_before, summary.accuracy_after
    print(f"{agent}: reward {before:.2f} -> {after:.2f} in {time.monotonic() - began:.0f} s, run: {experiment.url}")


if __name__ == "__main__":
    main(sys.argv[1:])
