"""Promises of `rftdask doctor` without a storage: it finds what is installed here."""

import pytest

from rftdask.cli.checks.doctor import diagnose_machine


@pytest.mark.slow
def test_the_doctor_reports_installed_packages() -> None:
    findings = {finding.part: finding for finding in diagnose_machine()}
    assert findings["torch"].state == "ok" and findings["rftdask"].text.startswith("0.")
    # SLURM may be broken: its commands may be installed without a controller that answers.
    assert {finding.state for part, finding in findings.items() if part != "SLURM"} <= {"ok", "missing"}
