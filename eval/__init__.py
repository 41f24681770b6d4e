"""Evaluation on SWE-bench: generate, grade with the official harness, report, resume."""
