"""Strategies: how the ranks share a model. Whole on each (ddp.py), its weights in parts (fsdp2.py), its layers cut
(tensor.py).

A strategy says where weights, gradients and optimizer states lie, and knows neither batches nor losses.
"""
