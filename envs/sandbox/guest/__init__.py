"""The half of the sandbox that runs inside it. Standard library only, importable on its own.

The folder is mounted read-only into the sandbox and imported there as the top-level package
``guest``, without site-packages; the host imports the same modules as ``envs.sandbox.guest``.
"""
