"""Driver: the process that starts a run. It checks the run, starts or joins the cluster, starts the roles of each stage
on its workers, watches and restarts them, and ends the run.

It does not know what the loop of a role does (explorer/, trainer/) or how workers are started (cluster/).
"""
