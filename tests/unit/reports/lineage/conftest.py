import pytest
from lineage_cases import Case, make_run, new_root


@pytest.fixture(params=["memory", "local"])
def case(request, tmp_path) -> Case:
    return make_run(new_root(request.param, tmp_path))
