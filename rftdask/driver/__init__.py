"""Driver: the process in which a run was started. It checks the run, builds or joins the cluster, starts the roles of
each stage on its workers, watches and restarts them, and ends the run.

It does not know what a role does in its loop (explorer/, trainer/) nor how workers are started (cluster/).
"""
