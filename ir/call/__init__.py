"""A call of the model: of which kinds its arguments are, what the example has fixed, and how it is bound."""
