"""The buffer: everything sampled (log/), and the batches that are trained of it (batches/).

A run folder that trains another one's batches again says so in a file (lineage.py). The buffer knows neither engines
nor optimizers: explorers commit to the log, trainers ask for the batch of a step.
"""
