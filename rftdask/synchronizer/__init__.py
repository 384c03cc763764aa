"""Weights from the trainer to the explorers: manifests, the pointer, the sync styles, and the actor that watches."""
