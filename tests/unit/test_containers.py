"""Files for other tools at the top of the repository: images, the citation and the issue forms."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
SECTIONS = {"files", "post", "test", "runscript", "help"}
FORM_PARTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def docker_instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each logical line. Raises: ValueError: an unknown instruction."""
    joined = re.sub(r"\\\n\s*", "", "".join(line for line in text.splitlines(True) if not line.startswith("#")))
    found = []
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.partition(" ")
        if word not in INSTRUCTIONS:
            raise ValueError(f"unknown instruction {word}")
        found.append((word, rest))
    return found


def apptainer_sections(text: str) -> dict[str, str]:
    """Text of each section; "": the header. Raises: ValueError: an unknown section."""
    parts = re.split(r"^%(\w+)\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    found = {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    if unknown := found.keys() - SECTIONS - {""}:
        raise ValueError(f"unknown sections {unknown}")
    return found


def built_from() -> set[str]:
    """Return the paths that hatchling reads to build the wheel."""
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PROJECT["project"]
    return {"pyproject.toml", project["readme"], *project["license-files"], *wheel["packages"], *wheel["force-include"]}


def test_the_docker_image_is_made_of_the_constrained_set() -> None:
    instructions = docker_instructions((ROOT / "Dockerfile").read_text())
    assert instructions[0][0] == "FROM" and [word for word, _ in instructions].count("FROM") == 1
    copied = {name.removeprefix("./") for word, rest in instructions if word == "COPY" for name in rest.split()[:-1]}
    assert copied == {"constraints.txt"} | built_from()
    assert [name for name in copied if not (ROOT / name).exists()] == []
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied
    extras = dict(rest.split("=") for word, rest in instructions if word == "ARG")["EXTRAS"].split(",")
    assert set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    commands = [rest for word, rest in instructions if word == "RUN"]
    assert any('-c constraints.txt ".[${EXTRAS}]"' in command for command in commands)
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    words = [word for word, _ in instructions]
    assert words.index("USER") > max(at for at, word in enumerate(words) if word == "RUN"), "it does not run as root"


def test_the_apptainer_image_is_the_same() -> None:
    docker = docker_instructions((ROOT / "Dockerfile").read_text())
    sections = apptainer_sections((ROOT / "apptainer.def").read_text())
    header = dict(line.split(": ") for line in sections[""].split("\n") if line)
    assert header == {"Bootstrap": "docker", "From": docker[0][1]}
    version = re.search(r"python:(\d\.\d+)", header["From"])
    assert version and version[1] in SpecifierSet(PROJECT["project"]["requires-python"])
    files = dict(line.split() for line in sections["files"].splitlines() if line)
    assert files == {name: f"/opt/rftdask/{name}" for name in {"constraints.txt"} | built_from()}
    for script in ("post", "test", "runscript"):
        subprocess.run(["bash", "-n", "-c", sections[script]], check=True)
    extras = dict(rest.split("=") for word, rest in docker if word == "ARG")["EXTRAS"]
    assert f'-c constraints.txt ".[{extras}]"' in sections["post"]
    # The same packages of the system.
    packages = [re.search(r"--no-install-recommends ([a-z+ ]+)", text) for text in (sections["post"], str(docker))]
    assert packages[0] and packages[1] and packages[0][1].split() == packages[1][1].split()


def test_a_mistake_in_them_is_seen() -> None:
    with pytest.raises(ValueError, match="CPOY"):
        docker_instructions("FROM a\nCPOY x y\n")
    with pytest.raises(ValueError, match="pots"):
        apptainer_sections("From: a\n%pots\n  x\n")


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "title", "message", "type", "authors", "version", "license", "abstract"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])
    assert all("name" in author or "family-names" in author for author in citation["authors"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_an_issue_form_is_one(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() == {"name", "description", "body"}
    identities = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(identities)) == len(identities) >= 2
    for part in form["body"]:
        assert part["type"] in FORM_PARTS and part["attributes"].get("value" if part["type"] == "markdown" else "label")
