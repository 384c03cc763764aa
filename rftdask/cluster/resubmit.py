"""Program that a driver's job runs near its walltime on systems that cannot requeue it: submits the next driver's job.

python -m rftdask.cluster.resubmit CONFIG
"""

from __future__ import annotations

import sys

from rftdask.cluster.base import find_cluster
from rftdask.cluster.jobqueue import JobQueueCluster
from rftdask.cluster.jobs import SUBMITTED_FILE, write_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import load_config
from rftdask.storage import open_storage

if __name__ == "__main__":
    config = load_config(sys.argv[1], was_checked=True)
    storage = open_storage(config.checkpoint_job_dir)
    system = find_cluster(config.cluster.type, config.explorer.plugin_dirs)
    assert issubclass(system, JobQueueCluster)
    job = system.submit_controller(config, SecretsDir.base_of(config, storage), storage)
    write_jobs(storage, [job], SUBMITTED_FILE)
