"""From what was measured to the techniques to apply, and the words for it."""
