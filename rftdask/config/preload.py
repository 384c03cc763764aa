"""Configuration with its registered parts read and its validator built, for a process whose forks load one.

Importing the schema builds no validator, so that a command that needs none starts faster. Forks share the one built
here.
"""

import rftdask.config.parts  # noqa: F401  # reads the registered parts
from rftdask.config.schema.run import Config

Config.model_rebuild()
