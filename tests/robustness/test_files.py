"""Promise: a torn, unusual or misnamed file is refused by its name before anything starts."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hostile import assert_mendable, refused_run

from rftdask.config import load_config
from rftdask.run.input_fingerprints import InputFingerprints
from tests.integration.run_cases import call_cli, write_config

TASKSET = "buffer.explorer_input.taskset"
DEEP = 5_000


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


def unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def content(data: bytes | str) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(data if isinstance(data, bytes) else data.encode()), None)[1]


ROW = '{"question": "1+1=", "answer": "2"}\n'

YAML_FILES = {
    "empty": content(""),
    "only a comment": content("# nothing\n"),
    "a number": content("7\n"),
    "a list": content("- 1\n- 2\n"),
    "a word": content("hello\n"),
    "an open bracket": content("trainer: [1, 2\n"),
    "a tab": content("trainer:\n\ttotal_steps: 3\n"),
    "a NUL byte": content(b"name: a\x00b\n"),
    "no UTF-8": content(b"name: \xff\xfe\n"),
    "UTF-16": content("name: fake\n".encode("utf-16")),
    "gzip": content(gzip.compress(b"name: fake\n")),
    "two documents": content("name: a\n---\nname: b\n"),
    "a key twice": content("name: a\nname: b\n"),
    "a number as key": content("1: 2\n"),
    "a list as key": content("? [1, 2]\n: 3\n"),
    "null as key": content("null: 3\n"),
    "a Python object": content("name: !!python/object/apply:os.system ['id']\n"),
    "an alias of itself": content("trainer: &a\n  x: *a\n"),
    "an unknown alias": content("trainer: *nobody\n"),
    "a laughing alias": content(
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True))
    ),
    "brackets that nest": content("trainer: " + "[" * DEEP + "]" * DEEP + "\n"),
    "maps that nest": content("trainer: " + "{a: " * DEEP + "}" * DEEP + "\n"),
    "lines that nest": content("".join(" " * i + "a:\n" for i in range(DEEP // 5))),
    "a date": content("seed: 2026-01-01\n"),
    "a hexadecimal name": content("trainer: {total_steps: 0x}\n"),
    "JSON, torn": content('{"name": "fake", "trainer": {'),
    "a FIFO": fifo,
    "a folder": folder,
    "a link to itself": loop,
    "nothing at all": lambda path: None,
}


@pytest.mark.parametrize("make", YAML_FILES.values(), ids=YAML_FILES.keys())
@pytest.mark.timeout(120)
def test_a_configuration_that_is_none(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "config.yaml")
    for command in ("validate", "run"):
        assert_mendable(call_cli(command, str(tmp_path / "config.yaml")), "config.yaml")


TASK_FILES = {
    "empty.jsonl": content(""),
    "blank.jsonl": content("\n\n  \n"),
    "torn.jsonl": content(ROW + '{"question": "1+'),
    "nul.jsonl": content(ROW + "\0\0\0\n"),
    "binary.jsonl": content(bytes(range(256))),
    "latin.jsonl": content(b'{"question": "caf\xe9", "answer": "1"}\n'),
    "utf16.jsonl": content(ROW.encode("utf-16")),
    "numbers.jsonl": content("1\n2\n"),
    "lists.jsonl": content('["1+1=", "2"]\n'),
    "strings.jsonl": content('"1+1="\n'),
    "null.jsonl": content("null\n"),
    "array.jsonl": content("[" + ROW.strip() + "]\n"),
    "other_columns.jsonl": content('{"q": "1+1=", "a": "2"}\n'),
    "half.jsonl": content(ROW + '{"question": "1+1="}\n'),
    "null_question.jsonl": content(ROW + '{"question": null, "answer": "2"}\n'),
    "number_question.jsonl": content('{"question": 7, "answer": "2"}\n'),
    "list_question.jsonl": content('{"question": ["1"], "answer": "2"}\n'),
    "object_question.jsonl": content('{"question": {"a": 1}, "answer": "2"}\n'),
    "deep.jsonl": content('{"question": ' + "[" * DEEP + "]" * DEEP + ', "answer": "2"}\n'),
    "nan.jsonl": content('{"question": NaN, "answer": "2"}\n'),
    "empty_rows.jsonl": content("{}\n{}\n"),
    "tasks.json": content('{"question": '),
    "number.json": content("7"),
    "deep.json": content("[" * DEEP + "]" * DEEP),
    "tasks.csv": content("question;answer\n1+1=;2\n"),
    "header_only.csv": content("question,answer\n"),
    "ragged.csv": content('question,answer\n1,2,3,4\n"5\n'),
    "text.parquet": content("this is no parquet"),
    "torn.parquet": content(b"PAR1" + bytes(100)),
    "empty.parquet": content(b""),
    "tasks.unknown": content(ROW),
    "gzip.jsonl": content(gzip.compress(ROW.encode())),
    "fifo.jsonl": fifo,
    "fifo.parquet": fifo,
    "folder.jsonl": folder,
    "folder": folder,
    "loop.jsonl": loop,
    "missing.jsonl": lambda path: None,
    "no_such_folder/tasks.jsonl": lambda path: None,
}


@pytest.mark.parametrize("name", TASK_FILES)
@pytest.mark.timeout(120)
def test_tasks_that_are_none(config: Path, name: str, tmp_path: Path) -> None:
    TASK_FILES[name](tmp_path / name)
    assert_mendable(call_cli("run", str(config), f"{TASKSET}.path={tmp_path / name}"), Path(name).name)


SUPERVISED = {
    "messages without roles": [{"messages": [{"content": "hello"}]}],
    "no messages": [{"messages": []}],
    "messages that are text": [{"messages": "hello"}],
    "messages that are numbers": [{"messages": [1, 2]}],
    "content that is a number": [{"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": 8}]}],
    "nothing to learn": [{"messages": [{"role": "user", "content": "hello"}]}],
}


@pytest.mark.parametrize("rows", SUPERVISED.values(), ids=SUPERVISED.keys())
def test_supervised_rows_that_teach_nothing(rows: list[dict[str, object]], toy_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "mode": "train",
        "name": "sft",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {
            "model_path": str(toy_model),
            "max_model_len": 64,
            "max_prompt_tokens": 32,
            "max_response_tokens": 32,
        },
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {
            "train_batch_size": 1,
            "trainer_input": {"experience_buffer": {"path": str(data), "format": {"messages_key": "messages"}}},
        },
        "trainer": {"total_steps": 1},
        "monitor": {"monitor_type": "none"},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert_mendable(call_cli("run", str(tmp_path / "sft.yaml")), "sft.jsonl")


MODELS = {
    "nothing": lambda path: None,
    "an empty folder": folder,
    "a file": content("weights"),
    "a FIFO": fifo,
    "a link to itself": loop,
    "config.json torn": lambda path: (path.mkdir(), (path / "config.json").write_text("{"))[0],
    "config.json a list": lambda path: (path.mkdir(), (path / "config.json").write_text("[]"))[0],
    "config.json of no model": lambda path: (path.mkdir(), (path / "config.json").write_text("{}"))[0],
    "config.json nests": lambda path: (path.mkdir(), (path / "config.json").write_text("[" * DEEP + "]" * DEEP))[0],
    "config.json of an unknown model": lambda path: (
        path.mkdir(),
        (path / "config.json").write_text('{"model_type": "no_such_model"}'),
    )[0],
    "config.json a FIFO": lambda path: (path.mkdir(), os.mkfifo(path / "config.json"))[0],
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.timeout(120)
def test_a_model_that_is_none(config: Path, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "policy")
    real = ("explorer.rollout_model.engine_type=transformers", "trainer.trainer_type=torch")
    assert_mendable(call_cli("run", str(config), f"model.model_path={tmp_path / 'policy'}", *real), "policy")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "config.json torn": lambda path: (path / "config.json").write_text("{"),
    "tokenizer.json torn": lambda path: (path / "tokenizer.json").write_text('{"version"'),
    "tokenizer.json missing": lambda path: (path / "tokenizer.json").unlink(),
    "tokenizer.json empty": lambda path: (path / "tokenizer.json").write_text(""),
    "tokenizer.json of another shape": lambda path: (path / "tokenizer.json").write_text('{"model": ["a"]}'),
    "tokenizer_config.json nests": lambda path: (path / "tokenizer_config.json").write_text("[" * DEEP + "]" * DEEP),
    "generation_config.json nests": lambda path: (path / "generation_config.json").write_text("[" * DEEP + "]" * DEEP),
    "weights are a FIFO": lambda path: ((path / "model.safetensors").unlink(), fifo(path / "model.safetensors"))[0],
    "tokenizer_config.json torn": lambda path: (path / "tokenizer_config.json").write_text("{"),
    "weights missing": lambda path: (path / "model.safetensors").unlink(),
    "weights empty": lambda path: (path / "model.safetensors").write_bytes(b""),
    "weights torn": lambda path: (path / "model.safetensors").write_bytes(
        (path / "model.safetensors").read_bytes()[:-100]
    ),
    "weights are text": lambda path: (path / "model.safetensors").write_text("these are no weights at all"),
    "weights with an absurd header": lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64),
    "fewer words than the tokenizer": lambda path: edit(path / "config.json", vocab_size=8),
    "no layers": lambda path: edit(path / "config.json", num_hidden_layers=0),
    "layers of another size": lambda path: edit(path / "config.json", hidden_size=24),
}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.timeout(120)
def test_a_model_that_is_damaged(damage: Callable[[Path], None], toy_model: Path, tmp_path: Path) -> None:
    shutil.copytree(toy_model, tmp_path / "policy")
    damage(tmp_path / "policy")
    config = write_config(tmp_path)
    real = ("explorer.rollout_model.engine_type=transformers", "trainer.trainer_type=torch")
    refused_run(config, f"model.model_path={tmp_path / 'policy'}", *real, words=("policy",))


@pytest.mark.parametrize("name", ["x.py", "_x.py"])
@pytest.mark.timeout(60)
def test_a_fifo_among_plugins_is_not_waited_for(config: Path, name: str, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    fifo(tmp_path / "plugins" / name)
    settings = (f"explorer.plugin_dirs=[{tmp_path}/plugins]", "algorithm.policy_loss_fn=ppoo")
    assert_mendable(call_cli("run", str(config), *settings), "plugins/x.py" if name == "x.py" else "ppoo")
    found = InputFingerprints.of(load_config(config, settings[:1]), (), {}, is_first=True)
    assert not found.sources
