"""Promises of the secrets directory."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from distributed.security import Security

from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.errors import UserError
from rftdask.storage import open_storage
from tests.unit.cluster.batch_cases import configured, private


def test_only_the_owner_may_read_keys_and_address(tmp_path: Path) -> None:
    folder = private(configured(tmp_path))
    with pytest.raises(UserError, match="no TLS keys"):
        folder.security()
    made = folder.make_keys()
    assert isinstance(made, Security) and made.require_encryption
    folder.write_address("tls://127.0.0.1:1")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.path.iterdir()} == {0o600}
    before = (folder.path / "key.pem").read_bytes()
    assert folder.make_keys() and (folder.path / "key.pem").read_bytes() == before  # later workers have them


def test_keys_are_valid_on_a_clock_that_is_behind(tmp_path: Path) -> None:
    folder = private(configured(tmp_path))
    folder.make_keys()
    certificate = x509.load_pem_x509_certificate((folder.path / "cert.pem").read_bytes())
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc < now - timedelta(days=300)
    assert certificate.not_valid_after_utc > now + timedelta(days=300)


def test_an_address_is_removed_only_by_its_owner(tmp_path: Path) -> None:
    folder = private(configured(tmp_path))
    folder.write_address("tls://127.0.0.1:2")
    folder.remove_address("tls://127.0.0.1:1")
    assert folder.read_address() == "tls://127.0.0.1:2"
    folder.remove_address("tls://127.0.0.1:2")
    assert folder.read_address() is None


def test_explore_and_train_commands_have_own_schedulers(tmp_path: Path) -> None:
    config = configured(tmp_path)
    storage = open_storage(config.checkpoint_job_dir)
    apart = [private(configured(tmp_path, f"mode={mode}")) for mode in ("explore", "train")]
    assert [folder.path for folder in apart] == [private(config).path / "explore", private(config).path / "train"]
    assert SecretsDir.base_of(config, storage).path == private(config).path
    apart[0].make()
    assert stat.S_IMODE(private(config).path.stat().st_mode) == 0o700
