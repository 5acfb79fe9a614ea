"""Trainers of other libraries, with the model on workers. Each file needs the library that it is named after."""
