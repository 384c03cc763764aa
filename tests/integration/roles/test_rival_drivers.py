"""Two drivers of one run, started in the same second: one runs, the other is refused and changes nothing."""

from pathlib import Path

import pytest

from tests.integration import run_cases as runs

pytestmark = pytest.mark.slow
SETTINGS = ("trainer.total_steps=2", "buffer.explorer_input.eval_tasksets=[]", "--progress", "plain")


@pytest.mark.parametrize("pair", range(2))
def test_of_two_drivers_in_one_second_one_runs(pair: int, tmp_path: Path) -> None:
    config = runs.write_config(tmp_path)
    command = ("run", str(config), *SETTINGS)
    with runs.RunProcess(*command) as first, runs.RunProcess(*command) as second:
        ended = sorted((first.end(), second.end()), key=lambda process: process.code)
    assert [process.code for process in ended] == [0, 2], ended
    assert ended[1].err.count("\n") == 1, ended
    assert "is in use" in ended[1].err or "another process has just started" in ended[1].err, ended
    first.wait_for_no_survivors()
    second.wait_for_no_survivors()
    assert runs.assert_sound(runs.run_folder(config))["step"] == 2
