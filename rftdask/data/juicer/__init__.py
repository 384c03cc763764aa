"""Data-Juicer: runs its operators over rows, in an environment and a process of its own, or in an existing service.

    environment.py    location of the environment, and how it is made (rftdask data setup)
    runner.py         program that runs there: the only file that imports Data-Juicer, and nothing of rftdask
    base.py           Juicer: interface for running a pipeline over rows; recipes and lists of operators
    process.py        client of that process: a deadline, its log, typed errors
    service.py        client of the HTTP service of the reference system
    session.py        chooses between the two

This folder knows neither tasksets nor trainers, and only it knows Data-Juicer. Its users are the dataset of a run
(data/task_pipeline.py), an operator over experiences (algorithm/operators.py) and `rftdask data refine`.
"""
