"""Experiments of many runs, resumable, one folder a run."""
