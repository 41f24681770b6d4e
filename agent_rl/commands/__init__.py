"""What each ``agent-rl`` command does; ``cli`` holds only their arguments."""
