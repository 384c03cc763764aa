#!/usr/bin/env bash
# Expected: a metric that is infinite is infinite when it is read again.
# Happens:  a store in a database, SQLite included, keeps the largest float instead: 1.797e308, and its negative. NaN comes
#           back as NaN. A store in files returns infinity.
# Hurts:    checks for a run that has diverged: math.isfinite holds for each loss read from the server, while the same
#           code finds the fault in a folder of files.
# Seen:     mlflow-skinny 3.17.2 with SQLAlchemy 2.1.9 and alembic 1.20.1, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "mlflow-skinny==3.17.2" "sqlalchemy==2.1.9" "alembic==1.20.1" || exit 75
cd "$folder"
export MLFLOW_DISABLE_TELEMETRY=true MLFLOW_ALLOW_FILE_STORE=true
venv/bin/python - 2>log <<'PYTHON' || { cat log; exit 1; }
import math
from pathlib import Path

import mlflow

losses = [1.0, math.inf, -math.inf, math.nan]
seen = {}
print("mlflow", mlflow.__version__)
for store in ["sqlite:///runs.db", Path("runs").resolve().as_uri()]:
    client = mlflow.MlflowClient(tracking_uri=store)
    run = client.create_run(client.create_experiment("diverged")).info.run_id
    for step, loss in enumerate(losses):
        client.log_metric(run, "loss", loss, step=step)
    kind = store.partition(":")[0]
    seen[kind] = [metric.value for metric in client.get_metric_history(run, "loss")]
    print(kind, seen[kind])
assert str(seen["file"]) == "[1.0, inf, -inf, nan]"
assert str(seen["sqlite"]) == "[1.0, 1.7976931348623157e+308, -1.7976931348623157e+308, nan]"
PYTHON
