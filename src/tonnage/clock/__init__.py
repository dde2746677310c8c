"""How long work takes on a card: launches in, seconds out. Torch stays outside."""
