"""Values of workers that compute on devices: what the runtime asks of a GPU, and how values get to it and from it."""
