"""A stand-in for Data-Juicer, in an environment of its own: the names that runner.py uses, over a list of rows.

text_length_filter(min_len)      measures text_len and alnum_ratio, drops shorter texts
upper_mapper                     changes the text, and keeps a column for itself
half_mapper                      halves the column `reward`
needs_mapper                     would install ftfy, as the real one does, when its first row comes
needs_model_filter               would install torch when it is made
fails_mapper, dies_mapper, dies_once_mapper, hangs_mapper, counts_aggregator     as their names say

The service of the reference system also runs over it; it has the names that the service uses (get_init_configs, ...).
"""

import os
import sys
import time
import types

ROW = "__rftdask_row__"


class LazyLoader:
    """Marks an installation by a file, where the test looks for it."""

    @classmethod
    def _install_package(cls, package_spec, pip_args=None):
        open(os.environ["FAKE_INSTALLED"], "w").close()


class PipelineConfigError(Exception):
    def __init__(self, errors):
        self.errors = errors


class Mistake:
    def __init__(self, op_name, text):
        self.op_name, self.text = op_name, text

    def __str__(self):
        return f"[{self.op_name}] {self.text}"


class NestedDataset:
    def __init__(self, rows):
        self.rows = rows
        self.column_names = list(rows[0]) if rows else [ROW]

    @classmethod
    def from_list(cls, rows):
        if len({tuple(row) for row in rows}) > 1:
            raise ValueError("a dataset has the columns of its first row")
        # As Arrow has them: what is a whole number in one row and not in another is none in any.
        fractions = {key for row in rows for key, value in row.items() if isinstance(value, float)}
        return cls([{key: float(v) if key in fractions and v is not None else v for key, v in r.items()} for r in rows])

    def to_list(self):
        return [dict(row) for row in self.rows]

    def with_format(self, kind):
        return self

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, column):
        return [row[column] for row in self.rows]

    def process(self, operators, open_monitor=True):
        print("what a library prints")
        print(f"{operators[0]._name} in {operators[0].num_proc} processes")
        base_op.free_models()
        return NestedDataset(operators[0].run(self.to_list()))


class Operator:
    def __init__(self, name, text_key="text", num_proc=1, min_len=0):
        self._name, self.text_key, self.min_len, self.num_proc = name, text_key, min_len, num_proc
        if name == "needs_model_filter":
            LazyLoader._install_package("torch")

    def run(self, rows):
        kind = self._name.partition("_")[0]
        if kind == "needs":
            LazyLoader._install_package("ftfy")
        if kind == "fails":
            raise RuntimeError("no such verb")
        if self._name == "dies_once_mapper":
            died = os.environ["FAKE_INSTALLED"] + ".died"
            if os.path.exists(died):
                return rows
            open(died, "w").close()
        if kind == "dies":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(7)
        if kind == "hangs":
            time.sleep(600)
        if kind == "counts":
            return [{"count": len(rows)}]
        for row in rows:
            text = row[self.text_key]
            if kind == "half":
                row["reward"] = row["reward"] / 2
            elif kind == "upper":
                row.update({self.text_key: text.upper(), "__dj__own": 1})
            else:
                alnum = sum(map(str.isalnum, text)) / len(text)
                row["__dj__stats__"] = {"text_len": len(text), "alnum_ratio": alnum, "perplexity": None}
        return [row for row in rows if len(row[self.text_key]) >= self.min_len]


KNOWN = {
    *("text_length_filter", "upper_mapper", "needs_mapper", "needs_model_filter", "fails_mapper", "dies_mapper"),
    *("hangs_mapper", "counts_aggregator", "dies_once_mapper", "half_mapper"),
}


def pre_instantiation_check(process):
    wrong = [Mistake(name, "unknown operator") for entry in process for name in entry if name not in KNOWN]
    if wrong:
        raise PipelineConfigError(wrong)


def load_ops(process):
    return [Operator(name, **args) for entry in process for name, args in entry.items()]


def free_models(clear_model_zoo=True):
    raise ImportError("torch is asked for", name="torch")


def _module(name, **content):
    module = types.ModuleType(f"data_juicer.{name}")
    vars(module).update(content)
    sys.modules[module.__name__] = module
    return module


_module("utils")
_module("utils.lazy_loader", LazyLoader=LazyLoader)
sys.modules["data_juicer.utils"].model_utils = _module("utils.model_utils", MODEL_ZOO={})
base_op = _module("ops.base_op", free_models=free_models)
_module("ops", load_ops=load_ops, base_op=base_op)
_module("core")
_module("core.preflight", PipelineConfigError=PipelineConfigError, pre_instantiation_check=pre_instantiation_check)
_module("core.data", NestedDataset=NestedDataset)
