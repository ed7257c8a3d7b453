"""What runs in the rank processes, and the server that forks them: the only room with torch."""
