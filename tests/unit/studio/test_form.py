"""The form of a configuration. Promises: every key has a field with its explanation; a file that goes through the form
comes back as the same configuration; what is wrong is said at its key; runs stay below the studio's folder; no code of
the user's is run and no network asked while somebody types.
"""

import json

import pytest
import yaml

from rftdask.config import Config, load_config
from rftdask.config.schema.walk import walk
from rftdask.driver.init_config import bundled
from rftdask.errors import UserError
from rftdask.studio.form import FIRST, ROOT, Fields, check_form, form_keys

CONFIGS = {name: path for name, path in bundled().items() if name.startswith("config/")}


def test_every_key_of_the_schema_has_a_field_that_explains_it() -> None:
    keys = form_keys()
    assert [path for path, key in keys.items() if not key.text] == []
    assert set(FIRST) <= keys.keys()
    # A key within a list or a dict of sections is in the YAML of that.
    leaves = {path for path, told in walk(Config) if hasattr(told, "annotation")}
    above = {path for path in leaves if any(other.startswith(f"{path}.") for other in leaves)} - keys.keys()
    assert {path for path in leaves if "[" not in path and "<" not in path} - above == keys.keys()


def test_a_field_is_of_the_kind_of_its_key() -> None:
    keys = form_keys()
    assert {
        path: keys[path].kind for path in ("name", "seed", "private", "mode", "stages", "algorithm.optimizer.lr")
    } == {
        "name": "text",
        "seed": "number",
        "private": "bool",
        "mode": "choice",
        "stages": "yaml",
        "algorithm.optimizer.lr": "number",
    }
    assert "grpo" in keys["algorithm.algorithm_type"].choices and "both" in keys["mode"].choices
    assert keys["algorithm.repeat_times"].default == "8" or keys["algorithm.repeat_times"].default.startswith(
        "computed"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_that_goes_through_the_form_is_the_same_configuration(name: str) -> None:
    fields = Fields.of_file(CONFIGS[name].read_text())
    checked = check_form(fields, "/data/runs")
    assert (checked.problems, fields.rest) == ({}, "")
    wanted = load_config(CONFIGS[name], ["checkpoint_root_dir=/data/runs"])
    assert checked.config == wanted == load_config(yaml.safe_load(checked.yaml))
    # And what its run wrote down, as somebody would have to say it.
    again = Fields.of_run(wanted)
    assert check_form(again, "/data/runs").config == wanted and len(again.texts) < 70


def test_what_is_wrong_stands_at_its_key() -> None:
    texts = {"algorithm.repeat_times": "x", "mode": "bath", "explorer.env_vars": "{a", "model.no_such": "1"}
    checked = check_form(Fields(texts, "algoritm: {}"), "/data/runs")
    assert checked.config is None and texts.keys() < checked.problems.keys()
    assert checked.problems["algorithm.repeat_times"] == "'x' is not a whole number"
    assert "did you mean both" in checked.problems["mode"] and "not valid YAML" in checked.problems["explorer.env_vars"]
    assert "algoritm" in checked.problems[""] and checked.problems["model.no_such"] == "unknown key"
    assert "required" in checked.problems["model.model_path"], "what is missing has a key, too"


def test_runs_stay_below_the_folder_whatever_the_form_says() -> None:
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


def test_typing_runs_no_code_and_asks_no_network(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_is_said_of_a_gpu_that_is_named() -> None:
    fields = Fields.of_file(CONFIGS["config/gsm8k-grpo.yaml"].read_text())
    assert "fits" in check_form(fields, "/r", "H100 80GB").memory
    assert "not known: --gpu" in check_form(fields, "/r", "nonsense").memory


def test_what_is_no_configuration_is_refused() -> None:
    for text in ("[1, 2]", "a: [", "- x"):
        with pytest.raises(UserError):
            Fields.of_file(text)
    assert "not valid YAML" in check_form(Fields({}, "a: ["), "/r").problems[""]
    assert check_form(Fields({"model.model_path": "m"}, "model: 3"), "/r").problems
