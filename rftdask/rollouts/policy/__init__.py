"""Policy: the models that a workflow calls, as text over engine queues and remote services, with recording."""
