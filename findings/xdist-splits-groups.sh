#!/usr/bin/env bash
# Expected: with --dist loadgroup all tests of one xdist_group run in the same worker process, one after the other.
# Happens:  with pytest 9.2 the tests of a group are dealt to all workers, without a warning; with pytest 9.1 they are not.
# Hurts:    tests that share a port, a database or a GPU, or that are grouped to pay for an expensive fixture once: they
#           meet each other, and fail now and then.
# Seen:     pytest 9.2.0 and 9.1.1 with pytest-xdist 3.8.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >test_group.py <<'PYTHON'
import os

import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_of_group(number):
    with open("workers", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\n")
PYTHON
: >pytest.ini # no settings of a folder above
"${PYTHON:-python3}" -m venv venv || exit 75
for version in 9.1.1 9.2.0; do
  venv/bin/pip install --quiet --disable-pip-version-check "pytest==$version" "pytest-xdist==3.8.0" || exit 75
  rm -f workers
  venv/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadgroup >log || { cat log; exit 1; }
  workers=$(sort -u workers | wc -l)
  echo "pytest $version, pytest-xdist 3.8.0: 8 tests of one group ran in $workers worker(s)"
  declare "workers_${version//./_}=$workers"
done
[[ $workers_9_1_1 == 1 && $workers_9_2_0 == 2 ]]
