"""Promises about the profiles and templates of a site.

- A profile lies below the keys of a configuration, is found by name in the user's folder or by path, and is read once:
  the loaded configuration no longer names it, so a job never reads it.
- The template of scripts may be a file, whose text takes its place.
- A file that cannot be read, or holds keys outside `cluster`, is one mistake that names the file.
"""

from pathlib import Path

import pytest
from config_cases import config, grpo, problems

from rftdask.config import load_config

PROFILE = """
cluster:
  type: slurm
  interface: ib0
  slurm:
    template: wrap.sh
    controller: {partition: small, walltime: "08:00:00"}
    trainer: {partition: gpus, gres: "gpu:h100:4", account: group7}
"""
WRAP = "{% extends 'job.sh' %}{% block command %}nice {{ command }}; echo ${HOME}{% endblock %}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rftdask"
    folder.mkdir()
    (folder / "leonardo.yaml").write_text(PROFILE)
    (folder / "wrap.sh").write_text(WRAP)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return folder


@pytest.mark.parametrize("by_path", [False, True])
def test_a_profile_lies_below_the_keys_of_a_configuration(site: Path, by_path: bool) -> None:
    name = str(site / "leonardo.yaml") if by_path else "leonardo"
    loaded = config(grpo(), f"cluster.slurm.profile={name}", "cluster.slurm.trainer.account=mine")
    cluster = loaded.cluster
    assert (cluster.type, cluster.interface, cluster.slurm.controller.partition) == ("slurm", "ib0", "small")
    assert (cluster.slurm.trainer.gres, cluster.slurm.trainer.account) == ("gpu:h100:4", "mine")
    assert cluster.slurm.template == WRAP


def test_a_loaded_config_does_not_read_site_files_again(site: Path, tmp_path: Path) -> None:
    loaded = config(grpo(), "cluster.slurm.profile=leonardo")
    for file in site.iterdir():
        file.unlink()
    assert loaded.cluster.slurm.profile is None
    submitted = tmp_path / "submitted.yaml"
    submitted.write_text(loaded.to_yaml())
    assert load_config(submitted).cluster == loaded.cluster
    assert load_config(loaded.to_dict()).cluster == loaded.cluster


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        ("trainer: {num_ranks: 4}", "a profile has only the section cluster, and not trainer"),
        ("cluster: {slurm: {profile: other}}", "cluster.slurm.profile: a profile must not name another profile"),
        ("cluster: [", "not valid YAML"),
        ("cluster: {slurm: {template: none.sh}}", "none.sh cannot be read"),
    ],
)
def test_a_profile_with_other_keys_is_an_error(site: Path, profile: str, told: str) -> None:
    (site / "leonardo.yaml").write_text(profile)
    assert told in "\n".join(problems(grpo(), "cluster.slurm.profile=leonardo"))


def test_a_missing_profile_is_reported_with_the_searched_places(site: Path) -> None:
    [told] = problems(grpo(), "cluster.slurm.profile=marconi")
    assert f"profile 'marconi' does not exist: neither {site}/marconi.yaml nor /etc/rftdask/marconi.yaml" in told
