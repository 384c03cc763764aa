#!/usr/bin/env bash
# Expected: a query of one Parquet file by its path sees the columns of the file with their values.
# Happens:  if a folder above the file has a name with an equals sign, DuckDB takes it for a partition: it adds a column of
#           text, and a column of that name in the file is replaced by it. pyarrow and pandas show the file. Two equals
#           signs in one name, such as lr=0.1,seed=3, switch this off.
# Hurts:    sweeps, which name the folder of a run by its settings: "lr" is the text of the folder in every row instead of
#           the rate that was used at each step, and a filter on it compares text.
# Seen:     duckdb 2.0.0 and pyarrow 26.0.1, November 2026; hive_partitioning = false gives the column of the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "duckdb==2.0.0" "pyarrow==26.0.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import os

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

log = pa.table({"step": [1, 2], "lr": [0.05, 0.1]})
seen = {}
print("duckdb", duckdb.__version__, "pyarrow", pa.__version__)
for name in ["run", "lr=0.1", "lr=0.1,seed=3"]:
    os.mkdir(name)
    pq.write_table(log, f"{name}/log.parquet")
    by_arrow = pq.read_table(f"{name}/log.parquet")["lr"].to_pylist()
    by_duck = [lr for (lr,) in duckdb.sql(f"select lr from '{name}/log.parquet' order by step").fetchall()]
    seen[name] = by_duck
    print(f"{name}/log.parquet: pyarrow {by_arrow}, DuckDB {by_duck}")
    assert by_arrow == [0.05, 0.1]
    query = f"select lr from read_parquet('{name}/log.parquet', hive_partitioning = false) order by step"
    assert duckdb.sql(query).fetchall() == [(0.05,), (0.1,)]
assert seen == {"run": [0.05, 0.1], "lr=0.1": ["0.1", "0.1"], "lr=0.1,seed=3": [0.05, 0.1]}
PYTHON
