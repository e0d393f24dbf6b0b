"""More than one rank: who they are, and how they agree."""
