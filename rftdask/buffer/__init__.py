"""The buffer: the log of everything sampled (log/), and the batches that are trained from it (batches/).

The buffer knows neither engines nor optimizers: explorers commit to the log, trainers request the batch of a step.
"""
