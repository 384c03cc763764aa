#!/usr/bin/env bash
# Expected: pyarrow and DuckDB, which read the same Parquet file, agree on the largest value of a column with a NaN.
# Happens:  pyarrow's max leaves NaN out although its mean does not; DuckDB's max is NaN, since NaN is its largest number,
#           while its greatest(1, NaN) is NaN and its least and min leave NaN out of the way. A filter x > 1.5 keeps NaN
#           in DuckDB and drops it in pyarrow.
# Hurts:    "the largest gradient norm", "rows above a bound": the same log gives two answers, and a bound that is checked
#           with pyarrow passes a run that has diverged.
# Seen:     pyarrow 26.0.1 and duckdb 2.0.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "pyarrow==26.0.1" "duckdb==2.0.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import math

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

column = pa.array([1.0, float("nan"), 2.0])
table = pa.table({"x": column})
arrow = [pc.max(column).as_py(), pc.min(column).as_py(), pc.mean(column).as_py()]
connection = duckdb.connect()
connection.register("log", table)
duck = list(connection.execute("select max(x), min(x), avg(x) from log").fetchone())
kept_by_arrow = table.filter(pc.field("x") > 1.5)["x"].to_pylist()
kept_by_duck = [x for (x,) in connection.execute("select x from log where x > 1.5").fetchall()]
print("pyarrow", pa.__version__, "max, min, mean:", arrow, "x > 1.5:", kept_by_arrow)
print("duckdb", duckdb.__version__, "max, min, mean:", duck, "x > 1.5:", kept_by_duck)
assert arrow[:2] == [2.0, 1.0] and math.isnan(arrow[2])
assert math.isnan(duck[0]) and duck[1] == 1.0 and math.isnan(duck[2])
assert kept_by_arrow == [2.0]
assert len(kept_by_duck) == 2
PYTHON
