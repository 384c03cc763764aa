"""Data-Juicer in an environment and a process of its own: its operators over the rows of a dataset, before a run.

    environment.py    where its environment is, and how it is made (rftdask data setup)
    runner.py         what runs there: the one file that imports Data-Juicer, and nothing of ours
    process.py        our end of that process: a deadline, its log, typed errors
    task_pipeline.py  `data_processor.task_pipeline`: a dataset in the run folder, with a report

Nothing here knows a taskset or a trainer; nothing elsewhere knows Data-Juicer.
"""
