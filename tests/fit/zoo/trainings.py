"""The zoo: trainings as people have them, by name. Each is a function that makes the same small FP64 training anew.

from fit.zoo.trainings import KINDS

training = KINDS["llama"]()
training.model, training.optimizer, training.loss, training.batches
"""

from fit.zoo import forwards, language, losses, stepping, vision
from fit.zoo.building import KINDS, Case, fp64_everywhere, seed

DOMAINS = {
    "language models": language,
    "images, sequences, graphs": vision,
    "losses and batches": losses,
    "forwards": forwards,
    "optimizers and steps": stepping,
}

__all__ = ["DOMAINS", "KINDS", "Case", "fp64_everywhere", "seed"]
