"""Loading: reads a file, checks each key, computes absent keys, and checks across keys, once per stage.

Knows the order of these steps and no key except `stages` and `name`. Invariant: the result is a Config that keeps every
rule, or one ConfigError with all mistakes; nothing is created or changed elsewhere.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from rftdask.config.base import Problem, is_env_interpolated, is_user_defined, join, plain, rules_of, sections_of
from rftdask.config.check import Checker
from rftdask.config.cross_checks import data, hosted, rollouts, training
from rftdask.config.cross_checks.warnings import warn
from rftdask.config.defaults import Fills, fill
from rftdask.config.parts import named_parts
from rftdask.config.schema.run import Config
from rftdask.config.trinity.reference_defaults import NAME, keys_of_reference, read_as_reference
from rftdask.config.trinity.translate import leaves, translate
from rftdask.config.yaml_source import add_site, escape, merge, read_tree
from rftdask.errors import ConfigError
from rftdask.storage.safe_text import find_secret, is_secret_name, mask

ORIGINS = ("", "rftdask", "trinity")
"""Systems for which a file may have been written; "": detected from its keys."""
_STAGE_KEYS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    was_checked: bool = False,
    origin: str = "",
) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a YAML file, or its content as a mapping. `${model.model_path}` and `${oc.env:VAR,default}`
            are resolved, except `${oc.env:VAR}` in arguments of the user's code and in URLs with a password, which
            stay (`fill_from_environment`).
        overrides: "key.sub=value", the value as YAML; list items as key[0].sub. The last one wins.
        was_checked: an earlier start wrote `source`, which may contain secrets.
        origin: system for which the file was written, which decides the defaults: "rftdask", "trinity" (Trinity-RFT
            0.6.0), or "": trinity if it has a key that only Trinity-RFT has.
    Raises: ConfigError: all mistakes, sorted by path. A secret is a mistake.
    """
    problems: list[Problem] = []
    if origin not in ORIGINS:
        raise ConfigError([f"--from {origin}: use rftdask or trinity"])
    if wrong := [override for override in overrides if not isinstance(override, str)]:
        raise ConfigError([f"override {override!r} is not text; give each as 'key.sub=value'" for override in wrong])

    def stays(path: str, value: str) -> bool:
        # Texts with environment variables stay as written if only the user's code reads them, or if they would contain
        # a secret.
        return is_user_defined(Config, path) or (is_env_interpolated(Config, path) and bool(find_secret(value)))

    tree = read_tree(source, overrides, problems, stays)
    if tree is None:
        raise _error(problems, source)
    tree = add_site(tree, problems)
    # Keys that cannot be read are reported once: later checks would only add that they are missing.
    unreadable = {path for path, _ in problems}
    checker = Checker(has_secrets=was_checked)
    # Before keys are moved. A tree of an earlier start has all its values.
    foreign = next(iter(keys_of_reference(tree)), "") if origin == "" and not was_checked else ""
    written = dict(leaves(tree))
    tree, notes = translate(tree)
    defaults: list[Problem] = []
    if origin == "trinity" or foreign:
        more_notes, defaults = read_as_reference(tree)
        notes += more_notes
    checker.warnings.extend(notes)
    cleaned = checker.clean(tree)
    draft = checker.validate(cleaned)
    if "stages" not in unreadable and draft.stages:
        checker.warnings.extend(_hidden_by_stages(overrides, draft))
        config = _with_stages(draft, cleaned, checker)
    else:
        config = _complete(cleaned, checker, unreadable)
    problems += [problem for problem in checker.problems if problem[0] not in unreadable]
    if problems:
        raise _error(problems, source)
    if origin == "trinity" or foreign:
        config._origin = f"{NAME} ({f'it has {foreign}' if foreign else '--from trinity'})"
    config._defaults = _lines(defaults)
    config._changes = _changes(written, dict(leaves(cleaned)))
    return config


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a new, checked Config with changed keys: `replace(config, {"model.model_path": "..."})`.

    Values are literal, "${" included. List items cannot be addressed; lists can be replaced. Keys that were computed
    from a changed key keep their values; change them as well, or set them to None.
    Raises: ConfigError; a secret in a changed value is a mistake.
    """
    tree = config.to_dict()
    for path, value in changes.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = escape(value)
    return load_config(tree, was_checked=not find_secret(str(dict(changes))))


def _complete(cleaned: dict[str, Any], checker: Checker, unreadable: set[str]) -> Config:
    """Config of a cleaned tree without stages: absent keys are computed, then rules across keys are checked."""
    tree = deepcopy(cleaned)
    # Twice: the second validation checks the bounds of computed keys.
    _set(tree, fill(checker.validate(tree)))
    config = checker.validate(tree)
    broken = {path for path, _ in checker.problems} | unreadable

    def can_read(keys: Sequence[str]) -> bool:
        """False if one of these keys, or a key above or below it, is broken."""
        pairs = [pair for path in broken for key in keys for pair in ((path, key), (key, path))]
        return not any(a == b or a.startswith((f"{b}.", f"{b}[")) for a, b in pairs)

    for place, section in sections_of(config):
        for keys, rule in rules_of(type(section)):
            if can_read([join((*place, key)) for key in keys]):
                problems = ((join((*place, key) if key else place), message) for key, message in rule(section))
                checker.problems.extend(problems)
    for keys, rule in (rule for module in (training, data, rollouts, hosted) for rule in rules_of(module)):
        if can_read(keys):
            checker.problems.extend(rule(config))
    for use in named_parts(config):
        if use.registered is not None:  # only `check_plugins` imports plug-ins
            checker.problems.extend(use.problems(use.registered))
    if not checker.problems:
        checker.warnings.extend(warn(config))
    config._warnings = _lines(checker.warnings)
    return config


def _with_stages(draft: Config, cleaned: dict[str, Any], checker: Checker) -> Config:
    """Config of a tree with stages, each of which is checked as a whole Config."""
    # Stages are merged into the cleaned tree, so that its mistakes are reported once, not in every stage.
    base = {key: value for key, value in cleaned.items() if key != "stages"}
    stages = []
    inherited = tuple(checker.warnings)
    for index, stage in enumerate(draft.stages):
        parts = {key: plain(getattr(stage, key)) for key in _STAGE_KEYS if getattr(stage, key) is not None}
        stage_checker = Checker(has_secrets=checker.has_secrets)
        # Cleaned again, because a stage may use old names, and its mistakes are reported with its name.
        parts, moved = translate(parts)  # first, so that keys of the stage win over those of the file
        merged, notes = translate(merge({**base, "name": f"{draft.name}/{stage.stage_name}"}, parts))
        stage_checker.warnings.extend(moved + notes)
        tree = stage_checker.clean(merged)
        stages.append(_complete(tree, stage_checker, {path for path, _ in checker.problems}))
        where = f"stages[{index}] ({stage.stage_name})"
        checker.problems.extend((f"{where}: {path}", message) for path, message in stage_checker.problems)
        new = [warning for warning in stage_checker.warnings if warning not in inherited]
        checker.warnings.extend((f"{where}: {path}", message) for path, message in new)
        stages[-1]._warnings = _lines([*inherited, *new])
    names = [stage.stage_name for stage in draft.stages]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"{names.count(name)} stages are named {name!r}; give each a unique name"
        checker.problems.append(("stages", message))
    _set(cleaned, fill(draft))
    config = checker.validate(cleaned)
    config._stages = tuple(stages)
    config._unfilled = plain(draft)
    config._warnings = _lines(checker.warnings)
    return config


def _hidden_by_stages(overrides: Sequence[str], draft: Config) -> list[Problem]:
    """Overrides without effect, because every stage sets the key."""
    keys_of_stages = [dict(leaves({key: plain(getattr(stage, key)) for key in _STAGE_KEYS})) for stage in draft.stages]
    paths = [override.partition("=")[0] for override in overrides]
    last = len(keys_of_stages) - 1
    message = f"changes nothing: every stage sets it; set stages[{last}].{{}}, or that of another stage"
    return [(path, message.format(path)) for path in paths if all(path in keys for keys in keys_of_stages)]


def _changes(written: Mapping[str, Any], read: Mapping[str, Any]) -> tuple[str, ...]:
    """Leaves that differ between two trees, as lines of a diff, without secrets."""
    lines: list[str] = []
    for key in sorted({*written, *read}):
        pairs = (("-", written.get(key)), ("+", read.get(key)))
        if pairs[0][1] != pairs[1][1]:
            hidden = is_secret_name(key.rpartition(".")[2])
            lines += [mask(f"{sign} {key}: {'***' if hidden else value}") for sign, value in pairs if value is not None]
    return tuple(lines)


def _set(tree: dict[str, Any], fills: Fills) -> None:
    for loc, value in fills.items():
        node: Any = tree
        for part in loc[:-1]:
            node = node[part] if isinstance(part, int) else node.setdefault(part, {})
        node[loc[-1]] = value


def _lines(items: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{path}: {message}" if path else message for path, message in sorted(items)))


def _error(problems: list[Problem], source: str | Path | Mapping[str, Any]) -> ConfigError:
    return ConfigError([mask(line) for line in _lines(problems)], "" if isinstance(source, Mapping) else str(source))
