"""Grammars: the text of a model to tool calls, and the results of calls to text."""
