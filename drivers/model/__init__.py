"""The model on the workers: its parameters, gradients, optimizers and state, as the controller handles them."""
