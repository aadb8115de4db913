"""Plans a session: what the user asks, where everything goes, and what a step moves and takes."""
