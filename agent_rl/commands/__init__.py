"""The bodies of the ``agent-rl`` commands; ``cli`` holds only their arguments."""
