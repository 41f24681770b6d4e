"""Experiments of many runs, resumable, one folder per run."""
