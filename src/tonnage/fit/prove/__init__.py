"""A step taken without moving anything, to see its peak, and the comparison of its gradients with the plain model's."""
