"""Data: rows of datasets and databases (datasets.py, database.py), read as tasks to explore (tasksets.py) or as token
sequences to learn from (supervised.py), and the tasks of each explore step (task_schedule.py).

The configuration gives columns their meaning. The folder knows neither workflows nor rewards.
"""
