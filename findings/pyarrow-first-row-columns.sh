#!/usr/bin/env bash
# Expected: a table made of a list of rows has a column for each key of a row; missing values are null.
# Happens:  Table.from_pylist of pyarrow takes its columns from the first row. Keys that only later rows have are
#           dropped without a warning. Dataset.from_list of datasets does the same. pa.array of the same rows has the
#           fields of all rows, and so has a DataFrame.
# Hurts:    logs of metrics, where the first step has no evaluation yet: the evaluation is in none of the rows.
# Seen:     pyarrow 26.0.1, datasets 5.2.0 and pandas 3.1.1, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "pyarrow==26.0.1" "datasets==5.2.0" "pandas==3.1.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import datasets
import pandas as pd
import pyarrow as pa

rows = [{"loss": 1.5}, {"loss": 1.2, "accuracy": 0.3}]
columns = {
    "pyarrow Table.from_pylist": pa.Table.from_pylist(rows).column_names,
    "datasets Dataset.from_list": datasets.Dataset.from_list(rows).column_names,
    "pyarrow array": [field.name for field in pa.array(rows).type],
    "pandas DataFrame": list(pd.DataFrame(rows).columns),
}
print("pyarrow", pa.__version__, "datasets", datasets.__version__, "pandas", pd.__version__)
for name, found in columns.items():
    print(f"{name}: {found}")
assert list(columns.values()) == [["loss"], ["loss"], ["loss", "accuracy"], ["loss", "accuracy"]]
PYTHON
