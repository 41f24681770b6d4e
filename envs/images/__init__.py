"""Tasks whose repository lives in a container image: R2E-Gym, SWE-bench and their like."""
