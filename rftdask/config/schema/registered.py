"""Registered: importing this reads the sources of the registered parts, of which a configuration is checked. What
processes are forked from does it for all of them; each by itself would parse sixty files.
"""

from rftdask.config.schema.algorithm import LABELS, registered_parts, registered_strategies
from rftdask.config.schema.buffer import registered_rewards, registered_workflows
from rftdask.config.schema.cluster import registered_clusters
from rftdask.config.schema.explorer import registered_engines
from rftdask.config.schema.trainer import registered_train_engines

for key in LABELS:
    registered_parts(key)
for read in (
    registered_strategies,
    registered_rewards,
    registered_workflows,
    registered_clusters,
    registered_engines,
    registered_train_engines,
):
    read()
