#!/usr/bin/env bash
# Expected: the sum of a column of integers is an integer, as the column is.
# Happens:  in SQL the sum is an integer of 128 bits, for which numpy has no type. df() and fetchnumpy() return float64
#           instead, so sums above 2**53 lose their last digits. The largest value and the count stay int64. fetchall()
#           returns exact Python integers and Arrow gets a decimal.
# Hurts:    sums of byte counts, nanoseconds and hashes, and comparisons with the same sum by pandas or pyarrow, which
#           is int64. A table of counts prints as 3.0 instead of 3.
# Seen:     duckdb 2.0.0 with pandas 3.1.1, November 2026; sum(x)::bigint gives int64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "duckdb==2.0.0" "pandas==3.1.1" "pyarrow==26.0.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import duckdb
import pandas as pd

log = pd.DataFrame({"nanoseconds": [2**53, 1]})
query = "select sum(nanoseconds) as total, max(nanoseconds) as largest, count(*) as rows from log"
result = duckdb.sql(query)
frame, exact = result.df(), result.fetchall()[0][0]
types = {name: str(kind) for name, kind in frame.dtypes.items()}
print("duckdb", duckdb.__version__, "pandas", pd.__version__, "exact sum:", 2**53 + 1)
print("pandas:    ", log["nanoseconds"].sum(), log["nanoseconds"].sum().dtype)
print("fetchall():", exact)
print("df():      ", int(frame["total"][0]), types)
print("Arrow:     ", result.to_arrow_table().schema.field("total").type)
assert exact == int(log["nanoseconds"].sum()) == 2**53 + 1
assert types == {"total": "float64", "largest": "int64", "rows": "int64"}
assert int(frame["total"][0]) == 2**53
assert str(result.to_arrow_table().schema.field("total").type).startswith("decimal128(38")
assert str(duckdb.sql("select sum(nanoseconds)::bigint as total from log").df().dtypes["total"]) == "int64"
PYTHON
