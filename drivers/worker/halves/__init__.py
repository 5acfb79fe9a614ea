"""A stage's backward in two halves: gradients of inputs first, those of weights later."""
