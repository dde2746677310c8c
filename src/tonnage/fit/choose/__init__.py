"""Choose techniques from measurements, and describe the choice."""
