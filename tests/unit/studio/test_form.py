"""Form of a configuration. Promises: every key has a field with its explanation; a file passes through the form
unchanged; problems are reported at their keys; runs stay below the studio's folder; checking a form runs no user code
and uses no network.
"""

import json

import pytest
import yaml

from rftdask.config import Config, load_config
from rftdask.config.check import walk
from rftdask.driver.init_config import bundled
from rftdask.errors import UserError
from rftdask.studio.form import FIRST, ROOT, Fields, check_form, form_keys

CONFIGS = {name: path for name, path in bundled().items() if name.startswith("config/")}


def test_every_key_of_the_schema_has_an_explained_field() -> None:
    keys = form_keys()
    assert [path for path, key in keys.items() if not key.text] == []
    assert set(FIRST) <= keys.keys()
    # Keys inside a list or dict of sections are part of its YAML.
    leaves = {path for path, info in walk(Config) if hasattr(info, "annotation")}
    above = {path for path in leaves if any(other.startswith(f"{path}.") for other in leaves)} - keys.keys()
    assert {path for path in leaves if "[" not in path and "<" not in path} - above == keys.keys()


def test_a_field_is_of_the_kind_of_its_key() -> None:
    keys = form_keys()
    kinds = {"name": "text", "seed": "number", "private": "bool", "mode": "choice", "stages": "yaml"}
    kinds["algorithm.optimizer.lr"] = "number"
    assert {path: keys[path].kind for path in kinds} == kinds
    assert "grpo" in keys["algorithm.algorithm_type"].choices and "both" in keys["mode"].choices
    assert keys["algorithm.repeat_times"].default.startswith(("8", "computed"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_passes_through_the_form_unchanged(name: str) -> None:
    fields = Fields.of_file(CONFIGS[name].read_text())
    checked = check_form(fields, "/data/runs")
    assert (checked.problems, fields.rest) == ({}, "")
    wanted = load_config(CONFIGS[name], ["checkpoint_root_dir=/data/runs"])
    assert load_config(yaml.safe_load(checked.yaml)) == wanted
    # The recorded config of its run gives the same form.
    again = Fields.of_run(wanted)
    assert load_config(yaml.safe_load(check_form(again, "/data/runs").yaml)) == wanted and len(again.texts) < 70


def test_problems_are_reported_at_their_keys() -> None:
    texts = {"algorithm.repeat_times": "x", "mode": "bath", "explorer.env_vars": "{a", "model.no_such": "1"}
    checked = check_form(Fields(texts, "algoritm: {}"), "/data/runs")
    assert texts.keys() < checked.problems.keys()
    assert checked.problems["algorithm.repeat_times"] == "'x' is not a whole number"
    assert "did you mean both" in checked.problems["mode"] and "not valid YAML" in checked.problems["explorer.env_vars"]
    assert "algoritm" in checked.problems[""] and checked.problems["model.no_such"] == "unknown key"
    assert "required" in checked.problems["model.model_path"], "missing keys are reported at their key"


def test_the_form_cannot_move_runs_out_of_the_folder() -> None:
    fields = Fields.of_tree({ROOT: "/elsewhere", "name": "a", "model": {"model_path": "m"}})
    assert ROOT not in fields.texts
    for sly in (fields, Fields({ROOT: "/elsewhere", **fields.texts}), Fields(fields.texts, f"{ROOT}: /elsewhere")):
        tree, _ = sly.tree("/data/${runs}")
        assert tree[ROOT] == "/data/\\${runs}"
    checked = check_form(Fields({"name": "../../b"}), "/data/runs")
    assert "not a folder name" in checked.problems["name"]


def test_text_keeps_what_yaml_would_change() -> None:
    texts = {
        "name": "007",
        "algorithm.optimizer.lr": "1e-6",
        "cluster.slurm.template": "a\n  b: c\n",
        "private": "true",
    }
    tree, problems = Fields(texts).tree("/r")
    assert problems == {} and Fields.of_tree(tree).texts == {**texts, "algorithm.optimizer.lr": "1e-06"}
    assert (tree["name"], tree["algorithm"]["optimizer"]["lr"], tree["private"]) == ("007", 1e-6, True)


def test_checking_a_form_uses_neither_code_nor_network(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Evil"}}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1", "answer": "2"}\n')
    texts = {
        "model.model_path": str(tmp_path),
        "model.trust_remote_code": "true",
        "model.max_model_len": "64",
        "buffer.explorer_input.taskset.path": str(tasks),
        "buffer.explorer_input.default_reward_fn_type": "evil.reward",
    }
    checked = check_form(Fields(texts), "/data/runs")
    assert (checked.problems, checked.memory) == ({}, "not known: the model is not on this machine")
    assert "tasks per epoch  1" in checked.plan
    assert check_form(Fields({**texts, "model.model_path": "no/such"}), "/r").memory == checked.memory
    assert not (tmp_path / "ran").exists()


def test_estimate_memory_for_a_named_gpu() -> None:
    fields = Fields.of_file(CONFIGS["config/gsm8k-grpo.yaml"].read_text())
    assert "fits" in check_form(fields, "/r", "H100 80GB").memory
    assert "not known: --gpu" in check_form(fields, "/r", "nonsense").memory


def test_an_invalid_configuration_is_refused() -> None:
    for text in ("[1, 2]", "a: [", "- x"):
        with pytest.raises(UserError):
            Fields.of_file(text)
    assert "not valid YAML" in check_form(Fields({}, "a: ["), "/r").problems[""]
    assert check_form(Fields({"model.model_path": "m"}, "model: 3"), "/r").problems
