"""Data: rows of datasets and databases (datasets.py, database.py), read as tasks to explore (tasksets.py) or as token
sequences to learn from (supervised.py), and which tasks an explore step runs (task_schedule.py).

What a column means is said by the configuration. The folder does not know how workflows run a task, nor rewards.
"""
