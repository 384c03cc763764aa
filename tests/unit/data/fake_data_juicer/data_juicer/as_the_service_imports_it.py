"""The names that the reference system's service uses, over the operators of this package; a dataset is datasets'."""

import sys
import types
from types import SimpleNamespace

from datasets import Dataset

import data_juicer

STATS = "__dj__stats__"


def executor(cfg):
    def run(dataset):
        columns, rows = dataset.rows.column_names, dataset.rows.to_list()
        for entry in cfg.process:
            for name, args in entry.items():
                rows = data_juicer.Operator(name, **args).run(rows)
        return Dataset.from_list(rows) if rows else Dataset.from_list([], features=None).add_column(columns[0], [])

    return SimpleNamespace(run=run)


sys.modules["jsonargparse"] = types.SimpleNamespace(Namespace=SimpleNamespace)
data_juicer._module("config", get_init_configs=lambda config: config, prepare_side_configs=lambda path: path)
data_juicer._module("utils.constant", Fields=SimpleNamespace(stats=STATS))
sys.modules["data_juicer.core.data"].NestedDataset = lambda rows: SimpleNamespace(rows=rows)
data_juicer._module("core.executor")
data_juicer._module("core.executor.default_executor", DefaultExecutor=executor)
