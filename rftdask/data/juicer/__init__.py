"""Data-Juicer: its operators over rows, in an environment and a process of its own, or in a service that is there.

    environment.py    where its environment is, and how it is made (rftdask data setup)
    runner.py         what runs there: the one file that imports Data-Juicer, and nothing of ours
    base.py           Juicer: a pipeline over rows, whoever runs it; recipes and lists of operators
    process.py        our end of that process: a deadline, its log, typed errors
    service.py        our end of the HTTP service of the reference system
    session.py        which of the two

Nothing here knows a taskset or a trainer; nothing elsewhere knows Data-Juicer. Its users: the dataset of a run
(data/task_pipeline.py), an operator over experiences (algorithm/operators.py), and datasets of datasets (curate).
"""
