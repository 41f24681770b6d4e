"""Agents of other projects on these sandboxes."""
