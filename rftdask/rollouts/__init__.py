"""Rollouts: tasks in, experiences out. Runs work units on explorer workers."""
