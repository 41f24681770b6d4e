"""Measurements as ratios inside one run; each module has ``main`` and writes flat JSON."""
