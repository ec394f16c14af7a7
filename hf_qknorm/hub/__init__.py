"""Model cards, and pushes to the Hub."""
